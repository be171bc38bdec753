"""FedProx - arXiv:1812.06127, Algorithm 2, in dense numpy.

    for t = 0 .. T-1:
        for i in P^t:
            K steps on  f_i(w) + (mu/2) ||w - w^t||^2  from w_0 = w^t:
                w_{k+1} = w_k - lr_t (g_i(w_k) + mu (w_k - w^t) + wd w_k)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

Decisions: the clip acts on g_i alone, not on g_i - mu w^t; a relaxed start moves w_0 only, the
centre of the prox term stays w^t (ri_center="server"). With ri_center="start" the centre is w_0
itself, as in the simulator of FedInit's authors.
"""

from typing import Any

from .problem import Array, Cohorts, Federation, History, LeastSquares, center_of, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    mu: float = 0.1,
    server_lr: float = 1.0,
    ri_center: str = "server",
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_k = f.start(i, w)
            center = center_of(ri_center, w, w_k)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g + mu * (w_k - center) + f.wd * w_k)
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history()
