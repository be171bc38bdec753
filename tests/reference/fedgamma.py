"""FedGamma - IEEE 10269141, in dense numpy: SCAFFOLD (option II) on the SAM gradient.

    c_i = 0 for all i, c = 0
    for t = 0 .. T-1:
        for i in P^t:
            w_0 = w^t
            for k = 0 .. K_i-1:
                e = r g_i(w_k) / ||g_i(w_k)||
                w_{k+1} = w_k - lr_t (g_i(w_k + e) - c_i + c + wd w_k)
            c_i^+ = c_i - c + (w_0 - w_{K_i}) / (K_i lr_t)
        w^{t+1} = w^t + server_lr (w_bar^{t+1} - w^t)
        c <- c + (1/C) sum_{i in P} (c_i^+ - c_i),   c_i <- c_i^+ for i in P

r is the argument sam_rho. Decisions: c_i from displacements (true ones, w_{i,0} - w_{i,K}, under
a relaxed start); e never contains c_i, c or wd; only the gradient at w_k + e is clipped.
"""

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, ascent, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    server_lr: float = 1.0,
    sam_rho: float = 0.01,
    **common: Any,
) -> History:
    C = problem.num_clients
    c_i, c = np.zeros((C, problem.dim)), np.zeros(problem.dim)
    f = Federation(problem, w0, c=c, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K, c_plus = {}, c_i.copy()
        for i in active:
            w_k = w_start = f.start(i, w)
            for k in range(f.K(i)):
                e = ascent(f.raw(t, i, k, w_k), sam_rho)
                g = f.clipped(t, i, k, w_k + e)
                w_k = w_k - lr_t * (g - c_i[i] + c + f.wd * w_k)
            c_plus[i] = c_i[i] - c + (w_start - w_k) / (f.K(i) * lr_t)
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K)
        w = w + server_lr * (w_bar - w)
        c = c + (c_plus - c_i).sum(axis=0) / C
        c_i = c_plus
        f.record(w, w_bar, c=c)
    return f.history(c_i=c_i)
