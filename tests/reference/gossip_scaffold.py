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

from typing import Any

import numpy as np

from .gossip import GossipHistory, Mixing, Network
from .problem import Array, LeastSquares


def run(
    problem: LeastSquares, w0: Array, mixing: Mixing, *, server_lr: float = 1.0, **common: Any
) -> GossipHistory:
    c_i = c = np.zeros((problem.num_clients, problem.dim))  # row i of c: c^(i)
    f = Network(problem, w0, c=c, c_i=c_i, **common)
    w = f.start_models()
    for t, W, lr_t in f.rounds(mixing):
        z, dc = w.copy(), np.zeros_like(c)
        for i in f.working(t):
            w_k = w_start = f.start(i, w[i])
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g - c_i[i] + c[i] + f.wd * w_k)
            z[i] = f.end(i, w_k)
            dc[i] = -c[i] + (w_start - w_k) / (f.K(i) * lr_t)
        M = f.power(W, t)
        w = M @ (w + server_lr * (z - w))
        c = M @ (c + dc)
        c_i = c_i + dc
        f.record(w, z, c=c, c_i=c_i)
    return f.history(c_i=c_i, c=c)
