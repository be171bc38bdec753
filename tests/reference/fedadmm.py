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

Decisions: "tracking" (Wang et al.) is the reference; "active" is the poster's row of comparison.
No regulariser, so the server's prox is the identity. Inactive lam_i, thetahat_i stay. With
ri_center="start" theta_{i,0} stands for theta^t in the proximal term and in the step of lam_i, as
FedInit's authors' simulator does in its dual methods; the server rules stay as written.
"""

from .problem import Federation, History, reference


@reference
def run(f: Federation, rho: float = 0.1, variant: str = "tracking") -> History:
    theta, theta_i, theta_hat, lam = f.w0, f.copies(f.w0), f.copies(f.w0), f.zeros()
    for t, active, _ in f.rounds(lam_bar=lam[0].copy()):
        P, theta_hat_old = list(active), theta_hat.copy()
        for i in P:
            th = f.start(i, theta)
            center = f.center(theta, th)
            theta_i[i] = f.train(t, i, th, lambda th, g: g + lam[i] + rho * (th - center))
            lam[i] = lam[i] + rho * (theta_i[i] - center)
            theta_hat[i] = theta_i[i] + lam[i] / rho
        theta = {
            "tracking": theta + (theta_hat - theta_hat_old)[P].sum(axis=0) / f.C,
            "active": theta_hat[P].mean(axis=0),
        }[variant]
        f.record(theta, theta_i[P].mean(axis=0), lam_bar=lam.mean(axis=0))
    return f.history(lam=lam, w_hat=theta_hat)
