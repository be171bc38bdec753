"""FedADMM - arXiv:2203.15104 (Wang et al.) and arXiv:2204.03529 (Gong et al.), in dense numpy.

    lam_i = 0, theta_i = theta^0 for all i;  thetahat_i = theta^0 for all i
    for t = 0 .. T-1:
        for i in P^t:
            theta_{i,0} = theta^t, K steps of
                theta <- theta - lr_t (g_i(theta) + lam_i + rho (theta - theta^t) + wd theta)
            lam_i <- lam_i + rho (theta_i - theta^t)
            thetahat_i <- theta_i + lam_i / rho
        "tracking":  theta^{t+1} = theta^t + (1/C) sum_P (thetahat_i^new - thetahat_i^old)
        "active":    theta^{t+1} = A_P[theta_i + lam_i^new / rho]
        "gong":      theta^{t+1} = theta^t
                         + eta_s A_P[(theta_i^new - theta_i^old) + (lam_i^new - lam_i^old) / rho]
        "released":  theta^{t+1} = theta^t + eta_s A_P[2 (theta_i^new - theta^t)]

Decisions: "tracking" (Wang et al.) is the reference; "active" is the poster's row of comparison;
"released" is the code of Gong et al., which reloads theta^t before it measures. No regulariser,
so the server's prox is the identity. Inactive theta_i, lam_i, thetahat_i stay. theta_i^old is
the client's last final model, not its relaxed start; a relaxed start moves theta_{i,0} only
(ri_center="server"). With ri_center="start" theta_{i,0} stands for theta^t in the proximal term
and in the step of lam_i, as FedInit's authors' simulator does in its dual methods; the server
rules stay as written.
"""

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, center_of


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    rho: float = 0.1,
    variant: str = "tracking",
    eta_s: float = 1.0,
    ri_center: str = "server",
    **common: Any,
) -> History:
    if variant not in ("tracking", "active", "gong", "released"):
        raise ValueError(f"variant: tracking, active, gong or released, not {variant!r}")
    f = Federation(problem, w0, lam_bar=np.zeros(problem.dim), **common)
    C = problem.num_clients
    theta = w0
    theta_i = np.tile(w0, (C, 1))
    lam = np.zeros((C, problem.dim))
    theta_hat = np.tile(w0, (C, 1))
    for t, active, lr_t in f.rounds(cohorts):
        P = list(active)
        theta_old, lam_old, theta_hat_old = theta_i.copy(), lam.copy(), theta_hat.copy()
        for i in P:
            th = f.start(i, theta)
            center = center_of(ri_center, theta, th)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, th)
                th = th - lr_t * (g + lam[i] + rho * (th - center) + f.wd * th)
            theta_i[i] = f.end(i, th)
            lam[i] = lam[i] + rho * (theta_i[i] - center)
            theta_hat[i] = theta_i[i] + lam[i] / rho
        if variant == "tracking":
            theta = theta + (theta_hat - theta_hat_old)[P].sum(axis=0) / C
        elif variant == "active":
            theta = (theta_i + lam / rho)[P].mean(axis=0)
        elif variant == "gong":
            Delta = (theta_i - theta_old) + (lam - lam_old) / rho
            theta = theta + eta_s * Delta[P].mean(axis=0)
        else:
            theta = theta + eta_s * (2 * (theta_i - theta))[P].mean(axis=0)
        f.record(theta, theta_i[P].mean(axis=0), lam_bar=lam.mean(axis=0))
    return f.history(lam=lam, theta_hat=theta_hat)
