"""A-FedPDSAM - arXiv:2409.18915, Algorithm 1 with the SAM local rule, one dense table of duals.

    theta_i^0 = theta^0, lam_i^0 = 0 for all i
    for t = 0 .. T-1:
        1. for i in P^t:  theta_{i,0} = theta^t, K steps of
               e = r g_i(theta) / ||g_i(theta)||
               theta <- theta - lr_t (g_i(theta + e) + lam_i^t + rho (theta - theta^t) + wd theta)
        2. theta_bar^{t+1} = A_P[theta_i]
        3. active i:    lam_i^{t+1} = lam_i^t + rho (theta_i - theta^t)
           inactive i:  lam_i^{t+1} = lam_i^t + rho (theta_bar^{t+1} - theta^t)      (virtual)
        4. lam_bar^{t+1} = A_C[lam_i^{t+1}]
        5. theta^{t+1} = theta_bar^{t+1} + lam_bar^{t+1} / rho

r is the argument sam_rho. Decisions: the dual and prox terms and wd never enter e; only
g_i(theta + e) is clipped; else as in A-FedPD.
"""

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, ascent, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    rho: float = 0.1,
    sam_rho: float = 0.1,
    **common: Any,
) -> History:
    f = Federation(problem, w0, lam_bar=np.zeros(problem.dim), **common)
    C = problem.num_clients
    theta = w0
    lam = np.zeros((C, problem.dim))
    for t, active, lr_t in f.rounds(cohorts):
        theta_i = {}
        for i in active:
            th = f.start(i, theta)
            for k in range(f.K(i)):
                e = ascent(f.raw(t, i, k, th), sam_rho)
                g = f.clipped(t, i, k, th + e)
                th = th - lr_t * (g + lam[i] + rho * (th - theta) + f.wd * th)
            theta_i[i] = f.end(i, th)
        theta_bar = mean(theta_i)
        virtual = {i: theta_i.get(i, theta_bar) for i in range(C)}
        for i in range(C):
            lam[i] = lam[i] + rho * (virtual[i] - theta)
        lam_bar = lam.mean(axis=0)
        theta = theta_bar + lam_bar / rho
        f.record(theta, theta_bar, lam_bar=lam_bar)
    return f.history(lam=lam)
