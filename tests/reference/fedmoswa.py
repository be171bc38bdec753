"""FedMoSWA, option II - arXiv:2507.20016, Algorithm 2, in dense numpy, with the paper's m.

    c_i = 0 for all i, m = 0
    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t
            for k = 0 .. K_i-1:   eta_k = (1 - k / K_i) lr_t + (k / K_i) rho lr_t
                                  w_{k+1} = w_k - eta_k (g_i(w_k) - c_i + m + wd w_k)
            c_i^+ = c_i - m + (w_0 - w_{K_i}) / sum_k eta_k
        m <- m + gamma (1/P) sum_{i in P} (c_i^+ - m)
        w^{t+1} = w^t + server_lr (1/P) sum_{i in P} (w_{i,K} - w^t)
        c_i <- c_i^+ for i in P, unchanged otherwise

Decisions: server_lr is the paper's alpha; all clients of a round use the m of its start; with a
relaxed start c_i^+ takes the true displacement.
"""

import numpy as np

from .problem import Federation, History, reference

CASES = [
    {"own": {"gamma": 0.3, "server_lr": 1.2, "rho": rho}, "states": ("c_i",)} for rho in (0.0, 0.25)
]
COST = (2, 2, 1, 1, 2)


@reference
def run(f: Federation, gamma: float = 0.2, server_lr: float = 1.5, rho: float = 0.1) -> History:
    w, c_i, m = f.w0, f.zeros(), 0 * f.w0
    for t, active, lr_t in f.rounds(m=m):
        w_K, fresh = {}, {}
        for i in active:
            w_k = w_0 = f.start(i, w)
            eta = [(1 - (1 - rho) * k / f.K(i)) * lr_t for k in range(f.K(i))]
            for k, eta_k in enumerate(eta):
                w_k = w_k - eta_k * (f.gradient(t, i, k, w_k) - c_i[i] + m + f.wd * w_k)
            fresh[i] = c_i[i] - m + (w_0 - w_k) / sum(eta)
            w_K[i] = f.end(i, w_k)
        m = m + gamma * np.mean([fresh[i] - m for i in active], axis=0)
        w_bar = f.mean(w_K)
        w = w + server_lr * (w_bar - w)
        for i in active:
            c_i[i] = fresh[i]
        f.record(w, w_bar, m=m)
    return f.history(c_i=c_i)
