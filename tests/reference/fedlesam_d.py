"""FedLESAM-D - arXiv:2405.18890, in dense numpy: FedDyn at a point moved along the global path.

    q_i = 0 for all i (the stored gradients), h = 0
    for t = 0 .. T-1:
        for i in P^t:
            e_i = r (w_i^old - w^t) / ||w_i^old - w^t||,   e_i = 0 at i's first activation
            w_0 = w^t
            w_{k+1} = w_k - lr_t (g_i(w_k + e_i) - q_i + alpha (w_k - w^t) + wd w_k)
            q_i <- q_i - alpha (w_K - w^t)
            w_i^old <- w^t
        h <- h - (alpha/C) sum_{i in P} (w_{i,K} - w^t)
        w^{t+1} = w_bar^{t+1} - h / alpha

Decisions: those of feddyn.py and of fedlesam.py. `clients` has lam = -q_i.
"""

from typing import Any

import numpy as np

from .problem import EPS, Array, Cohorts, Federation, History, LeastSquares, mean

CASES = [{"own": {"radius": r, "alpha": 0.3}, "states": ("lam", "w_old")} for r in (0.2, 0.0)]
COST = (1, 1, 1, 2, 2)


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    alpha: float = 0.1,
    radius: float = 0.1,
    **common: Any,
) -> History:
    C, d = problem.num_clients, problem.dim
    q, h = np.zeros((C, d)), np.zeros(d)
    w_old, activated = np.tile(w0, (C, 1)), np.zeros(C, dtype=bool)
    f = Federation(problem, w0, h=h, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            path = w_old[i] - w if activated[i] else np.zeros(d)
            e_i = radius * path / (np.linalg.norm(path) + EPS)
            w_k = f.start(i, w)
            for k in range(f.K(i)):
                g = f.clipped(t, i, k, w_k + e_i)
                w_k = w_k - lr_t * (g - q[i] + alpha * (w_k - w) + f.wd * w_k)
            q[i] = q[i] - alpha * (w_k - w)
            w_old[i], activated[i] = w, True
            w_K[i] = f.end(i, w_k)
        h = h - alpha / C * sum(w_K[i] - w for i in active)
        w_bar = mean(w_K)
        w = w_bar - h / alpha
        f.record(w, w_bar, h=h)
    return f.history(lam=-q, w_old=w_old)
