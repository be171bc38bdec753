"""Local training, each client alone, in dense numpy.

for t = 0 .. T-1:
    for i in P^t:
        w_{i,0} = w_i                      (w^0 before its first round)
        for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
        w_i = w_{i,K}
    w^{t+1} = w_bar^{t+1} = A_P[w_{i,K}]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import (
    Array,
    Batches,
    Cohorts,
    History,
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
    examples: Sequence[int] | None = None,
    sam_rho: float = 0.0,
) -> History:
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    own = np.tile(w0, (problem.num_clients, 1))
    averages = [w0]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        for i in active:
            for k in range(steps_of(local_steps, i)):
                g = gradient(t, i, k, own[i])
                own[i] = own[i] - lr_t * (g + weight_decay * own[i])
        averages.append(mean({i: own[i] for i in active}, examples))
    return History(np.array(averages), np.array(averages), {"w": own}, {}, {})
