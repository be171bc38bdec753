"""DiLoCo - arXiv:2311.08105, Algorithm 1, in dense numpy.

    m = 0
    for t = 0 .. T-1:
        for i in P^t:   K steps of AdamW along g_i(w_k) from w^t, with weight decay beside them
        D = (1/P) sum_{i in P} (w^t - w_{i,K})
        m <- mu m + D
        w^{t+1} = w^t - server_lr (D + mu m)

Decisions: AdamW's moments begin anew every round, or stay with the client (state = "keep"); the
server's Nesterov is torch.optim.SGD's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .optimizers import AdamW, Clients
from .problem import Array, Cohorts, Federation, History, LeastSquares, mean

CASES = [{"own": {"mu": 0.6, "server_lr": 0.5}}]
COST = (1, 1, 1, 0, 2)


class SGD:
    def step(self, d: Array) -> Array:
        return d


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    mu: float = 0.9,
    server_lr: float = 0.7,
    inner: str = "adamw",
    state: str = "reset",
    examples: Sequence[int] | None = None,
    **common: Any,
) -> History:
    f = Federation(problem, w0, m=np.zeros(problem.dim), **common)
    make = {"adamw": lambda: AdamW(problem.dim), "sgd": SGD}[inner]
    clients = Clients(f, make, state, "constant", problem.num_clients)
    w, m = w0, np.zeros(problem.dim)
    for t, active, lr_t in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_k, _ = clients.walk(t, i, f.start(i, w), lr_t, lambda g, _: g)
            w_K[i] = f.end(i, w_k)
        w_bar = mean(w_K, examples)
        D = w - w_bar
        m = mu * m + D
        w = w - server_lr * (D + mu * m)
        f.record(w, w_bar, m=m)
    return f.history()
