"""SCAFFOLD (arXiv:1910.06378, option II) without a server, in dense numpy.

Every node is its own server: it keeps a model w^(i) and its own copy c^(i) of the server's
variate, besides its c_i. Where the server averages, a node mixes; M = W^Q is the round's matrix.

    w^(i) = w^0, c_i = 0, c^(i) = 0 for all i
    for t = 0 .. T-1, for all i at once:
        w_0 = w^(i)
        for k = 0 .. K_i-1:   w_{k+1} = w_k - lr_t (g_i(w_k) - c_i + c^(i) + wd w_k)
        z_i = w_{K_i}
        dc_i = -c^(i) + (w_0 - z_i) / (K_i lr_t)
        w^(i) <- sum_j M_ij (w^(j) + server_lr (z_j - w^(j)))
        c^(i) <- sum_j M_ij (c^(j) + dc_j)
        c_i <- c_i + dc_i

Decisions: all nodes are active, so the server's (1/C) sum over P is the mean that the mix
replaces; both mixes use the values of the round's start; a relaxed start enters dc_i as the true
displacement. A failed node has dc_i = 0 and z_i = w^(i). W doubly stochastic keeps the mean of
the c^(i) at the mean of the c_i; at K_i = 1 the method is gradient tracking (arXiv:1607.03218) in
the form that mixes after the step.
"""

import numpy as np

from .gossip import GossipHistory, Network, decentralised


@decentralised
def run(f: Network, server_lr: float = 1.0) -> GossipHistory:
    w, c, c_i = f.copies(f.w0), f.zeros(), f.zeros()  # row i of c: c^(i)
    for t, W, lr_t in f.rounds(c=c, c_i=c_i):
        z, dc = w.copy(), np.zeros_like(c)
        for i in f.working(t):
            w_0 = f.start(i, w[i])
            z[i] = f.train(t, i, w_0, lambda w_k, g: g - c_i[i] + c[i])
            dc[i] = -c[i] + (w_0 - z[i]) / (f.K(i) * lr_t)
        M = f.power(W, t)
        w = M @ (w + server_lr * (z - w))
        c = M @ (c + dc)
        c_i = c_i + dc
        f.record(w, z, c=c, c_i=c_i)
    return f.history(c_i=c_i, c=c)
