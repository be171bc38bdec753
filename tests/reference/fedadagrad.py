"""FedAdagrad - arXiv:2003.00295, Algorithm 2, in dense numpy: elementwise on the server.

    m = 0, v = v_0
    for t = 0 .. T-1:
        w_{i,K} as in FedAvg for i in P^t
        Delta = w_bar^{t+1} - w^t
        m <- beta1 m + (1 - beta1) Delta
        v <- v + Delta^2
        w^{t+1} = w^t + server_lr m / (sqrt(v) + tau)

Decisions: no bias correction; v_0 = tau^2 (None) as in the paper, or any number, e.g. 0; beta1 =
0 in the paper.
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
    beta1: float = 0.0,
    tau: float = 1e-3,
    v_0: float | None = None,
    server_lr: float = 0.1,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.0,
) -> History:
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    last = LastModels(w0, problem.num_clients, ri_beta, ri_first_visit)
    m = np.zeros(problem.dim)
    v = np.full(problem.dim, tau**2 if v_0 is None else v_0)
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
        Delta = w_bar - w
        m = beta1 * m + (1 - beta1) * Delta
        v = v + Delta**2
        w = w + server_lr * m / (np.sqrt(v) + tau)
        weights.append(w)
        averages.append(w_bar)
    return History(
        np.array(weights), np.array(averages), {"last": last.table}, {"m": m, "v": v}, {}
    )
