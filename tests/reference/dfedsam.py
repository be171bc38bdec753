"""DFedSAM and DFedSAM-MGS - arXiv:2302.04083, in dense numpy.

    x_i = x^0 for all i
    for t = 0 .. T-1:
        for all i:
            y_0 = x_i
            for k = 0 .. K-1:
                e = r g_i(y_k) / ||g_i(y_k)||
                y_{k+1} = y_k - lr_t (g_i(y_k + e) + wd y_k)             (same batch, clipped)
            z_i = y_K
        Q times, for all i at once:   z_i <- sum_j W_ij z_j
        x_i = z_i

r is the argument sam_rho, Q is gossip_steps; Q = 1 is DFedSAM. Decisions: y_0 is set once before
the local steps; the Q mixes are all there are, there is no further one before them; 1e-12 is added
to the norm. Relaxed starts and failing nodes as in dfedavg.py.
"""

from typing import Any

from . import topology
from .gossip import GossipHistory, Mixing, Network
from .problem import Array, LeastSquares, ascent


def run(
    problem: LeastSquares, w0: Array, mixing: Mixing, *, sam_rho: float = 0.1, **common: Any
) -> GossipHistory:
    f = Network(problem, w0, **common)
    x = f.start_models()
    for t, W, lr_t in f.rounds(mixing):
        z = x.copy()
        for i in f.working(t):
            y = f.start(i, x[i])
            for k in range(f.K(i)):
                e = ascent(f.raw(t, i, k, y), sam_rho)
                g = f.clipped(t, i, k, y + e)
                y = y - lr_t * (g + f.wd * y)
            z[i] = f.end(i, y)
        x = z.copy()
        for _ in range(f.gossip_steps):
            x = topology.without(W, f.failed(t)) @ x
        f.record(x, z)
    return f.history()
