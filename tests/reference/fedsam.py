"""FedSAM - arXiv:2206.02618, in dense numpy.

    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t
            for k = 0 .. K-1:
                e = r g_i(w_k) / ||g_i(w_k)||
                w_{k+1} = w_k - lr_t (g_i(w_k + e) + wd w_k)              (same batch, clipped)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)

r is the argument sam_rho. Decisions: 1e-12 is added to the norm, so e = 0 if g_i = 0; only the
gradient at w_k + e is clipped; wd does not enter e.
"""

from typing import Any

from .problem import Array, Cohorts, Federation, History, LeastSquares, ascent, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    server_lr: float = 1.0,
    sam_rho: float = 0.1,
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_k = f.start(i, w)
            for k in range(f.K(i)):
                e = ascent(f.raw(t, i, k, w_k), sam_rho)
                g = f.clipped(t, i, k, w_k + e)
                w_k = w_k - lr_t * (g + f.wd * w_k)
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        f.record(w, w_bar)
    return f.history()
