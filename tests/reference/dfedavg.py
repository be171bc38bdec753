"""DFedAvg - arXiv:2104.11375, in dense numpy.

    x_i = x^0 for all i
    for t = 0 .. T-1, for all i at once:
        y_0 = x_i
        for k = 0 .. K-1:   y_{k+1} = y_k - lr_t (g_i(y_k) + wd y_k)
        z_i = y_K
        x_i <- sum_j (W^Q)_ij z_j

Decisions: a round trains, then mixes, so x_i is what a node trains from next; W is the round's
own matrix, Q (gossip_steps) is one in the paper. Relaxed start (ri_beta): y_0 = x_i + ri_beta
(x_i - l_i), l_i the z_i of the node's last round of training, x_i^0 before it. ri_first_visit
changes nothing here: a node that has not trained yet still holds x_i^0.
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
    gossip_steps: int = 1,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.0,
) -> GossipHistory:
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    C = problem.num_clients
    x = start(w0, C)
    last = last_models(x, ri_beta, ri_first_visit)
    recorder = Recorder(x)
    for t, W in enumerate(mixing):
        lr_t = lr * lr_decay**t
        z = x.copy()
        for i in working(C, failed, t):
            y = last.start(i, x[i])
            for k in range(steps_of(local_steps, i)):
                g = gradient(t, i, k, y)
                y = y - lr_t * (g + weight_decay * y)
            z[i] = y
            last.store(i, y)
        x = power(W, failures(failed, t), gossip_steps) @ z
        recorder.add(z, x)
    return recorder.history({"last": last.table})
