"""FedToy, in dense numpy: clients remember the mean direction of their last visit.

m_i = 0
for t = 0 .. T-1, for i in P^t:
    w_k = w_{i,0}; K times: w_k <- w_k - lr (g_i(w_k) + gamma m_i + wd w_k)
    m_i <- (w_{i,0} - w_{i,K}) / (K lr)
w^{t+1} = w^t + server_lr (w_bar - w^t)
"""

from typing import Any

import numpy as np

from tests.reference.problem import Array, Cohorts, Federation, History, LeastSquares, mean

CASES = [{"own": {"gamma": 0.2, "server_lr": 0.8}, "states": ("m",)}]
COST = (1, 1, 1, 1, 1)


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    gamma: float = 0.1,
    server_lr: float = 0.5,
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    m = np.zeros((problem.num_clients, problem.dim))
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_k = w_start = f.start(i, w)
            for k in range(f.K(i)):
                w_k = w_k - lr_t * (f.gradient(t, i, k, w_k) + gamma * m[i] + f.wd * w_k)
            m[i] = (w_start - w_k) / (f.K(i) * lr_t)
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history(m=m)
