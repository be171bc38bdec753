"""FedAdam - arXiv:2003.00295, Algorithm 2, in dense numpy: elementwise on the server.

    m = 0, v = v_0
    for t = 0 .. T-1:
        w_{i,K} as in FedAvg for i in P^t
        Delta = w_bar^{t+1} - w^t
        m <- beta1 m + (1 - beta1) Delta
        v <- beta2 v + (1 - beta2) Delta^2
        w^{t+1} = w^t + server_lr m / (sqrt(v) + tau)

Decisions: no bias correction; v_0 = tau^2 (None) as in the paper, or any number, e.g. 0.
"""

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v_0: float | None = None,
    server_lr: float = 0.1,
    **common: Any,
) -> History:
    m, v = np.zeros(problem.dim), np.full(problem.dim, tau**2 if v_0 is None else v_0)
    f = Federation(problem, w0, m=m, v=v, **common)
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
        Delta = w_bar - w
        m = beta1 * m + (1 - beta1) * Delta
        v = beta2 * v + (1 - beta2) * Delta**2
        w = w + server_lr * m / (np.sqrt(v) + tau)
        f.record(w, w_bar, m=m, v=v)
    return f.history()
