"""FedAvgM - arXiv:1909.06335, in dense numpy: momentum on the server.

    v = 0
    for t = 0 .. T-1:
        w_{i,K} as in FedAvg for i in P^t
        v <- beta v + (w_bar^{t+1} - w^t)
        w^{t+1} = w^t + server_lr v

Decisions: heavy ball, not Nesterov's form w + server_lr (Delta + beta v).
"""

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    beta: float = 0.9,
    server_lr: float = 1.0,
    **common: Any,
) -> History:
    v = np.zeros(problem.dim)
    f = Federation(problem, w0, v=v, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_k = f.start(i, w)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g + f.wd * w_k)
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K)
        v = beta * v + (w_bar - w)
        w = w + server_lr * v
        f.record(w, w_bar, v=v)
    return f.history()
