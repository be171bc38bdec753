"""Losses by name and by the form of the targets; each is a mean over the samples of a batch."""

from torch import Tensor
from torch.nn import functional as F

from fedaccord.core import named
from fedaccord.core.metrics import check_alike
from fedaccord.task.solver import Loss

AUTO = "auto"


def loss_of(name: str, targets: Tensor) -> Loss:
    """The loss of a setting: a name, or ``package.module:function``; auto: `usual_loss`.

    Raises ValueError, in one line, if the function cannot be imported.
    """
    if name == AUTO:
        return usual_loss(targets)
    if name in LOSSES:
        return LOSSES[name]
    found: Loss = named.function("loss", name)
    return found


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
    """predictions: (n, ..., classes); targets: (n, ...), where -100 is left out."""
    return F.cross_entropy(predictions.flatten(0, -2), targets.flatten())


LOSSES: dict[str, Loss] = {
    "cross-entropy": F.cross_entropy,
    "sequence-cross-entropy": sequence_cross_entropy,
    "mean-squared-error": mean_squared_error,
}
