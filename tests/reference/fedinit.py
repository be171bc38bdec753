"""FedInit - arXiv:2306.05706, Algorithm 1, in dense numpy: literal, with its own start.

    w_{i,K}^{-1} = w^0 for all i
    for t = 0 .. T-1:
        for i in P^t:
            w_{i,0}^t = w^t + beta (w^t - w_{i,K}^{last})
            for k = 0 .. K-1:   w_{k+1} = w_k - lr_t (g_i(w_k) + wd w_k)
        w^{t+1} = A_P[w_{i,K}^t]

beta is the argument ri_beta. Decisions: w_{i,K}^{last} is from i's last *active* round (the
listing's index t-1 presumes participation); a first visit at t > 0 is extrapolated away from w^0
("initial") or starts at w^t ("current"); the server averages final models (ri_server="models",
the paper); ri_server="updates" is the authors' simulator, w^t + A_P[w_{i,K} - w_{i,0}].
"""

import numpy as np

from .problem import Federation, History, reference


@reference
def run(
    f: Federation, ri_beta: float = 0.1, ri_first_visit: str = "initial", ri_server: str = "models"
) -> History:
    w, w_last, ever_active = f.w0, f.copies(f.w0), [False] * f.C
    for t, active, _ in f.rounds():
        w_start, w_final = {}, {}
        for i in active:
            w_start[i] = (1 + ri_beta) * w - ri_beta * w_last[i]
            if not ever_active[i] and ri_first_visit == "current":
                w_start[i] = w
            w_final[i] = w_last[i] = f.steps(t, i, w_start[i])
            ever_active[i] = True
        w_bar = np.mean([w_final[i] for i in active], axis=0)
        updates = np.mean([w_final[i] - w_start[i] for i in active], axis=0)
        w = {"models": w_bar, "updates": w + updates}[ri_server]
        f.record(w, w_bar)
    return f.history(last=w_last)
