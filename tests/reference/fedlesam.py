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

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import (
    EPS,
    Array,
    Batches,
    Cohorts,
    History,
    LastModels,
    LeastSquares,
    LocalGradient,
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
    server_lr: float = 1.0,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.1,
) -> History:
    r = sam_rho
    gradient = LocalGradient(problem, batches, clip_norm)
    C = problem.num_clients
    last = LastModels(w0, C, ri_beta, ri_first_visit)
    w_old = np.tile(w0, (C, 1))
    activated = np.zeros(C, dtype=bool)
    w = w0.copy()
    weights, averages = [w0], [w0]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        w_K = {}
        for i in active:
            e_i = np.zeros(problem.dim)
            if activated[i]:
                e_i = r * (w_old[i] - w) / (np.linalg.norm(w_old[i] - w) + EPS)
            w_k = last.start(i, w)
            for k in range(steps_of(local_steps, i)):
                g = gradient.clipped(t, i, k, w_k + e_i)
                w_k = w_k - lr_t * (g + weight_decay * w_k)
            w_old[i] = w
            activated[i] = True
            w_K[i] = w_k
            last.store(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        weights.append(w)
        averages.append(w_bar)
    return History(
        np.array(weights), np.array(averages), {"w_old": w_old, "last": last.table}, {}, {}
    )
