"""Optimisers of local steps in dense numpy: steps along d, without rate and weight decay.

`sent` has the vectors that clients may average, `start` begins with such a mean.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RATES: dict[str, Callable[[float], float]] = {  # of the share of the local steps already taken
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + float(np.cos(np.pi * x))) / 2,
}


class SGD:
    def step(self, d: Array) -> Array:
        return d

    def sent(self) -> list[Array]:
        return []

    def start(self) -> None:
        pass


class Momentum:
    def __init__(self, mu: float = 0.9, nesterov: bool = False) -> None:
        self.b, self.mu, self.nesterov = np.zeros(1), mu, nesterov

    def step(self, d: Array) -> Array:
        self.b = self.mu * self.b + d
        return d + self.mu * self.b if self.nesterov else self.b

    def sent(self) -> list[Array]:
        return [self.b]

    def start(self, b: Array) -> None:
        self.b = b


class AdamW:
    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.m, self.v, self.n = np.zeros(1), np.zeros(1), 0.0
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


def orthogonal(X: Array) -> Array:
    """Muon's polynomial of degree five, five times, on singular values: numpy's SVD has them."""
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    Y: Array = (U * s) @ Vt
    return Y


class Muon:
    """Nesterov's form on the first entries, a matrix of that shape, and AdamW on the others."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.others, self.M = AdamW(), np.zeros(shape)

    def step(self, d: Array) -> Array:
        G, mu = d[: self.M.size].reshape(self.M.shape), 0.95
        self.M = mu * self.M + (1 - mu) * G
        update = orthogonal((1 - mu) * G + mu * self.M)
        step = self.others.step(d)
        step[: self.M.size] = 0.2 * np.sqrt(max(G.shape)) * update.ravel()
        return step

    def sent(self) -> list[Array]:
        return [*self.others.sent(), self.M]

    def start(self, m: Array, v: Array, M: Array) -> None:
        self.others.start(m, v)
        self.M = M
