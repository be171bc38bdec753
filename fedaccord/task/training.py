"""The local loop: every method of this package takes its local steps here."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fedaccord.task.vectors import FlatModel

Batch = tuple[Tensor, Tensor]  # inputs, targets
Loss = Callable[[Tensor, Tensor], Tensor]  # (predictions, targets) -> scalar
GradientAt = Callable[[Tensor], Tensor]  # puts the batch's gradient at a point into g; the loss
Clip = Callable[[], None]  # bounds the norm of g
Oracle = Callable[[FlatModel, GradientAt, Clip], Tensor]  # leaves a clipped gradient in g; the loss


class Descent(NamedTuple):
    """What a local run did."""

    steps: int
    loss: float  # mean over the steps of the batch loss at the point before the step


def sum_dtype(device: torch.device) -> torch.dtype:
    """What losses are summed in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def gradient_at_w(model: FlatModel, gradient_at: GradientAt, clip: Clip) -> Tensor:
    """The plain oracle: the batch's gradient at w."""
    value = gradient_at(model.w)
    clip()
    return value


def descend(
    model: FlatModel,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    lr: float,
    scale: float = 1.0,
    shift: Tensor | None = None,
    rho: float = 0.0,
    anchor: Tensor | None = None,
    decay: float = 1.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    oracle: Oracle = gradient_at_w,
    precision: str = "float32",
) -> Descent:
    """Walk ``model.w`` along a direction affine in the gradient, a step per batch:

        w <- w - lr * (scale * clip(g(w)) + shift + rho * (w - anchor) + decay * weight_decay * w)

    Everything that does not depend on w or g is folded once, before the first step; a step then
    costs the gradient and at most three passes over w, in place and without allocating:

        w <- (1 - lr (rho + decay wd)) w - lr scale clip(g) - lr (shift - rho anchor)

    shift, anchor: (d,) or None for zero. clip_norm bounds the norm of the data gradient alone,
    before anything is added to it. ``oracle`` leaves the clipped gradient g(w) in ``model.g``: the
    batch's at w, or one taken elsewhere, by ``gradient_at``; ``model.w`` stays as it is.
    ``precision="bfloat16"`` runs the forward pass under autocast; w, g and the step keep their
    dtype.
    """
    w, g, module = model.w, model.g, model.module
    constant = _minus(shift, rho, anchor)
    shrink = 1.0 - lr * (rho + decay * weight_decay)
    total = torch.zeros((), dtype=sum_dtype(w.device), device=w.device)
    steps = 0
    module.train()

    def clip() -> None:
        if clip_norm is not None:
            g.mul_((clip_norm / torch.linalg.vector_norm(g)).clamp_(max=1.0))

    for inputs, targets in batches:

        @torch.enable_grad()
        def gradient_at(
            point: Tensor, inputs: Tensor = inputs, targets: Tensor = targets
        ) -> Tensor:
            g.zero_()
            with model.at(point):  # layers read their weights on the way back too
                with torch.autocast(w.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                    predictions = module(inputs)
                value = loss(predictions.to(w.dtype), targets)
                value.backward()  # type: ignore[no-untyped-call]
            return value.detach()

        with torch.no_grad():
            total += oracle(model, gradient_at, clip)
            if shrink != 1.0:
                w.mul_(shrink)
            w.add_(g, alpha=-lr * scale)
            if constant is not None:
                w.add_(constant, alpha=-lr)
        steps += 1
    return Descent(steps, total.item() / max(steps, 1))


def _minus(shift: Tensor | None, rho: float, anchor: Tensor | None) -> Tensor | None:
    """shift - rho * anchor, or None where it is zero."""
    if rho == 0.0 or anchor is None:
        return shift
    constant = -rho * anchor
    return constant if shift is None else constant.add_(shift)
