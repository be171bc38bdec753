"""A-FedPD - arXiv:2409.18915, Algorithm 1, literally: one dense (C, d) table of duals.

    theta_i^0 = theta^0, lam_i^0 = 0 for all i
    for t = 0 .. T-1:
        1. for i in P^t:  theta_{i,0} = theta^t, K steps of
               theta <- theta - lr_t (g_i(theta) + lam_i^t + rho (theta - theta^t) + wd theta)
        2. theta_bar^{t+1} = A_P[theta_i]
        3. active i:    lam_i^{t+1} = lam_i^t + rho (theta_i - theta^t)
           inactive i:  lam_i^{t+1} = lam_i^t + rho (theta_bar^{t+1} - theta^t)      (virtual)
        4. lam_bar^{t+1} = A_C[lam_i^{t+1}]
        5. theta^{t+1} = theta_bar^{t+1} + lam_bar^{t+1} / rho

`weights` are theta^t, `averages` are theta_bar^t (the model that the paper's theorem is about).
Decisions: rho is constant, though the listing prints rho_t;
a relaxed start moves theta_{i,0} only, the centre stays theta^t. With `examples` A_P and A_C are
weighted by n_i, which is the same algebra: lam_bar moves by rho (theta_bar - theta^t). With sam_rho
it is A-FedPDSAM.

With `share` q, of a sum with a fixed denominator (differential privacy), theta_bar = theta +
sum_{i in P} (theta_i - theta) / (q C), and every client, an active one too, takes (1 - q) of the
virtual step: then lam_bar moves by rho (theta_bar - theta) for any number of active clients.
"""

import numpy as np

from .problem import Federation, History, reference


@reference
def run(f: Federation, rho: float = 0.1, share: float | None = None) -> History:
    theta, lam = f.w0, f.zeros()
    for t, active, _ in f.rounds(lam_bar=lam[0].copy()):
        theta_i = {}
        for i in active:
            theta_i[i] = f.train(
                t, i, f.start(i, theta), lambda th, g: g + lam[i] + rho * (th - theta)
            )
        if share is None:
            theta_bar = f.mean(theta_i)
            for i in range(f.C):
                lam[i] = lam[i] + rho * (theta_i.get(i, theta_bar) - theta)
        else:
            theta_bar = theta + sum(v - theta for v in theta_i.values()) / (share * f.C)
            for i in range(f.C):
                own = theta_i.get(i, theta) - theta
                lam[i] = lam[i] + rho * (own + (1 - share) * (theta_bar - theta))
        lam_bar = np.average(lam, 0, f.examples)
        theta = theta_bar + lam_bar / rho
        f.record(theta, theta_bar, lam_bar=lam_bar)
    return f.history(lam=lam)
