"""FedDyn - arXiv:2111.04263, Algorithm 1, in dense numpy, with the paper's signs.

    q_i = 0 for all i (the stored gradients), h = 0
    for t = 0 .. T-1:
        for i in P^t:
            K steps on  f_i(w) - <q_i, w> + (alpha/2) ||w - w^t||^2  from w_0 = w^t:
                w_{k+1} = w_k - lr_t (g_i(w_k) - q_i + alpha (w_k - w^t) + wd w_k)
            q_i <- q_i - alpha (w_{i,K} - w^t)
        h <- h - (alpha/C) sum_{i in P} (w_{i,K} - w^t)
        w^{t+1} = w_bar^{t+1} - h/alpha

Decisions: the step of h is divided by C, not P; lam_i = -q_i and lam_bar = -h are what the
family of primal-dual methods calls them; a relaxed start moves w_0 only, the centre stays w^t
(ri_center="server"). With ri_center="start" w_0 stands for w^t in the proximal term and in the
steps of q_i and h, as in the simulator of FedInit's authors: h remains the mean of the q_i.
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
    alpha: float = 0.1,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    ri_center: str = "server",
    sam_rho: float = 0.0,
) -> History:
    if ri_center not in ("server", "start"):
        raise ValueError(f"ri_center: 'server' or 'start', not {ri_center!r}")
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    C = problem.num_clients
    last = LastModels(w0, C, ri_beta, ri_first_visit)
    q = np.zeros((C, problem.dim))
    h = np.zeros(problem.dim)
    w = w0.copy()
    weights, averages, lam_bar_trace = [w0], [w0], [-h]
    for t, active in enumerate(cohorts):
        lr_t = lr * lr_decay**t
        w_K, center = {}, {}
        for i in active:
            w_k = last.start(i, w)
            center[i] = w if ri_center == "server" else w_k
            for k in range(steps_of(local_steps, i)):
                g = gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g - q[i] + alpha * (w_k - center[i]) + weight_decay * w_k)
            q[i] = q[i] - alpha * (w_k - center[i])
            w_K[i] = w_k
            last.store(i, w_k)
        h = h - alpha / C * sum(w_K[i] - center[i] for i in active)
        w_bar = mean(w_K)
        w = w_bar - h / alpha
        weights.append(w)
        averages.append(w_bar)
        lam_bar_trace.append(-h)
    return History(
        np.array(weights),
        np.array(averages),
        {"lam": -q, "last": last.table},
        {"h": h, "lam_bar": -h},
        {"lam_bar": np.array(lam_bar_trace)},
    )
