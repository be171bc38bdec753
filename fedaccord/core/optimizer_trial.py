"""Trial steps of the user's own optimiser, before a run begins."""

import torch

from fedaccord.core.named import one_line
from fedaccord.core.optimizer import OPTIMIZERS, Optimizer
from fedaccord.core.rule import LocalConfig

SHAPES = ((2, 3), (3,))  # of a model of ones
STEPS = 10  # an optimiser may sum up some directions before it moves w


def check_step(optimizer: Optimizer) -> None:
    """Raise ValueError, in one line, if a step of the user's own optimiser fails, or if its steps
    leave w as it is, for example because they return another vector."""
    if type(optimizer) in OPTIMIZERS.values():
        return
    name = type(optimizer).__name__
    w = torch.ones(sum(torch.Size(shape).numel() for shape in SHAPES))
    config = LocalConfig(
        round=0,
        rounds=1,
        lr=0.1,
        weight_decay=0.1,
        clip_norm=0.0,
        client=0,
        seed=0,
        shapes=SHAPES,
        steps=STEPS,
    )
    version = w._version
    try:
        with torch.no_grad():
            own = optimizer.init(w)
            if hasattr(own, "_fields"):
                for _ in range(STEPS):
                    d = torch.ones_like(w)
                    optimizer.step(w, d, own, config.lr, config.weight_decay, config)
    except Exception as error:  # the user's own code may raise anything
        raise ValueError(f"optimizer: a step of {name} failed: {one_line(error)}") from error
    if not hasattr(own, "_fields"):
        raise ValueError(
            f"optimizer: expected {name}.init to return a NamedTuple of vectors, got a "
            f"{type(own).__name__}"
        )
    if w._version == version and bool((w == 1).all()):  # `w.data` has a version of its own
        raise ValueError(
            f"optimizer: expected {name}.step to change w in place, e.g. w.sub_(lr * d), it left w "
            "as it was"
        )
