"""FedExP - arXiv:2301.09604, Algorithm 1, in dense numpy: the server step from the spread.

    for t = 0 .. T-1:
        for i in P^t:   K steps  w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)  from w^t
                        D_i = w^t - w_{i,K}
        D_bar = (1/P) sum_{i in P} D_i
        eta_g = max{ 1, sum_{i in P} ||D_i||^2 / (2 P (||D_bar||^2 + epsilon)) }
        w^{t+1} = w^t - eta_g D_bar
    returned: (w^T + w^{T-1}) / 2, here as the trace "output" of every round

Decisions: a mean weighted by examples has its weights in both sums; the released code multiplies
epsilon by P, the paper does not; before the first round the output is w^0.
"""

import numpy as np

from .problem import Federation, History, reference

CASES = [{"own": {"epsilon": epsilon}} for epsilon in (0.001, 0.05)]
COST = (1, 1, 1, 0, 2)


@reference
def run(f: Federation, epsilon: float = 0.001) -> History:
    w = f.w0
    for t, active, _ in f.rounds(output=w, eta_g=np.ones(1)):
        w_K = {i: f.train(t, i, f.start(i, w)) for i in active}
        p, D = f.shares(active), {i: w - w_K[i] for i in active}
        D_bar = sum(p[i] * D[i] for i in active)
        spread = sum(p[i] * np.dot(D[i], D[i]) for i in active)
        eta_g = max(1.0, spread / (2 * (np.dot(D_bar, D_bar) + epsilon)))
        w, w_before = w - eta_g * D_bar, w
        f.record(w, f.mean(w_K), output=(w + w_before) / 2, eta_g=np.full(1, eta_g))
    return f.history()
