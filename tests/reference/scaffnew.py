"""Scaffnew - arXiv:2202.09357, Algorithm 2, in dense numpy. All clients train in every round.

    h_i = 0 for all i,  x_i = w^0
    for k = 0, 1, 2, ...:
        x_hat_i = x_i - lr (g_i(x_i) - h_i + wd x_i)
        with probability p:   x_i <- mean over all clients of x_hat_i
                              h_i <- h_i + (p / lr) (x_i - x_hat_i)
        else                  x_i <- x_hat_i,  h_i stays (it moves by (p / lr) (x_hat_i - x_hat_i))

A round ends where the coin says so: it has K_t steps, K_t ~ Geometric(p), drawn for all clients
from the seed 0 and the number of the round, or as many as `batches` has for it. Decisions: the rate
is constant, lr_decay is not read; a relaxed start moves x_i at the start of a round alone;
`clients` has h = h_i - (p / lr) x_hat_i, of which h_i is made once the mean is known.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, mean

CASES = [{"own": {"p": p}, "states": ("h",)} for p in (0.4, 1.0)]
COST = (1, 1, 1, 1, 1)


def geometric(p: float, t: int) -> int:
    coin = random.Random(f"scaffnew 0 {t}")
    flips = (coin.random() < p for _ in iter(int, 1))
    return 1 + next(k for k, stops in enumerate(flips) if stops)


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    p: float = 0.1,
    examples: Sequence[int] | None = None,
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    h, w, h_sent = np.zeros((problem.num_clients, problem.dim)), w0, None
    lr = f.lr
    for t, active, _ in f.rounds(cohorts):
        if len(active) < problem.num_clients:
            raise ValueError("Scaffnew needs every client in every round")
        x_hat = {}
        for i in active:
            x = f.start(i, w)
            K = geometric(p, t) if f.batches is None else len(f.batches[t][i])
            for k in range(K):
                x = x - lr * (f.gradient(t, i, k, x) - h[i] + f.wd * x)
            x_hat[i] = f.end(i, x)
        w = mean(x_hat, examples)
        h_sent = np.array([h[i] - p / lr * x_hat[i] for i in active])
        for i in active:
            h[i] = h[i] + p / lr * (w - x_hat[i])
        f.record(w, mean(x_hat, examples))
    return f.history(h=h_sent, h_i=h)
