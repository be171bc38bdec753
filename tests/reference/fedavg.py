"""FedAvg - arXiv:1602.05629, Algorithm 1, in dense numpy.

    for t = 0 .. T-1:
        for i in P^t:
            w_{i,0} = w^t
            for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
        w_bar^{t+1} = A_P[w_{i,K}]
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

Decisions: clients weigh equally, or by their `examples`; the clip acts on g_i alone;
lr_t = lr * lr_decay**t. Relaxed start (ri_beta): w_{i,0} = w^t + ri_beta (w^t - l_i), the server
rule stays as written.
"""

from collections.abc import Sequence
from typing import Any

from .problem import Array, Cohorts, Federation, History, LeastSquares, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    server_lr: float = 1.0,
    examples: Sequence[int] | None = None,
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_k = f.start(i, w)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g + f.wd * w_k)
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K, examples)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history()
