"""A-FedPDSAM - arXiv:2409.18915, Algorithm 1 with the SAM local rule, one dense table of duals.

    theta_i^0 = theta^0, lam_i^0 = 0 for all i
    for t = 0 .. T-1:
        1. for i in P^t:  theta_{i,0} = theta^t, K steps of
               e = r g_i(theta) / ||g_i(theta)||
               theta <- theta - lr_t (g_i(theta + e) + lam_i^t + rho (theta - theta^t) + wd theta)
        2. theta_bar^{t+1} = A_P[theta_i]
        3. active i:    lam_i^{t+1} = lam_i^t + rho (theta_i - theta^t)
           inactive i:  lam_i^{t+1} = lam_i^t + rho (theta_bar^{t+1} - theta^t)      (virtual)
        4. lam_bar^{t+1} = A_C[lam_i^{t+1}]
        5. theta^{t+1} = theta_bar^{t+1} + lam_bar^{t+1} / rho

r is the argument sam_rho. Decisions: the dual and prox terms and wd never enter e; only
g_i(theta + e) is clipped; else as in A-FedPD.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import (
    Array,
    Batches,
    Cohorts,
    History,
    LastModels,
    LeastSquares,
    LocalGradient,
    ascent,
    mean,
    steps_of,
)


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    lr: float,
    local_steps: int | Sequence[int],
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    batches: Batches | None = None,
    rho: float = 0.1,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.1,
) -> History:
    r = sam_rho
    gradient = LocalGradient(problem, batches, clip_norm)
    C = problem.num_clients
    last = LastModels(w0, C, ri_beta, ri_first_visit)
    theta = w0.copy()
    lam = np.zeros((C, problem.dim))
    weights, averages, lam_bar_trace = [w0], [w0], [np.zeros(problem.dim)]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        theta_i = {}
        for i in active:
            th = last.start(i, theta)
            for k in range(steps_of(local_steps, i)):
                e = ascent(gradient.raw(t, i, k, th), r)
                g = gradient.clipped(t, i, k, th + e)
                th = th - lr_t * (g + lam[i] + rho * (th - theta) + weight_decay * th)
            theta_i[i] = th
            last.store(i, th)
        theta_bar = mean(theta_i)
        virtual = {i: theta_i.get(i, theta_bar) for i in range(C)}
        for i in range(C):
            lam[i] = lam[i] + rho * (virtual[i] - theta)
        lam_bar = lam.mean(axis=0)
        theta = theta_bar + lam_bar / rho
        weights.append(theta)
        averages.append(theta_bar)
        lam_bar_trace.append(lam_bar)
    return History(
        np.array(weights),
        np.array(averages),
        {"lam": lam, "last": last.table},
        {"lam_bar": lam_bar_trace[-1]},
        {"lam_bar": np.array(lam_bar_trace)},
    )
