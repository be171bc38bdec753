"""FedGamma - IEEE 10269141, in dense numpy: SCAFFOLD (option II) on the SAM gradient.

    c_i = 0 for all i, c = 0
    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t
            for k = 0 .. K_i-1:
                e = r g_i(w_k) / ||g_i(w_k)||
                w_{k+1} = w_k - lr_t (g_i(w_k + e) - c_i + c + wd w_k)
            c_i^+ = c_i - c + (w_0 - w_{K_i}) / (K_i lr_t)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)
        c <- c + (1/C) sum_{i in P} (c_i^+ - c_i),   c_i <- c_i^+ for i in P

r is the argument sam_rho. Decisions: c_i from displacements (true ones, w_{i,0} - w_{i,K}, under
a relaxed start); e never contains c_i, c or wd; only the gradient at w_k + e is clipped.
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
    sam_rho: float = 0.01,
) -> History:
    r = sam_rho
    gradient = LocalGradient(problem, batches, clip_norm)
    C = problem.num_clients
    last = LastModels(w0, C, ri_beta, ri_first_visit)
    c_i, c = np.zeros((C, problem.dim)), np.zeros(problem.dim)
    w = w0.copy()
    weights, averages, c_trace = [w0], [w0], [c]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        w_K = {}
        c_plus = c_i.copy()
        for i in active:
            K_i = steps_of(local_steps, i)
            w_start = last.start(i, w)
            w_k = w_start
            for k in range(K_i):
                e = ascent(gradient.raw(t, i, k, w_k), r)
                g = gradient.clipped(t, i, k, w_k + e)
                w_k = w_k - lr_t * (g - c_i[i] + c + weight_decay * w_k)
            c_plus[i] = c_i[i] - c + (w_start - w_k) / (K_i * lr_t)
            w_K[i] = w_k
            last.store(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        c = c + (c_plus - c_i).sum(axis=0) / C
        c_i = c_plus
        weights.append(w)
        averages.append(w_bar)
        c_trace.append(c)
    return History(
        np.array(weights),
        np.array(averages),
        {"c_i": c_i, "last": last.table},
        {"c": c},
        {"c": np.array(c_trace)},
    )
