"""Whether a model accepts a task's samples, and its predictions fit the targets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedaccord.core.metrics import check_classes
from fedaccord.core.named import one_line
from fedaccord.task.batches import describe
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.losses import LOSSES
from fedaccord.task.solver import Loss, forward
from fedaccord.task.sources import labels_of


def check_fit(
    model: FlatModel,
    inputs: Any,
    targets: Tensor,
    loss: Loss,
    classes: int | None,
    precision: str = "float32",
) -> Tensor:
    """The predictions of samples, as of the last class; their loss is evaluated.

    classes: None: unknown, or the targets are numbers. precision: as of `forward`. Raises
    ValueError, in one line, if the model does not accept the samples, or the loss not its
    predictions.
    """
    wanted, place = f"{tuple(targets.shape[1:])} {targets.dtype}", model.w.device
    if classes is not None:
        place = torch.device("cpu")
        wanted, targets = f"{classes} classes", torch.full(targets.shape, classes - 1)
    predictions = None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.module.eval()
            predictions = forward(model, inputs, precision).to(place)
            value = loss(predictions, targets)  # CUDA would not survive a wrong class
    except Exception as error:  # the module's and the loss's own code may raise anything
        if predictions is not None and loss not in LOSSES.values():
            raise ValueError(
                f"loss: expected one that accepts predictions {tuple(predictions.shape)} and "
                f"targets {tuple(targets.shape)} {targets.dtype}: {one_line(error)}"
            ) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        reason += "; try precision=float32" if precision == "bfloat16" else ""
        form = describe(inputs)
        parts = inputs.values() if isinstance(inputs, Mapping) else [inputs]
        if isinstance(inputs, Tensor):
            form = f"inputs (n, ...) of {tuple(inputs.shape[1:])}"
            if not inputs.is_floating_point():
                reason += f"; its inputs are {inputs.dtype}, as tokens: features must be floats"
        elif any(isinstance(part, tuple) for part in parts):  # collated lists
            form += " (of lists? make them tensors, as a dataset's with_format('torch'))"
        raise ValueError(
            f"model: expected one that accepts {form} and returns predictions for "
            f"targets of {wanted}: {reason}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss: expected one number for a batch, in a tensor, got {got}")
    return predictions


def check_tests(predictions: Tensor, targets: Tensor, test: Any, loss: Loss) -> None:
    """Raise ValueError, in one line, if test samples like these could not be scored.

    predictions, targets: of samples. test: as `labels_of` reads it.
    """
    if targets.is_floating_point():
        return
    check_classes(predictions, targets)
    labels = labels_of(test) if loss is F.cross_entropy else None
    if labels is not None and labels.max() >= (classes := predictions.shape[-1]):
        raise ValueError(
            f"test: expected labels below {classes}, the model's outputs, got {labels.max()}"
        )
