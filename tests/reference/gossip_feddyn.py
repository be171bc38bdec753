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

import numpy as np

from .gossip import GossipHistory, Network, decentralised


@decentralised
def run(f: Network, alpha: float = 0.1) -> GossipHistory:
    w, lam, lam_bar = f.copies(f.w0), f.zeros(), f.zeros()  # row i of lam_bar: lam_bar^(i)
    for t, W, _ in f.rounds(lam=lam, lam_bar=lam_bar):
        up = f.working(t)
        z, dlam = w.copy(), np.zeros_like(lam)
        for i in up:
            w_0 = f.start(i, w[i])
            center = f.center(w[i], w_0)
            z[i] = f.train(t, i, w_0, lambda w_k, g: g + lam[i] + alpha * (w_k - center))
            dlam[i] = alpha * (z[i] - center)
        M = f.power(W, t)
        lam = lam + dlam
        lam_bar = M @ (lam_bar + dlam)
        w = w.copy()
        w[up] = (M @ z + lam_bar / alpha)[up]
        f.record(w, z, lam=lam, lam_bar=lam_bar)
    return f.history(lam=lam, lam_bar=lam_bar)
