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

from .problem import Federation, History, reference

CASES = [{"own": {"p": p}, "states": ("h",)} for p in (0.4, 1.0)]
COST = (1, 1, 1, 1, 1)


def geometric(p: float, t: int) -> int:
    coin = random.Random(f"scaffnew 0 {t}")
    flips = (coin.random() < p for _ in iter(int, 1))
    return 1 + next(k for k, stops in enumerate(flips) if stops)


@reference
def run(f: Federation, p: float = 0.1) -> History:
    w, h, h_sent, lr = f.w0, f.zeros(), f.zeros(), f.lr
    for t, active, _ in f.rounds():
        assert len(active) == f.C
        x_hat = {}
        for i in active:
            x = f.start(i, w)
            K = geometric(p, t) if f.batches is None else len(f.batches[t][i])
            for k in range(K):
                x = x - lr * (f.gradient(t, i, k, x) - h[i] + f.wd * x)
            x_hat[i] = f.end(i, x)
        w = f.mean(x_hat)
        for i in active:
            h_sent[i] = h[i] - p / lr * x_hat[i]
            h[i] = h[i] + p / lr * (w - x_hat[i])
        f.record(w, w)
    return f.history(h=h_sent, h_i=h)
