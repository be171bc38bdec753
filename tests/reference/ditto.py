"""Ditto - arXiv:2012.04221, Algorithm 1, in dense numpy: personal models beside FedAvg.

    v_i = w^0 for all i
    for t = 0 .. T-1:
        for i in P^t, from w_0 = w^t, for k = 0 .. K-1:
            w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
            v_i <- v_i - lr_t (g_i(v_i) + lam (v_i - w^t) + wd v_i)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

Decisions: v_i takes K steps too, on the batches of w; both gradients are clipped, or SAM's, each at
its own point; v_i is pulled to w^t, with a relaxed start too (ri_center = "start": to the start).
"""

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, center_of, mean

CASES = [{"own": {"lam": 0.7, "server_lr": 0.9}, "states": ("v",)}]
COST = (1, 1, 2, 1, 1)


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    lam: float = 0.1,
    server_lr: float = 1.0,
    ri_center: str = "server",
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    v = np.tile(w0, (problem.num_clients, 1))
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_k = f.start(i, w)
            center = center_of(ri_center, w, w_k)
            for k in range(f.K(i)):
                w_k = w_k - lr_t * (f.gradient(t, i, k, w_k) + f.wd * w_k)
                pull = f.gradient(t, i, k, v[i]) + lam * (v[i] - center)
                v[i] = v[i] - lr_t * (pull + f.wd * v[i])
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history(v_i=v)
