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

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .optimizers import AdamW, Momentum
from .problem import Array, Cohorts, Federation, History, LeastSquares, mean

CASES = [{"own": {"beta": 0.4, "inner": inner}} for inner in ("adamw", "momentum", "sgd")]
COST = (4, 3, 1, 0, 4)


class SGD:
    def step(self, d: Array) -> Array:
        return d

    def sent(self) -> list[Array]:
        return []

    def start(self) -> None:
        pass


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    beta: float = 0.5,
    inner: str = "adamw",
    make: Callable[[], Any] | None = None,
    examples: Sequence[int] | None = None,
    **common: Any,
) -> History:
    d = problem.dim
    kinds: dict[str, Callable[[], Any]] = {
        "adamw": lambda: AdamW(d),
        "momentum": lambda: Momentum(d),
        "sgd": SGD,
    }
    make = make or kinds[inner]
    f = Federation(problem, w0, G=np.zeros(d), **common)
    w, G, theta = w0, np.zeros(d), None
    for t, active, lr_t in f.rounds(cohorts):
        w_K, steps, sent = {}, {}, {}
        for i in active:
            optimizer = make()
            if theta is not None:
                optimizer.start(*theta)
            w_k = start = f.start(i, w)
            for k in range(f.K(i)):
                p = optimizer.step(f.gradient(t, i, k, w_k))
                w_k = w_k - lr_t * ((1 - beta) * (p + f.wd * w_k) + beta * G)
            sent[i] = optimizer.sent()
            steps[i] = (start - w_k) / (f.K(i) * lr_t)
            w_K[i] = f.end(i, w_k)
        w, G = mean(w_K, examples), mean(steps, examples)
        theta = [
            mean({i: sent[i][j] for i in active}, examples) for j in range(len(sent[active[0]]))
        ]
        f.record(w, w, G=G)
    return f.history()
