"""DFedAvgM - arXiv:2104.11375, Algorithm 1, in dense numpy: heavy ball within a round.

    x_i = x^0 for all i
    for t = 0 .. T-1, for all i at once:
        y_{-1} = y_0 = x_i
        for k = 0 .. K-1:
            y_{k+1} = y_k - lr_t (g_i(y_k) + wd y_k) + theta (y_k - y_{k-1})
        z_i = y_K
        x_i <- sum_j (W^Q)_ij z_j

theta is the argument momentum. Decisions: the momentum starts from rest in every round, at the
relaxed start if there is one; weight decay enters the momentum, as in torch's SGD without
dampening; the clip acts on g_i alone. Q, relaxed starts and failing nodes as in dfedavg.py.
"""

from typing import Any

from .gossip import GossipHistory, Mixing, Network
from .problem import Array, LeastSquares


def run(
    problem: LeastSquares, w0: Array, mixing: Mixing, *, momentum: float = 0.9, **common: Any
) -> GossipHistory:
    f = Network(problem, w0, **common)
    theta = momentum
    x = f.start_models()
    for t, W, lr_t in f.rounds(mixing):
        z = x.copy()
        for i in f.working(t):
            y = y_old = f.start(i, x[i])
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, y)
                y, y_old = y - lr_t * (g + f.wd * y) + theta * (y - y_old), y
            z[i] = f.end(i, y)
        x = f.power(W, t) @ z
        f.record(x, z)
    return f.history()
