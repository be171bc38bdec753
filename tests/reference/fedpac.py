"""FedPAC - arXiv:2602.19271 - and FedMuon - arXiv:2510.27403 - in dense numpy.

    Theta = the optimiser's first state, g_G = 0
    for t = 0 .. T-1:
        for i in P^t:
            Theta_i <- Theta
            w_0 = w^t
            for k = 0 .. K_i-1:
                p = P_{Theta_i}(g_i(w_k)), which updates Theta_i
                w_{k+1} = w_k - lr_t ((1 - beta) (p + wd w_k) + beta g_G)
        g_G = -(1/P) sum_{i in P} (w_{i,K} - w_{i,0}) / (K_i lr_t)
        w^{t+1} = (1/P) sum_{i in P} w_{i,K}
        Theta = (1/P) sum_{i in P} Theta_i

Decisions: Theta of AdamW is its bias-corrected moments, which are then corrected no more; each
displacement is divided by its client's own K_i, and with a relaxed start it begins there.
"""

from collections.abc import Callable
from typing import Any

from .optimizers import SGD, AdamW, Momentum
from .problem import Federation, History, reference

CASES = [{"own": {"beta": 0.4, "inner": inner}} for inner in ("adamw", "momentum", "sgd")]
COST = (4, 3, 1, 0, 4)


@reference
def run(
    f: Federation, beta: float = 0.5, inner: str = "adamw", make: Callable[[], Any] | None = None
) -> History:
    make = make or {"adamw": AdamW, "momentum": Momentum, "sgd": SGD}[inner]
    w, G, theta = f.w0, 0 * f.w0, None
    for t, active, lr_t in f.rounds(G=G):
        w_K, steps, uploads = {}, {}, {}
        for i in active:
            optimizer = make()
            if theta is not None:
                optimizer.start(*theta)
            w_k = w_0 = f.start(i, w)
            for k in range(f.K(i)):
                p = optimizer.step(f.gradient(t, i, k, w_k))
                w_k = w_k - lr_t * ((1 - beta) * (p + f.wd * w_k) + beta * G)
            uploads[i] = optimizer.sent()
            steps[i] = (w_0 - w_k) / (f.K(i) * lr_t)
            w_K[i] = f.end(i, w_k)
        w, G = f.mean(w_K), f.mean(steps)
        theta = [f.mean({i: uploads[i][j] for i in active}) for j in range(len(uploads[active[0]]))]
        f.record(w, w, G=G)
    return f.history()
