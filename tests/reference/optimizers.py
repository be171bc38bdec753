"""Methods whose clients take other steps than SGD's, in dense numpy.

    SCAFFOLD   d = g_i(w) - c_i + c;   c_i^+ = the mean over the steps of g_i(w_k)
    FedDyn     d = g_i(w) + lam_i + alpha (w - w^t);   lam_i and the server as in feddyn.py
    FedInit    d = g_i(w) from w^t + beta (w^t - l_i);   w^{t+1} = w_bar

A step is the optimiser's, along d, with weight decay beside it. With state "reset" its vectors
begin anew every round, with "keep" client i has its own, and with "average" a round's clients start
with the mean of what the last round's ended with (AdamW: bias-corrected, and corrected no more).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, mean


class Momentum:
    def __init__(self, d: int, mu: float = 0.9, nesterov: bool = False) -> None:
        self.b, self.mu, self.nesterov = np.zeros(d), mu, nesterov

    def step(self, d: Array) -> Array:
        self.b = self.mu * self.b + d
        return d + self.mu * self.b if self.nesterov else self.b

    def sent(self) -> list[Array]:
        return [self.b]

    def start(self, b: Array) -> None:
        self.b = b


class AdamW:
    def __init__(self, d: int, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.m, self.v, self.n = np.zeros(d), np.zeros(d), 0.0
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def step(self, d: Array) -> Array:
        self.m = self.beta1 * self.m + (1 - self.beta1) * d
        self.v = self.beta2 * self.v + (1 - self.beta2) * d**2
        self.n += 1
        m, v = self.sent()
        return m / (np.sqrt(v) + self.eps)

    def sent(self) -> list[Array]:
        return [self.m / (1 - self.beta1**self.n), self.v / (1 - self.beta2**self.n)]

    def start(self, m: Array, v: Array) -> None:
        self.m, self.v, self.n = m, v, np.inf


FACTORS: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + float(np.cos(np.pi * x))) / 2,
}


class Clients:
    """The optimisers of all clients, and the rates of a round."""

    def __init__(
        self, f: Federation, make: Callable[[], Any], state: str, schedule: str, clients: int
    ) -> None:
        self.f, self.make, self.state, self.factor = f, make, state, FACTORS[schedule]
        self.own = [make() for _ in range(clients)]
        self.mean: list[Array] | None = None

    def walk(
        self, t: int, i: int, w: Array, lr: float, direction: Callable[[Array, Array], Array]
    ) -> tuple[Array, Array]:
        """w_{i,K} from w, and the mean of the gradients on the way."""
        if self.state != "keep":
            self.own[i] = self.make()
        if self.mean is not None:
            self.own[i].start(*self.mean)
        K, total = self.f.K(i), np.zeros_like(w)
        for k in range(K):
            g = self.f.gradient(t, i, k, w)
            eta = lr * self.factor(k / K)
            step = self.own[i].step(direction(g, w))
            w = w - eta * (step + self.f.wd * w)
            total += g
        return w, total / K

    def end_round(self, active: Sequence[int]) -> None:
        if self.state == "average":
            sent = zip(*(self.own[i].sent() for i in active), strict=True)
            self.mean = [np.mean(vectors, axis=0) for vectors in sent]


def scaffold(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    make: Any,
    state: str,
    schedule: str,
    **common: Any,
) -> History:
    C = problem.num_clients
    c_i, c = np.zeros((C, problem.dim)), np.zeros(problem.dim)
    f = Federation(problem, w0, c=c, **common)
    clients, w = Clients(f, make, state, schedule, C), w0
    for t, active, lr in f.rounds(cohorts):
        w_K, c_plus = {}, c_i.copy()
        for i in active:
            shift = c - c_i[i]
            w_K[i], c_plus[i] = clients.walk(t, i, w, lr, lambda g, _, s=shift: g + s)
        clients.end_round(active)
        w = mean(w_K)
        c = c + (c_plus - c_i).sum(axis=0) / C
        c_i = c_plus
        f.record(w, w, c=c)
    return f.history(c_i=c_i)


def feddyn(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    make: Any,
    state: str,
    schedule: str,
    alpha: float = 0.1,
    **common: Any,
) -> History:
    C = problem.num_clients
    lam, lam_bar = np.zeros((C, problem.dim)), np.zeros(problem.dim)
    f = Federation(problem, w0, lam_bar=lam_bar, **common)
    clients, w = Clients(f, make, state, schedule, C), w0
    for t, active, lr in f.rounds(cohorts):
        w_K = {}
        for i in active:
            w_K[i], _ = clients.walk(
                t, i, w, lr, lambda g, w_k, i=i, w=w: g + lam[i] + alpha * (w_k - w)
            )
        clients.end_round(active)
        for i in active:
            lam[i] = lam[i] + alpha * (w_K[i] - w)
        lam_bar = lam_bar + alpha / C * sum(w_K[i] - w for i in active)
        w = mean(w_K) + lam_bar / alpha
        f.record(w, mean(w_K), lam_bar=lam_bar)
    return f.history(lam=lam)


def fedinit(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    make: Any,
    state: str,
    schedule: str,
    **common: Any,
) -> History:
    f = Federation(problem, w0, **common)
    clients, w = Clients(f, make, state, schedule, problem.num_clients), w0
    for t, active, lr in f.rounds(cohorts):
        starts = {i: f.start(i, w) for i in active}
        w_K = {i: f.end(i, clients.walk(t, i, starts[i], lr, lambda g, _: g)[0]) for i in active}
        clients.end_round(active)
        w = mean(w_K)
        f.record(w, w)
    return f.history()
