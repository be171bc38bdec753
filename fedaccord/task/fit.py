"""Whether a model accepts a task's samples, and its predictions fit the targets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    predictions, known = None, next((name for name, it in LOSSES.items() if it is loss), "")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.module.eval()
            predictions = forward(model, inputs, precision).to(place)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            scores = predictions.detach().clone().requires_grad_(predictions.is_floating_point())
            value = loss(scores, targets)  # CUDA would not survive a wrong class
    except Exception as error:  # the module's and the loss's own code may raise anything
        if predictions is not None and not known:
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
        of_loss = "" if predictions is None else f", with loss={known}"
        raise ValueError(
            f"model: expected one that accepts {form} and returns predictions for "
            f"targets of {wanted}{of_loss}: {reason}"
        ) from error
    if not isinstance(value, Tensor) or value.ndim:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss: expected one number for a batch, a tensor of (), got {got}")
    if not value.requires_grad:
        raise ValueError(
            "loss: expected a number with a gradient by the predictions, got one without: compute "
            "it from them in PyTorch, without detach, argmax or numbers of Python"
        )
    return predictions


def check_tests(predictions: Tensor, test: Any, loss: Loss) -> None:
    """Raise ValueError, in one line, for test labels without an output.

    predictions: of samples, as of `check_fit`. test: as `labels_of` reads it.
    """
    labels = labels_of(test) if loss is F.cross_entropy else None
    if labels is not None and labels.max() >= (classes := predictions.shape[-1]):
        raise ValueError(
            f"test: expected labels below {classes}, the model's outputs, got {labels.max()}"
        )
