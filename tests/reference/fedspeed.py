"""FedSpeed - arXiv:2302.10429, Algorithm 1, in dense numpy, in the signs of the ADMM family.

    lam_i = 0 for all i                                        (the paper stores ghat_i = -lam_i)
    for t = 0 .. T-1:
        for i in P^t:
            theta_{i,0} = theta^t, for k = 0 .. K-1:
                g_1 = g_i(theta)
                g_2 = g_i(theta + r g_1 / ||g_1||)             "normalised" ascent (simulator)
                g_2 = g_i(theta + r g_1)                       "plain" ascent (paper)
                g = (1 - a) g_1 + a g_2
                theta <- theta - lr_t (g + lam_i + rho (theta - theta^t) + wd theta)
            lam_i <- lam_i + rho (theta_i - theta^t)
        "PC":  theta^{t+1} = A_P[theta_i] + A_C[lam_i] / rho   (simulator)
        "PP":  theta^{t+1} = A_P[theta_i + lam_i / rho]        (paper: mean of the uploads)

rho = 1/lambda of the paper; r is the argument sam_rho. Decisions: the default is the form of the
authors' simulator ("PC", normalised, a = 1), the paper's is variant="PP", ascent_form="plain";
the mixed data gradient g is what is clipped (for a = 1 the gradient at the perturbed point); a
relaxed start moves theta_{i,0} only.
"""

from .problem import Federation, History, ascent, clip, reference


@reference
def run(
    f: Federation,
    rho: float = 0.1,
    a: float = 1.0,
    variant: str = "PC",
    ascent_form: str = "normalised",
    sam_rho: float = 0.1,
) -> History:
    theta, lam, r = f.w0, f.zeros(), sam_rho
    for t, active, lr_t in f.rounds(lam_bar=lam[0].copy()):
        theta_i = {}
        for i in active:
            th = f.start(i, theta)
            for k in range(f.K(i)):
                g_1 = f.raw(t, i, k, th)
                e = {"normalised": ascent(g_1, r), "plain": r * g_1}[ascent_form]
                g_2 = f.raw(t, i, k, th + e)
                g = clip((1 - a) * g_1 + a * g_2, f.clip_norm)
                th = th - lr_t * (g + lam[i] + rho * (th - theta) + f.wd * th)
            theta_i[i] = f.end(i, th)
            lam[i] = lam[i] + rho * (th - theta)
        theta_bar = f.mean(theta_i)
        averaged = {"PC": lam, "PP": lam[list(active)]}[variant]
        theta = theta_bar + averaged.mean(axis=0) / rho
        f.record(theta, theta_bar, lam_bar=lam.mean(axis=0))
    return f.history(lam=lam)
