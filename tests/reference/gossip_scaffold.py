"""SCAFFOLD (arXiv:1910.06378, option II) without a server, in dense numpy.

Every node is its own server: it keeps a model w^(i) and its own copy c^(i) of the server's
variate, besides its c_i. Where the server averages, a node mixes; M = W^Q is the round's matrix.

    w^(i) = w^0, c_i = 0, c^(i) = 0 for all i
    for t = 0 .. T-1, for all i at once:
        w_0 = w^(i)
        for k = 0 .. K_i-1:   w_{k+1} = w_k - lr_t (g_i(w_k) - c_i + c^(i) + wd w_k)
        z_i = w_{K_i}
        dc_i = -c^(i) + (w_0 - z_i) / (K_i lr_t)
        w^(i) <- sum_j M_ij (w^(j) + server_lr (z_j - w^(j)))
        c^(i) <- sum_j M_ij (c^(j) + dc_j)
        c_i <- c_i + dc_i

Decisions: all nodes are active, so the server's (1/C) sum over P is the mean that the mix
replaces; both mixes use the values of the round's start; a relaxed start enters dc_i as the true
displacement. A failed node has dc_i = 0 and z_i = w^(i). W doubly stochastic keeps the mean of
the c^(i) at the mean of the c_i; at K_i = 1 the method is gradient tracking (arXiv:1607.03218) in
the form that mixes after the step.
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
    server_lr: float = 1.0,
    gossip_steps: int = 1,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.0,
) -> GossipHistory:
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    C = problem.num_clients
    w = start(w0, C)
    c_i, c = np.zeros_like(w), np.zeros_like(w)  # row i of c: c^(i)
    last = last_models(w, ri_beta, ri_first_visit)
    recorder, c_trace, c_i_trace = Recorder(w), [c], [c_i]
    for t, W in enumerate(mixing):
        lr_t = lr * lr_decay**t
        z, dc = w.copy(), np.zeros_like(c)
        for i in working(C, failed, t):
            K_i = steps_of(local_steps, i)
            w_start = last.start(i, w[i])
            w_k = w_start
            for k in range(K_i):
                g = gradient(t, i, k, w_k)
                w_k = w_k - lr_t * (g - c_i[i] + c[i] + weight_decay * w_k)
            z[i] = w_k
            dc[i] = -c[i] + (w_start - w_k) / (K_i * lr_t)
            last.store(i, w_k)
        M = power(W, failures(failed, t), gossip_steps)
        w = M @ (w + server_lr * (z - w))
        c = M @ (c + dc)
        c_i = c_i + dc
        recorder.add(z, w)
        c_trace.append(c)
        c_i_trace.append(c_i)
    return recorder.history({"c_i": c_i, "c": c, "last": last.table}, c=c_trace, c_i=c_i_trace)
