"""SGD on the union of the clients' samples, in dense numpy.

for t = 0 .. T-1:
    for k = 0 .. K-1:   w <- w - lr_t (g(w) + wd w)
                        # g of all rows, clipped; under SAM at w + rho g/||g||
    w^{t+1} = w
"""

from __future__ import annotations

import numpy as np

from .problem import Array, History, LeastSquares, LocalGradient


def union(problem: LeastSquares) -> LeastSquares:
    """The same rows at one client."""
    pooled = LeastSquares(1, seed=0)
    pooled.A, pooled.b = np.concatenate(problem.A)[None], np.concatenate(problem.b)[None]
    return pooled


def run(
    problem: LeastSquares,
    w0: Array,
    rounds: int,
    *,
    lr: float,
    local_steps: int,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    sam_rho: float = 0.0,
) -> History:
    gradient = LocalGradient(union(problem), None, clip_norm, sam_rho)
    w, averages = w0, [w0]
    for t in range(rounds):
        for k in range(local_steps):
            w = w - lr * lr_decay**t * (gradient(t, 0, k, w) + weight_decay * w)
        averages.append(w)
    return History(np.array(averages), np.array(averages), {}, {}, {})
