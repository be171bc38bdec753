"""SGD on the union of the clients' samples, in dense numpy.

for t = 0 .. T-1:
    for k = 0 .. K-1:   w <- w - lr_t (g(w) + wd w)
                        # g of all rows, clipped; under SAM at w + rho g/||g||
    w^{t+1} = w
"""

from typing import Any

import numpy as np

from .problem import Array, Federation, History, LeastSquares


def union(problem: LeastSquares) -> LeastSquares:
    """The same rows at one client."""
    pooled = LeastSquares(1, seed=0)
    pooled.A, pooled.b = np.concatenate(problem.A)[None], np.concatenate(problem.b)[None]
    return pooled


def run(problem: LeastSquares, w0: Array, rounds: int, **common: Any) -> History:
    f = Federation(union(problem), w0, **common)
    w = w0
    for t, _, lr_t in f.rounds([[0]] * rounds):
        for k in range(f.K(0)):
            w = w - lr_t * (f.gradient(t, 0, k, w) + f.wd * w)
        f.record(w, w)
    return f.history()
