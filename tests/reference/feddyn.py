"""FedDyn - arXiv:2111.04263, Algorithm 1, in dense numpy, with the paper's signs.

    q_i = 0 for all i (the stored gradients), h = 0
    for t = 0 .. T-1:
        for i in P^t:
            K steps on  f_i(w) - <q_i, w> + (alpha/2) ||w - w^t||^2  from w_0 = w^t:
                w_{k+1} = w_k - lr_t (g_i(w_k) - q_i + alpha (w_k - w^t) + wd w_k)
            q_i <- q_i - alpha (w_{i,K} - w^t)
        h <- h - (alpha/C) sum_{i in P} (w_{i,K} - w^t)
        w^{t+1} = w_bar^{t+1} - h/alpha

Decisions: the step of h is divided by C, not P; lam_i = -q_i and lam_bar = -h are what the
family of primal-dual methods calls them; a relaxed start moves w_0 only, the centre stays w^t
(ri_center="server"). With ri_center="start" w_0 stands for w^t in the proximal term and in the
steps of q_i and h, as in the simulator of FedInit's authors: h remains the mean of the q_i.
"""

from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, center_of, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    alpha: float = 0.1,
    ri_center: str = "server",
    **common: Any,
) -> History:
    C = problem.num_clients
    q, h = np.zeros((C, problem.dim)), np.zeros(problem.dim)
    f = Federation(problem, w0, lam_bar=-h, **common)
    w = w0
    for t, active, lr_t in f.rounds(cohorts):
        w_K, center = {}, {}
        for i in active:
            w_k = f.start(i, w)
            center[i] = center_of(ri_center, w, w_k)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g - q[i] + alpha * (w_k - center[i]) + f.wd * w_k)
            q[i] = q[i] - alpha * (w_k - center[i])
            w_K[i] = f.end(i, w_k)
        h = h - alpha / C * sum(w_K[i] - center[i] for i in active)
        w_bar = mean(w_K)
        w = w_bar - h / alpha
        f.record(w, w_bar, lam_bar=-h)
    return f.history(lam=-q)
