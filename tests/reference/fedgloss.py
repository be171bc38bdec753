"""FedGloSS - arXiv:2412.03752, Algorithm 1, in dense numpy, with the paper's signs.

    sigma_k = 0 for all k, sigma = 0, D = 0
    for t = 0 .. T-1:
        e = r D / ||D||,   0 where D = 0
        w~ = w^t + e
        for k in C^t:
            from w_0 = w~:   w <- w - lr_t (g_k(w) - sigma_k + (w - w~) / beta + wd w)
            sigma_k <- sigma_k - (w_k - w~) / beta
        sigma <- sigma - (1 / (beta |C|)) sum_{k in C^t} (w_k - w~)
        D = mean over C^t of (w~ - w_k)
        w^{t+1} = w^t - D - beta sigma

g_k(w) is SAM's under the argument sam_rho, the paper's rho_l. Decisions: alpha = 1 / beta; the
perturbation has 1e-12 beside the norm; with a relaxed start the anchor is w~ ("server") or the
start. weights[t] is what is broadcast, w~; the trace "output" has w^t; `clients` has lam, which is
-sigma_k.
"""

from .problem import Federation, History, ascent, reference

CASES = [{"own": {"radius": r, "alpha": 0.3}, "states": ("lam",)} for r in (0.2, 0.0)]
COST = (1, 1, 1, 1, 3)


@reference
def run(f: Federation, alpha: float = 0.1, radius: float = 0.15) -> History:
    w, beta = f.w0, 1 / alpha
    sigma_k, sigma, D = f.zeros(), 0 * w, 0 * w
    for t, active, _ in f.rounds(output=w, sigma=sigma):
        w_tilde = w + ascent(D, radius)
        w_K, deviation = {}, 0 * w
        for k in active:
            w_0 = f.start(k, w_tilde)
            center = f.center(w_tilde, w_0)
            w_K[k] = f.train(t, k, w_0, lambda w, g: g - sigma_k[k] + (w - center) / beta)
            sigma_k[k] = sigma_k[k] - (w_K[k] - center) / beta
            deviation = deviation + (w_K[k] - center)
        sigma = sigma - deviation / (beta * f.C)
        w_bar = f.mean(w_K)
        D = w_tilde - w_bar
        w = w - D - beta * sigma
        f.record(w + ascent(D, radius), w_bar, output=w, sigma=sigma)
    return f.history(lam=-sigma_k)
