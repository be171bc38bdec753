"""FedLESAM-S - arXiv:2405.18890, in dense numpy: SCAFFOLD at a point moved along the global path.

    c_i = 0 for all i, c = 0
    for t = 0 .. T-1:
        for i in P^t:
            e_i = r (w_i^old - w^t) / ||w_i^old - w^t||,   e_i = 0 at i's first activation
            w_0 = w^t
            for k = 0 .. K_i-1:   w_{k+1} = w_k - lr_t (g_i(w_k + e_i) - c_i + c + wd w_k)
            c_i^+ = c_i - c + (w_0 - w_{K_i}) / (K_i lr_t)
            w_i^old <- w^t
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)
        c <- c + (1/C) sum_{i in P} (c_i^+ - c_i)            (C, not P)
        c_i <- c_i^+ for i in P, unchanged otherwise

Decisions: those of scaffold.py and of fedlesam.py.
"""

from typing import Any

import numpy as np

from .problem import EPS, Array, Cohorts, Federation, History, LeastSquares, mean

CASES = [
    {"own": {"radius": r, "server_lr": lr}, "states": ("c_i", "w_old")}
    for r, lr in ((0.2, 0.8), (0.0, 1.0))
]
COST = (2, 2, 1, 2, 2)


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    server_lr: float = 1.0,
    radius: float = 0.1,
    **common: Any,
) -> History:
    C, d = problem.num_clients, problem.dim
    c_i, c = np.zeros((C, d)), np.zeros(d)
    w_old, activated = np.tile(w0, (C, 1)), np.zeros(C, dtype=bool)
    f = Federation(problem, w0, c=c, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K, steps_of_c = {}, []
        for i in active:
            path = w_old[i] - w if activated[i] else np.zeros(d)
            e_i = radius * path / (np.linalg.norm(path) + EPS)
            w_k = w_start = f.start(i, w)
            for k in range(f.K(i)):
                g = f.clipped(t, i, k, w_k + e_i)
                w_k = w_k - lr_t * (g - c_i[i] + c + f.wd * w_k)
            c_plus = c_i[i] - c + (w_start - w_k) / (f.K(i) * lr_t)
            steps_of_c.append(c_plus - c_i[i])
            c_i[i], w_old[i], activated[i] = c_plus, w, True
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        c = c + np.sum(steps_of_c, axis=0) / C
        f.record(w, w_bar, c=c)
    return f.history(c_i=c_i, w_old=w_old)
