"""FedDyn (arXiv:2111.04263) without a server, in dense numpy, in the signs of the ADMM family.

Every node is its own server: it keeps a model w^(i) and its own copy lam_bar^(i) of the mean
dual, besides its lam_i. Where the server averages, a node mixes; M = W^Q is the round's matrix.

    w^(i) = w^0, lam_i = 0, lam_bar^(i) = 0 for all i
    for t = 0 .. T-1, for all i at once:
        K steps on  f_i(w) + <lam_i, w> + (alpha/2) ||w - w^(i)||^2  from w_0 = w^(i):
            w_{k+1} = w_k - lr_t (g_i(w_k) + lam_i + alpha (w_k - w^(i)) + wd w_k)
        z_i = w_K
        dlam_i = alpha (z_i - w^(i))
        lam_bar^(i) <- sum_j M_ij (lam_bar^(j) + dlam_j)
        w^(i) <- sum_j M_ij z_j + lam_bar^(i) / alpha            (the new lam_bar^(i))
        lam_i <- lam_i + dlam_i

Decisions: all nodes are active, so the server's (1/C) sum over P is the mean that the mix
replaces. ri_center: centre of the proximal term and of the dual step under a relaxed start,
w^(i) ("server") or w_0 ("start"), as in feddyn.py. A failed node keeps w^(i), which holds its
lam_bar^(i)/alpha already: nothing is added to it again. W doubly stochastic keeps the mean of the
lam_bar^(i) at the mean of the lam_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    alpha: float = 0.1,
    gossip_steps: int = 1,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    ri_center: str = "server",
    sam_rho: float = 0.0,
) -> GossipHistory:
    if ri_center not in ("server", "start"):
        raise ValueError(f"ri_center: 'server' or 'start', not {ri_center!r}")
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    C = problem.num_clients
    w = start(w0, C)
    lam, lam_bar = np.zeros_like(w), np.zeros_like(w)  # row i of lam_bar: lam_bar^(i)
    last = last_models(w, ri_beta, ri_first_visit)
    recorder, lam_trace, lam_bar_trace = Recorder(w), [lam], [lam_bar]
    for t, W in enumerate(mixing):
        lr_t = lr * lr_decay**t
        up = working(C, failed, t)
        z, dlam = w.copy(), np.zeros_like(lam)
        for i in up:
            w_k = last.start(i, w[i])
            center = w[i] if ri_center == "server" else w_k
            for k in range(steps_of(local_steps, i)):
                g = gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g + lam[i] + alpha * (w_k - center) + weight_decay * w_k)
            z[i] = w_k
            dlam[i] = alpha * (w_k - center)
            last.store(i, w_k)
        M = power(W, failures(failed, t), gossip_steps)
        lam = lam + dlam
        lam_bar = M @ (lam_bar + dlam)
        w = w.copy()
        w[up] = (M @ z + lam_bar / alpha)[up]
        recorder.add(z, w)
        lam_trace.append(lam)
        lam_bar_trace.append(lam_bar)
    return recorder.history(
        {"lam": lam, "lam_bar": lam_bar, "last": last.table}, lam=lam_trace, lam_bar=lam_bar_trace
    )
