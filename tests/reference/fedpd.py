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
and "own" from the client's theta_i, which is a relaxed start with ri_beta = -1. After a
skipped round `weights` repeats the last broadcast model. A relaxed start is taken from the anchor:
theta_{0,i} + ri_beta (theta_{0,i} - l_i). With ri_center="start" it stands for theta_{0,i} in the
proximal term and in the step of lam_i, after a skipped round too. With `examples` A_C is weighted
by n_i; `averages` and lam_bar are plain means always.
"""

from collections.abc import Sequence

import numpy as np

from .problem import Federation, History, reference


@reference
def run(
    f: Federation, rho: float = 0.1, local_init: str = "server", skip: Sequence[bool] | None = None
) -> History:
    theta_0, theta_i, lam = f.w0, f.copies(f.w0), f.zeros()
    anchor = f.copies(f.w0)
    for t, everyone, _ in f.rounds(lam_bar=lam[0].copy()):
        assert list(everyone) == list(range(f.C))
        for i in everyone:
            th = {"server": f.start(i, anchor[i]), "own": theta_i[i]}[local_init]
            center = f.center(anchor[i], th)
            theta_i[i] = f.train(t, i, th, lambda th, g: g + lam[i] + rho * (th - center))
            lam[i] = lam[i] + rho * (theta_i[i] - center)
            anchor[i] = theta_i[i] + lam[i] / rho
        if skip is None or not skip[t]:
            theta_0 = np.average(anchor, 0, f.examples)
            anchor = f.copies(theta_0)
        f.record(theta_0, theta_i.mean(axis=0), lam_bar=lam.mean(axis=0))
    return f.history(lam=lam, anchor=anchor)
