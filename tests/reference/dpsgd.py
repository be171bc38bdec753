"""D-PSGD - arXiv:1705.09056, Algorithm 1, in dense numpy.

    x_i = x^0 for all i
    for t = 0 .. T-1, for all i at once:
        "lian":  x_i <- sum_j W_ij x_j - lr_t (g_i(x_i) + wd x_i)        (the paper)
        "atc":   z_i = x_i - lr_t (g_i(x_i) + wd x_i),   x_i <- sum_j W_ij z_j

Decisions: in "lian" the gradient is at the model before the mix, and the step itself is not mixed
in this round; "atc" (adapt, then combine) is what comparisons with DFedAvg mean. z_i of "lian" is
also x_i after its own step, so x_i <- sum_j W_ij x_j + (z_i - x_i). That is how more than one
local step is read (local_steps > 1, not in the paper), and gossip_steps = Q takes W^Q for W. A
failed node takes no step.

Relaxed start (ri_beta), not in the paper: g_i and the step are at y_i = x_i + ri_beta (x_i - l_i),
l_i the z_i of the node's last round, and z_i = y_i - lr_t (g_i(y_i) + wd y_i). In "lian" what is
mixed stays x_j, so the relaxation, too, is a node's own until the next mix.
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
    local_steps: int | Sequence[int] = 1,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    batches: Batches | None = None,
    failed: Failures | None = None,
    variant: str = "lian",
    gossip_steps: int = 1,
    ri_beta: float = 0.0,
    ri_first_visit: str = "initial",
    sam_rho: float = 0.0,
) -> GossipHistory:
    if variant not in ("lian", "atc"):
        raise ValueError(f"variant: lian or atc, not {variant!r}")
    gradient = LocalGradient(problem, batches, clip_norm, sam_rho)
    C = problem.num_clients
    x = start(w0, C)
    last = last_models(x, ri_beta, ri_first_visit)
    recorder = Recorder(x)
    for t, W in enumerate(mixing):
        lr_t = lr * lr_decay**t
        z = x.copy()
        for i in working(C, failed, t):
            z[i] = last.start(i, x[i])
            for k in range(steps_of(local_steps, i)):
                g = gradient(t, i, k, z[i])
                z[i] = z[i] - lr_t * (g + weight_decay * z[i])
            last.store(i, z[i])
        M = power(W, failures(failed, t), gossip_steps)
        x = M @ x + (z - x) if variant == "lian" else M @ z
        recorder.add(z, x)
    return recorder.history({"last": last.table})
