"""MoFedSAM - arXiv:2206.02618, in dense numpy: FedCM on the SAM gradient.

    Delta = 0
    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t
            for k = 0 .. K-1:
                e = r g_i(w_k) / ||g_i(w_k)||
                g = g_i(w_k + e)                                          (same batch, clipped)
                w_{k+1} = w_k - lr_t (alpha g + (1 - alpha) Delta + wd w_k)
        Delta <- A_P[(w_{i,0} - w_{i,K}) / (K_i lr_t)]
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

r is the argument sam_rho. Decisions: alpha multiplies the perturbed gradient; e never contains
Delta or wd; else as in FedCM.
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
    alpha: float = 0.1,
    wd_mode: str = "outside",
    server_lr: float = 1.0,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.1,
) -> History:
    if wd_mode not in ("outside", "inside"):
        raise ValueError(f"wd_mode: 'outside' or 'inside', not {wd_mode!r}")
    r = sam_rho
    gradient = LocalGradient(problem, batches, clip_norm)
    last = LastModels(w0, problem.num_clients, ri_beta, ri_first_visit)
    Delta = np.zeros(problem.dim)
    w = w0.copy()
    weights, averages, Delta_trace = [w0], [w0], [Delta]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        w_K, direction = {}, {}
        for i in active:
            K_i = steps_of(local_steps, i)
            w_start = last.start(i, w)
            w_k = w_start
            for k in range(K_i):
                e = ascent(gradient.raw(t, i, k, w_k), r)
                g = gradient.clipped(t, i, k, w_k + e)
                if wd_mode == "outside":
                    step = alpha * g + (1 - alpha) * Delta + weight_decay * w_k
                else:
                    step = alpha * (g + weight_decay * w_k) + (1 - alpha) * Delta
                w_k = w_k - lr_t * step
            direction[i] = (w_start - w_k) / (K_i * lr_t)
            w_K[i] = w_k
            last.store(i, w_k)
        Delta = mean(direction)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        weights.append(w)
        averages.append(w_bar)
        Delta_trace.append(Delta)
    return History(
        np.array(weights),
        np.array(averages),
        {"last": last.table},
        {"delta": Delta},
        {"delta": np.array(Delta_trace)},
    )
