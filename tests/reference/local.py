"""Local training, each client alone, in dense numpy.

for t = 0 .. T-1:
    for i in P^t:
        w_{i,0} = w_i                      (w^0 before its first round)
        for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
        w_i = w_{i,K}
    w^{t+1} = w_bar^{t+1} = A_P[w_{i,K}]
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    examples: Sequence[int] | None = None,
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    own = np.tile(w0, (problem.num_clients, 1))
    for t, active, lr_t in f.rounds(cohorts):
        for i in active:
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, own[i])
                own[i] = own[i] - lr_t * (g + f.wd * own[i])
        w_bar = mean({i: own[i] for i in active}, examples)
        f.record(w_bar, w_bar)
    return f.history(w=own)
