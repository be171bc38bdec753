"""FedSAM - arXiv:2206.02618, in dense numpy.

    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t
            for k = 0 .. K-1:
                e = r g_i(w_k) / ||g_i(w_k)||
                w_{k+1} = w_k - lr_t (g_i(w_k + e) + wd w_k)              (same batch, clipped)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

r is the argument sam_rho. Decisions: 1e-12 is added to the norm, so e = 0 if g_i = 0; only the
gradient at w_k + e is clipped; wd does not enter e.
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
    server_lr: float = 1.0,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.1,
) -> History:
    r = sam_rho
    gradient = LocalGradient(problem, batches, clip_norm)
    last = LastModels(w0, problem.num_clients, ri_beta, ri_first_visit)
    w = w0.copy()
    weights, averages = [w0], [w0]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        w_K = {}
        for i in active:
            w_k = last.start(i, w)
            for k in range(steps_of(local_steps, i)):
                e = ascent(gradient.raw(t, i, k, w_k), r)
                g = gradient.clipped(t, i, k, w_k + e)
                w_k = w_k - lr_t * (g + weight_decay * w_k)
            w_K[i] = w_k
            last.store(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        weights.append(w)
        averages.append(w_bar)
    return History(np.array(weights), np.array(averages), {"last": last.table}, {}, {})
