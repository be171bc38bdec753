"""FedExP - arXiv:2301.09604, Algorithm 1, in dense numpy: the server step from the spread.

    for t = 0 .. T-1:
        for i in P^t:   K steps  w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)  from w^t
                        D_i = w^t - w_{i,K}
        D_bar = (1/P) sum_{i in P} D_i
        eta_g = max{ 1, sum_{i in P} ||D_i||^2 / (2 P (||D_bar||^2 + epsilon)) }
        w^{t+1} = w^t - eta_g D_bar
    returned: (w^T + w^{T-1}) / 2, here as the trace "output" of every round

Decisions: a mean weighted by examples has its weights in both sums; the released code multiplies
epsilon by P, the paper does not; before the first round the output is w^0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, mean, shares

CASES = [{"own": {"epsilon": epsilon}} for epsilon in (0.001, 0.05)]
COST = (1, 1, 1, 0, 2)


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    epsilon: float = 0.001,
    examples: Sequence[int] | None = None,
    **common: Any,
) -> History:
    f = Federation(problem, w0, output=w0, eta_g=np.ones(1), **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_k = f.start(i, w)
            for k in range(f.K(i)):
                w_k = w_k - lr_t * (f.gradient(t, i, k, w_k) + f.wd * w_k)
            w_K[i] = f.end(i, w_k)
        p = shares(active, examples)
        D = {i: w - w_K[i] for i in active}
        D_bar = sum(p[i] * D[i] for i in active)
        spread = sum(p[i] * np.dot(D[i], D[i]) for i in active)
        eta_g = max(1.0, spread / (2 * (np.dot(D_bar, D_bar) + epsilon)))
        w, w_before = w - eta_g * D_bar, w
        f.record(w, mean(w_K, examples), output=(w + w_before) / 2, eta_g=np.full(1, eta_g))
    return f.history()
