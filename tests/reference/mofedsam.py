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

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, ascent, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    alpha: float = 0.1,
    wd_mode: str = "outside",
    server_lr: float = 1.0,
    sam_rho: float = 0.1,
    **common: Any,
) -> History:
    if wd_mode not in ("outside", "inside"):
        raise ValueError(f"wd_mode: 'outside' or 'inside', not {wd_mode!r}")
    Delta = np.zeros(problem.dim)
    f = Federation(problem, w0, delta=Delta, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K, direction = {}, {}
        for i in active:
            w_k = w_start = f.start(i, w)
            for k in range(f.K(i)):
                e = ascent(f.raw(t, i, k, w_k), sam_rho)
                g = f.clipped(t, i, k, w_k + e)
                if wd_mode == "outside":
                    step = alpha * g + (1 - alpha) * Delta + f.wd * w_k
                else:
                    step = alpha * (g + f.wd * w_k) + (1 - alpha) * Delta
                w_k = w_k - lr_t * step
            direction[i] = (w_start - w_k) / (f.K(i) * lr_t)
            w_K[i] = f.end(i, w_k)
        Delta = mean(direction)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar, delta=Delta)
    return f.history()
