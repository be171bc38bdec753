"""FedProx - arXiv:1812.06127, Algorithm 2, in dense numpy.

    for t = 0 .. T-1:
        for i in P^t:
            K steps on  f_i(w) + (mu/2) ||w - w^t||^2  from w_0 = w^t:
                w_{k+1} = w_k - lr_t (g_i(w_k) + mu (w_k - w^t) + wd w_k)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

Decisions: the clip acts on g_i alone, not on g_i - mu w^t; a relaxed start moves w_0 only, the
centre of the prox term stays w^t (ri_center="server"). With ri_center="start" the centre is w_0
itself, as in the simulator of FedInit's authors.
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
    mu: float = 0.1,
    server_lr: float = 1.0,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    ri_center: str = "server",
    sam_rho: float = 0.0,
) -> History:
    if ri_center not in ("server", "start"):
        raise ValueError(f"ri_center: 'server' or 'start', not {ri_center!r}")
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    last = LastModels(w0, problem.num_clients, ri_beta, ri_first_visit)
    w = w0.copy()
    weights, averages = [w0], [w0]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        w_K = {}
        for i in active:
            w_k = last.start(i, w)
            center = w if ri_center == "server" else w_k
            for k in range(steps_of(local_steps, i)):
                g = gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g + mu * (w_k - center) + weight_decay * w_k)
            w_K[i] = w_k
            last.store(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        weights.append(w)
        averages.append(w_bar)
    return History(np.array(weights), np.array(averages), {"last": last.table}, {}, {})
