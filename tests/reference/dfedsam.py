"""DFedSAM and DFedSAM-MGS - arXiv:2302.04083, in dense numpy.

    x_i = x^0 for all i
    for t = 0 .. T-1:
        for all i:
            y_0 = x_i
            for k = 0 .. K-1:
                e = r g_i(y_k) / ||g_i(y_k)||
                y_{k+1} = y_k - lr_t (g_i(y_k + e) + wd y_k)             (same batch, clipped)
            z_i = y_K
        Q times, for all i at once:   z_i <- sum_j W_ij z_j
        x_i = z_i

r is the argument sam_rho, Q is gossip_steps; Q = 1 is DFedSAM. Decisions: y_0 is set once before
the local steps; the Q mixes are all there are, there is no further one before them; 1e-12 is added
to the norm. Relaxed starts and failing nodes as in dfedavg.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import topology
from .gossip import (
    Failures,
    GossipHistory,
    Mixing,
    Recorder,
    failures,
    last_models,
    start,
    working,
)
from .problem import Array, Batches, LeastSquares, LocalGradient, ascent, steps_of


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
    sam_rho: float = 0.1,
) -> GossipHistory:
    r = sam_rho
    gradient = LocalGradient(problem, batches, clip_norm)
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
                e = ascent(gradient.raw(t, i, k, y), r)
                g = gradient.clipped(t, i, k, y + e)
                y = y - lr_t * (g + weight_decay * y)
            z[i] = y
            last.store(i, y)
        x = z.copy()
        for _ in range(gossip_steps):
            x = topology.without(W, failures(failed, t)) @ x
        recorder.add(z, x)
    return recorder.history({"last": last.table})
