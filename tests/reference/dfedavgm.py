"""DFedAvgM - arXiv:2104.11375, Algorithm 1, in dense numpy: heavy ball within a round.

    x_i = x^0 for all i
    for t = 0 .. T-1, for all i at once:
        y_{-1} = y_0 = x_i
        for k = 0 .. K-1:
            y_{k+1} = y_k - lr_t (g_i(y_k) + wd y_k) + theta (y_k - y_{k-1})
        z_i = y_K
        x_i <- sum_j (W^Q)_ij z_j

theta is the argument momentum. Decisions: the momentum starts from rest in every round, at the
relaxed start if there is one; weight decay enters the momentum, as in torch's SGD without
dampening; the clip acts on g_i alone. Q, relaxed starts and failing nodes as in dfedavg.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from .gossip import (
    Failures,
    GossipHistory,
    Mixing,
    Recorder,
    failures,
    last_models,
    power,
    start,
    working,
)
from .problem import Array, Batches, LeastSquares, LocalGradient, steps_of


def run(
    problem: LeastSquares,
    w0: Array,
    mixing: Mixing,
    *,
    lr: float,
    local_steps: int | Sequence[int],
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    batches: Batches | None = None,
    failed: Failures | None = None,
    momentum: float = 0.9,
    gossip_steps: int = 1,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.0,
) -> GossipHistory:
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    C, theta = problem.num_clients, momentum
    x = start(w0, C)
    last = last_models(x, ri_beta, ri_first_visit)
    recorder = Recorder(x)
    for t, W in enumerate(mixing):
        lr_t = lr * lr_decay**t
        z = x.copy()
        for i in working(C, failed, t):
            y = last.start(i, x[i])
            y_old = y
            for k in range(steps_of(local_steps, i)):
                g = gradient(t, i, k, y)
                y, y_old = y - lr_t * (g + weight_decay * y) + theta * (y - y_old), y
            z[i] = y
            last.store(i, y)
        x = power(W, failures(failed, t), gossip_steps) @ z
        recorder.add(z, x)
    return recorder.history({"last": last.table})
