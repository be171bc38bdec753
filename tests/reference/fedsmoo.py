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
g_i(theta) in u is not clipped, g_i(theta + e) is. With ri_center="start" theta_{i,0} stands for
theta^t in the proximal term and in the step of lam_i.
"""

from .problem import Federation, History, ascent, reference


@reference
def run(f: Federation, rho: float = 0.1, sam_rho: float = 0.1) -> History:
    theta, lam, mu, s, r = f.w0, f.zeros(), f.zeros(), 0 * f.w0, sam_rho
    for t, active, lr_t in f.rounds(lam_bar=s, s=s):
        theta_i = {}
        for i in active:
            th = f.start(i, theta)
            center = f.center(theta, th)
            for k in range(f.K(i)):
                e = ascent(f.raw(t, i, k, th) - mu[i] - s, r)
                mu[i] = mu[i] + e - s
                g = f.clipped(t, i, k, th + e)
                th = th - lr_t * (g + lam[i] + rho * (th - center) + f.wd * th)
            theta_i[i] = f.end(i, th)
            lam[i] = lam[i] + rho * (th - center)
        s = ascent(mu[list(active)].mean(axis=0), r)
        theta_bar, lam_bar = f.mean(theta_i), lam.mean(axis=0)
        theta = theta_bar + lam_bar / rho
        f.record(theta, theta_bar, lam_bar=lam_bar, s=s)
    return f.history(lam=lam, mu=mu)
