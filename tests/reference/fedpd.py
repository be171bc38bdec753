"""FedPD - arXiv:2005.11418, Algorithm 1, in dense numpy. All clients train in every round.

    lam_i = 0, theta_{0,i} = theta_i = theta^0 for all i
    for t = 0 .. T-1:
        for all i:
            K steps on
                f_i(theta) + <lam_i, theta - theta_{0,i}> + (rho/2) ||theta - theta_{0,i}||^2:
                theta <- theta - lr_t (g_i(theta) + lam_i + rho (theta - theta_{0,i}) + wd theta)
            theta_i = theta_{i,K}
            lam_i <- lam_i + rho (theta_i - theta_{0,i})
            theta_{0,i}^+ = theta_i + lam_i / rho
        if not skip[t]:   theta_0 = A_C[theta_{0,i}^+],  theta_{0,i} = theta_0 for all i
        else:             theta_{0,i} = theta_{0,i}^+                            (no communication)

rho = 1/eta of the paper. Decisions: `skip[t]` stands for the paper's coin with P(skip) = p;
theta_{0,i}^+ takes the new dual (the released MATLAB takes the old one); local_init="server"
starts the K steps from the anchor theta_{0,i}, which after a skipped round is the client's own,
and "own" from the client's theta_i, which is a relaxed start with ri_beta = -1: so "own" refuses
ri_beta. After a skipped round `weights` repeats the last broadcast model. A relaxed start is
taken from the anchor: theta_{0,i} + ri_beta (theta_{0,i} - l_i). With ri_center="start" it stands
for theta_{0,i} in the proximal term and in the step of lam_i, after a skipped round too. With
`examples` A_C is weighted by n_i; `averages` and lam_bar are plain means always.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, center_of


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    rho: float = 0.1,
    local_init: str = "server",
    skip: Sequence[bool] | None = None,
    examples: Sequence[int] | None = None,
    ri_center: str = "server",
    **common: Any,
) -> History:
    C = problem.num_clients
    if any(list(active) != list(range(C)) for active in cohorts):
        raise ValueError("FedPD needs every client in every round")
    if local_init not in ("server", "own") or (local_init == "own" and common.get("ri_beta")):
        raise ValueError("local_init: 'server' or 'own', and no ri_beta with 'own'")
    f = Federation(problem, w0, lam_bar=np.zeros(problem.dim), **common)
    theta_0 = w0
    anchor = np.tile(w0, (C, 1))
    theta_i = np.tile(w0, (C, 1))
    lam = np.zeros((C, problem.dim))
    for t, everyone, lr_t in f.rounds(cohorts):
        for i in everyone:
            th = f.start(i, anchor[i]) if local_init == "server" else theta_i[i]
            center = center_of(ri_center, anchor[i], th)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, th)
                th = th - lr_t * (g + lam[i] + rho * (th - center) + f.wd * th)
            theta_i[i] = f.end(i, th)
            lam[i] = lam[i] + rho * (theta_i[i] - center)
            anchor[i] = theta_i[i] + lam[i] / rho
        if skip is None or not skip[t]:
            theta_0 = np.average(anchor, 0, examples)
            anchor = np.tile(theta_0, (C, 1))
        f.record(theta_0, theta_i.mean(axis=0), lam_bar=lam.mean(axis=0))
    return f.history(lam=lam, anchor=anchor)
