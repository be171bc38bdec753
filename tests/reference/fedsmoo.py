"""FedSMOO - ICML 2023 (Sun et al.), in dense numpy: FedDyn on SAM, with a dual mu_i for e.

    lam_i = mu_i = 0 for all i, s = 0
    for t = 0 .. T-1:
        for i in P^t:
            theta_{i,0} = theta^t, for k = 0 .. K-1:
                u = g_i(theta) - mu_i - s
                e = r u / ||u||
                mu_i <- mu_i + e - s
                theta <- theta - lr_t (g_i(theta + e) + lam_i + rho (theta - theta^t) + wd theta)
            lam_i <- lam_i + rho (theta_i - theta^t)
        s = r A_P[mu_i] / ||A_P[mu_i]||
        theta^{t+1} = A_P[theta_i] + A_C[lam_i] / rho

r is the argument sam_rho. Decisions: as in the authors' simulator mu_i moves in every local step
and s omits the paper's -ehat_{i,K} term; (P, C) averaging; 1e-12 is added to both norms;
g_i(theta) in u is not clipped, g_i(theta + e) is; a relaxed start moves theta_{i,0} only
(ri_center="server"). With ri_center="start" theta_{i,0} stands for theta^t in the proximal term and
in the step of lam_i.
"""

from typing import Any

import numpy as np

from .problem import EPS, Array, Cohorts, Federation, History, LeastSquares, center_of, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    rho: float = 0.1,
    ri_center: str = "server",
    sam_rho: float = 0.1,
    **common: Any,
) -> History:
    r, C = sam_rho, problem.num_clients
    lam, mu = np.zeros((C, problem.dim)), np.zeros((C, problem.dim))
    s = np.zeros(problem.dim)
    f = Federation(problem, w0, lam_bar=s, s=s, **common)
    theta = w0
    for t, active, lr_t in f.rounds(cohorts):
        theta_i = {}
        for i in active:
            th = f.start(i, theta)
            center = center_of(ri_center, theta, th)
            for k in range(f.K(i)):
                u = f.raw(t, i, k, th) - mu[i] - s
                e = r * u / (np.linalg.norm(u) + EPS)
                mu[i] = mu[i] + e - s
                g = f.clipped(t, i, k, th + e)
                th = th - lr_t * (g + lam[i] + rho * (th - center) + f.wd * th)
            theta_i[i] = f.end(i, th)
            lam[i] = lam[i] + rho * (th - center)
        mu_bar = mu[list(active)].mean(axis=0)
        s = r * mu_bar / (np.linalg.norm(mu_bar) + EPS)
        theta_bar = mean(theta_i)
        lam_bar = lam.mean(axis=0)
        theta = theta_bar + lam_bar / rho
        f.record(theta, theta_bar, lam_bar=lam_bar, s=s)
    return f.history(lam=lam, mu=mu)
