"""FedLESAM - arXiv:2405.18890, in dense numpy: a perturbation from the global path.

    for t = 0 .. T-1:
        for i in P^t:
            e_i = r (w_i^old - w^t) / ||w_i^old - w^t||,   e_i = 0 at i's first activation
            w_0 = w^t
            for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k + e_i) + wd w_k)
            w_i^old <- w^t
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

r is the argument sam_rho. Decisions: w_i^old is the model that i received when it was last
active (the released code takes the last round's global update for everybody); one global norm,
with 1e-12 added; w_i^old is the received model under a relaxed start too; g_i(w_k + e_i) is
clipped. w_i^old is w^0 in `clients` before the first activation.
"""

from typing import Any

import numpy as np

from .problem import EPS, Array, Cohorts, Federation, History, LeastSquares, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    server_lr: float = 1.0,
    sam_rho: float = 0.1,
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    r = sam_rho
    w_old = np.tile(w0, (problem.num_clients, 1))
    activated = np.zeros(problem.num_clients, dtype=bool)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            e_i = np.zeros(problem.dim)
            if activated[i]:
                e_i = r * (w_old[i] - w) / (np.linalg.norm(w_old[i] - w) + EPS)
            w_k = f.start(i, w)
            for k in range(f.K(i)):
                g = f.clipped(t, i, k, w_k + e_i)
                w_k = w_k - lr_t * (g + f.wd * w_k)
            w_old[i] = w
            activated[i] = True
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history(w_old=w_old)
