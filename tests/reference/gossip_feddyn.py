"""FedDyn (arXiv:2111.04263) without a server, in dense numpy, in the signs of the ADMM family.

Every node is its own server: it keeps a model w^(i) and its own copy lam_bar^(i) of the mean
dual, besides its lam_i. Where the server averages, a node mixes; M = W^Q is the round's matrix.

    w^(i) = w^0, lam_i = 0, lam_bar^(i) = 0 for all i
    for t = 0 .. T-1, for all i at once:
        K steps on  f_i(w) + <lam_i, w> + (alpha/2) ||w - w^(i)||^2  from w_0 = w^(i):
            w_{k+1} = w_k - lr_t (g_i(w_k) + lam_i + alpha (w_k - w^(i)) + wd w_k)
        z_i = w_K
        dlam_i = alpha (z_i - w^(i))
        lam_bar^(i) <- sum_j M_ij (lam_bar^(j) + dlam_j)
        w^(i) <- sum_j M_ij z_j + lam_bar^(i) / alpha            (the new lam_bar^(i))
        lam_i <- lam_i + dlam_i

Decisions: all nodes are active, so the server's (1/C) sum over P is the mean that the mix
replaces. ri_center: centre of the proximal term and of the dual step under a relaxed start,
w^(i) ("server") or w_0 ("start"), as in feddyn.py. A failed node keeps w^(i), which holds its
lam_bar^(i)/alpha already: nothing is added to it again. W doubly stochastic keeps the mean of the
lam_bar^(i) at the mean of the lam_i.
"""

from typing import Any

import numpy as np

from .gossip import GossipHistory, Mixing, Network
from .problem import Array, LeastSquares, center_of


def run(
    problem: LeastSquares,
    w0: Array,
    mixing: Mixing,
    *,
    alpha: float = 0.1,
    ri_center: str = "server",
    **common: Any,
) -> GossipHistory:
    lam = lam_bar = np.zeros((problem.num_clients, problem.dim))  # row i of lam_bar: lam_bar^(i)
    f = Network(problem, w0, lam=lam, lam_bar=lam_bar, **common)
    w = f.start_models()
    for t, W, lr_t in f.rounds(mixing):
        up = f.working(t)
        z, dlam = w.copy(), np.zeros_like(lam)
        for i in up:
            w_k = f.start(i, w[i])
            center = center_of(ri_center, w[i], w_k)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g + lam[i] + alpha * (w_k - center) + f.wd * w_k)
            z[i] = f.end(i, w_k)
            dlam[i] = alpha * (w_k - center)
        M = f.power(W, t)
        lam = lam + dlam
        lam_bar = M @ (lam_bar + dlam)
        w = w.copy()
        w[up] = (M @ z + lam_bar / alpha)[up]
        f.record(w, z, lam=lam, lam_bar=lam_bar)
    return f.history(lam=lam, lam_bar=lam_bar)
