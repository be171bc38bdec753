"""FedInit - arXiv:2306.05706, Algorithm 1, in dense numpy: literal, with its own start.

    w_{i,K}^{-1} = w^0 for all i
    for t = 0 .. T-1:
        for i in P^t:
            w_{i,0}^t = w^t + beta (w^t - w_{i,K}^{last})
            for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
        w^{t+1} = A_P[w_{i,K}^t]

beta is the argument ri_beta. Decisions: w_{i,K}^{last} is from i's last *active* round (the
listing's index t-1 presumes participation); a first visit at t > 0 is extrapolated away from w^0
("initial") or starts at w^t ("current"); the server averages final models (ri_server="models",
the paper); ri_server="updates" is the authors' simulator, w^t + A_P[w_{i,K} - w_{i,0}].
"""

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    ri_beta: float = 0.1,
    ri_first_visit: str = "initial",
    ri_server: str = "models",
    **common: Any,
) -> History:
    if ri_first_visit not in ("initial", "current") or ri_server not in ("models", "updates"):
        raise ValueError(f"unknown option: {ri_first_visit=}, {ri_server=}")
    f = Federation(problem, w0, **common)
    C, beta = problem.num_clients, ri_beta
    w_last = np.tile(w0, (C, 1))
    ever_active = [False] * C
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_start, w_final = np.zeros((C, problem.dim)), np.zeros((C, problem.dim))
        for i in active:
            if ever_active[i] or ri_first_visit == "initial":
                w_start[i] = (1 + beta) * w - beta * w_last[i]
            else:
                w_start[i] = w
            w_k = w_start[i]
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g + f.wd * w_k)
            w_final[i] = w_k
        for i in active:
            w_last[i] = w_final[i]
            ever_active[i] = True
        w_bar = w_final[list(active)].mean(axis=0)
        updates = (w_final - w_start)[list(active)].mean(axis=0)
        w = w_bar if ri_server == "models" else w + updates
        f.record(w, w_bar)
    return f.history(last=w_last)
