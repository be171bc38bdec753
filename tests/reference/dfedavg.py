"""DFedAvg - arXiv:2104.11375, in dense numpy.

    x_i = x^0 for all i
    for t = 0 .. T-1, for all i at once:
        y_0 = x_i
        for k = 0 .. K-1:   y_{k+1} = y_k - lr_t (g_i(y_k) + wd y_k)
        z_i = y_K
        x_i <- sum_j (W^Q)_ij z_j

Decisions: a round trains, then mixes, so x_i is what a node trains from next; W is the round's
own matrix, Q (gossip_steps) is one in the paper. Relaxed start (ri_beta): y_0 = x_i + ri_beta
(x_i - l_i), l_i the z_i of the node's last round of training, x_i^0 before it. ri_first_visit
changes nothing here: a node that has not trained yet still holds x_i^0.
"""

from typing import Any

from .gossip import GossipHistory, Mixing, Network
from .problem import Array, LeastSquares


def run(problem: LeastSquares, w0: Array, mixing: Mixing, **common: Any) -> GossipHistory:
    f = Network(problem, w0, **common)
    x = f.start_models()
    for t, W, lr_t in f.rounds(mixing):
        z = x.copy()
        for i in f.working(t):
            y = f.start(i, x[i])
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, y)
                y = y - lr_t * (g + f.wd * y)
            z[i] = f.end(i, y)
        x = f.power(W, t) @ z
        f.record(x, z)
    return f.history()
