"""FedAvgM - arXiv:1909.06335, in dense numpy: momentum on the server.

    v = 0
    for t = 0 .. T-1:
        w_{i,K} as in FedAvg for i in P^t
        v <- beta v + (w_bar^{t+1} - w^t)
        w^{t+1} = w^t + server_lr v

Decisions: heavy ball, not Nesterov's form w + server_lr (Delta + beta v).
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
    beta: float = 0.9,
    server_lr: float = 1.0,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.0,
) -> History:
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    last = LastModels(w0, problem.num_clients, ri_beta, ri_first_visit)
    v = np.zeros(problem.dim)
    w = w0.copy()
    weights, averages = [w0], [w0]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        w_K = {}
        for i in active:
            w_k = last.start(i, w)
            for k in range(steps_of(local_steps, i)):
                g = gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g + weight_decay * w_k)
            w_K[i] = w_k
            last.store(i, w_k)
        w_bar = mean(w_K)
        v = beta * v + (w_bar - w)
        w = w + server_lr * v
        weights.append(w)
        averages.append(w_bar)
    return History(np.array(weights), np.array(averages), {"last": last.table}, {"v": v}, {})
