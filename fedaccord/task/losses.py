"""Losses by name and by the form of the targets; each is a mean over the samples of a batch."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord.core import named
from fedaccord.core.metrics import check_alike
from fedaccord.data.samples import IGNORED
from fedaccord.task.solver import Loss

AUTO = "auto"


def loss_of(loss: str | Loss, targets: Tensor) -> Loss:
    """The loss of a setting: a name, or ``package.module:function``; auto: `usual_loss`.

    Raises ValueError, in one line, as `checked`, and if it cannot be imported.
    """
    if not isinstance(loss, str):
        return checked(loss)
    if loss == AUTO:
        return usual_loss(targets)
    return LOSSES.get(loss) or OwnLoss(named.function("loss", loss), loss)


def checked(loss: Loss) -> Loss:
    """A loss of this module unchanged, a function of the user's own as an `OwnLoss`.

    Raises ValueError, in one line, as `OwnLoss`.
    """
    name = getattr(loss, "__name__", type(loss).__name__)
    return loss if loss in LOSSES.values() else OwnLoss(loss, name)


@dataclass(frozen=True)
class OwnLoss:
    """A function of the user's own, (predictions, targets) -> a tensor of ().

    A module is copied; the copy follows the predictions to their device and precision.
    Raises ValueError, in one line, for a class and a module with parameters to train; when called,
    if it fails, changes an argument or a buffer of its own, or returns something else; if the
    predictions have a gradient, the value must have one.
    """

    function: Loss
    name: str

    def __post_init__(self) -> None:
        if isinstance(self.function, type):
            kind = self.function.__name__
            raise ValueError(
                f"loss: expected a function of (predictions, targets), got the class {kind}; "
                f"create an object, e.g. {kind}()"
            )
        if not isinstance(self.function, nn.Module):
            return
        for name, parameter in self.function.named_parameters():
            if parameter.requires_grad:
                raise ValueError(
                    f"loss: expected a module without parameters to train, {self.name} has "
                    f"{name!r}, which no step would change: freeze it by requires_grad_(False), or "
                    "make it a parameter of the model, whose forward returns it with its outputs"
                )
        object.__setattr__(self, "function", copy.deepcopy(self.function))

    def __call__(self, predictions: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.function, nn.Module):
            self.function.to(predictions.device, predictions.dtype)
        before = self._buffers()
        try:
            value = named.call_unchanged(self.function, predictions, targets)
        except Exception as error:  # the user's own code may raise anything
            raise ValueError(
                f"loss: {self.name} failed for predictions {tuple(predictions.shape)} and targets "
                f"{tuple(targets.shape)} {targets.dtype}: {named.one_line(error)}"
            ) from error
        pairs = zip(self._buffers(), before, strict=True)
        if any(b is not b_0 or version != version_0 for (b, version), (b_0, version_0) in pairs):
            raise ValueError(
                f"loss: expected a function of predictions and targets alone, {self.name} changes "
                "its buffers, which would pass from client to client and from tests to training: "
                "compute them in the model, as buffers of its own"
            )
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            got = f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            got += f" {value.dtype}" if isinstance(value, Tensor) and not value.ndim else ""
            raise ValueError(
                f"loss: expected {self.name} to return one number for a batch, a tensor of (), "
                f"got {got}"
            )
        if torch.is_grad_enabled() and predictions.requires_grad and not value.requires_grad:
            raise ValueError(
                f"loss: expected {self.name} to return a number with a gradient for the "
                "predictions, got one without: compute it from them in PyTorch, without detach, "
                "argmax or Python numbers"
            )
        return value

    def _buffers(self) -> list[tuple[Tensor, int]]:
        """Each buffer of a module, with how often it was changed in place."""
        if not isinstance(self.function, nn.Module):
            return []
        return [(buffer, buffer._version) for buffer in self.function.buffers()]


def usual_loss(targets: Tensor) -> Loss:
    """Cross-entropy of classes, also of sequences of them, and the mean squared error of numbers.

    targets: (n, ...), integers or floats.
    """
    if targets.is_floating_point():
        return mean_squared_error
    return F.cross_entropy if targets.ndim == 1 else sequence_cross_entropy


def mean_squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """The mean over all numbers. Raises ValueError if predictions and targets differ in shape."""
    check_alike(predictions, targets)
    return F.mse_loss(predictions, targets)


def sequence_cross_entropy(predictions: Tensor, targets: Tensor) -> Tensor:
    """predictions: (n, ..., classes); targets: (n, ...), where -100 is left out; 0 if all are."""
    total = F.cross_entropy(predictions.flatten(0, -2), targets.flatten(), reduction="sum")
    return total / counted(targets).clamp(min=1)


def weight(loss: Loss, targets: Tensor) -> Tensor | int:
    """The number of targets that a batch's mean is over, or of its samples: the means of batches
    with these weights give the mean of the whole set."""
    of_classes = loss in (F.cross_entropy, sequence_cross_entropy)
    return counted(targets) if of_classes and not targets.is_floating_point() else len(targets)


def counted(targets: Tensor) -> Tensor:
    """(), how many targets cross-entropy does not ignore."""
    return (targets != IGNORED).sum()


LOSSES: dict[str, Loss] = {
    "cross-entropy": F.cross_entropy,
    "sequence-cross-entropy": sequence_cross_entropy,
    "mean-squared-error": mean_squared_error,
}
