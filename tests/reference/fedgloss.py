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

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, ascent, center_of, mean

CASES = [{"own": {"radius": r, "alpha": 0.3}, "states": ("lam",)} for r in (0.2, 0.0)]
COST = (1, 1, 1, 1, 3)


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    alpha: float = 0.1,
    radius: float = 0.15,
    ri_center: str = "server",
    **common: Any,
) -> History:
    C, beta = problem.num_clients, 1 / alpha
    sigma_k, sigma, D = np.zeros((C, problem.dim)), np.zeros(problem.dim), np.zeros(problem.dim)
    f = Federation(problem, w0, output=w0, sigma=sigma, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_tilde = w + ascent(D, radius)
        w_K, deviation = {}, np.zeros(problem.dim)
        for k in active:
            w_i = start = f.start(k, w_tilde)
            center = center_of(ri_center, w_tilde, start)
            for step in range(f.K(k)):
                g = f.gradient(t, k, step, w_i)
                w_i = w_i - lr_t * (g - sigma_k[k] + (w_i - center) / beta + f.wd * w_i)
            sigma_k[k] = sigma_k[k] - (w_i - center) / beta
            deviation = deviation + (w_i - center)
            w_K[k] = f.end(k, w_i)
        sigma = sigma - deviation / (beta * C)
        w_bar = mean(w_K)
        D = w_tilde - w_bar
        w = w - D - beta * sigma
        f.record(w + ascent(D, radius), w_bar, output=w, sigma=sigma)
    return f.history(lam=-sigma_k)
