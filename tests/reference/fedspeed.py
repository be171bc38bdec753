"""FedSpeed - arXiv:2302.10429, Algorithm 1, in dense numpy, in the signs of the ADMM family.

    lam_i = 0 for all i                                        (the paper stores ghat_i = -lam_i)
    for t = 0 .. T-1:
        for i in P^t:
            theta_{i,0} = theta^t, for k = 0 .. K-1:
                g_1 = g_i(theta)
                g_2 = g_i(theta + r g_1 / ||g_1||)             "normalised" ascent (simulator)
                g_2 = g_i(theta + r g_1)                       "plain" ascent (paper)
                g = (1 - a) g_1 + a g_2
                theta <- theta - lr_t (g + lam_i + rho (theta - theta^t) + wd theta)
            lam_i <- lam_i + rho (theta_i - theta^t)
        "PC":  theta^{t+1} = A_P[theta_i] + A_C[lam_i] / rho   (simulator)
        "PP":  theta^{t+1} = A_P[theta_i + lam_i / rho]        (paper: mean of the uploads)

rho = 1/lambda of the paper; r is the argument sam_rho. Decisions: the default is the form of the
authors' simulator ("PC", normalised, a = 1), the paper's is variant="PP", ascent_form="plain";
the mixed data gradient g is what is clipped (for a = 1 the gradient at the perturbed point); a
relaxed start moves theta_{i,0} only.
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
    clip,
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
    a: float = 1.0,
    variant: str = "PC",
    ascent_form: str = "normalised",
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.1,
) -> History:
    if variant not in ("PC", "PP") or ascent_form not in ("normalised", "plain"):
        raise ValueError(f"unknown option: {variant=}, {ascent_form=}")
    r = sam_rho
    gradient = LocalGradient(problem, batches)
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
                g_1 = gradient.raw(t, i, k, th)
                e = ascent(g_1, r) if ascent_form == "normalised" else r * g_1
                g_2 = gradient.raw(t, i, k, th + e)
                g = clip((1 - a) * g_1 + a * g_2, clip_norm)
                th = th - lr_t * (g + lam[i] + rho * (th - theta) + weight_decay * th)
            theta_i[i] = th
            lam[i] = lam[i] + rho * (th - theta)
            last.store(i, th)
        theta_bar = mean(theta_i)
        averaged = lam if variant == "PC" else lam[list(active)]
        theta = theta_bar + averaged.mean(axis=0) / rho
        weights.append(theta)
        averages.append(theta_bar)
        lam_bar_trace.append(lam.mean(axis=0))
    return History(
        np.array(weights),
        np.array(averages),
        {"lam": lam, "last": last.table},
        {"lam_bar": lam_bar_trace[-1]},
        {"lam_bar": np.array(lam_bar_trace)},
    )
