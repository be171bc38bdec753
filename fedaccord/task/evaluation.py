"""Loss and accuracy over a whole set."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedaccord.core.rounds import sum_dtype
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.solver import Batch, Loss, allow_tf32, forward


@torch.no_grad()
def evaluate(
    model: FlatModel,
    w: Tensor,
    batches: Iterable[Batch],
    loss: Loss,
    precision: str = "float32",
) -> dict[str, float]:
    """Mean loss over the samples and, for class targets, the accuracy in [0, 1], of the model at w.

    ``loss`` must be a mean over its batch for the value to be the mean over the set. Afterwards
    the model holds w. An empty set gives an empty dict. ``precision`` as in `SequentialSolver`.
    """
    allow_tf32(precision, model.w.device)
    model.w.copy_(w)
    model.module.eval()
    total = torch.zeros((), dtype=sum_dtype(model.w.device), device=model.w.device)
    hits = torch.zeros((), dtype=torch.int64, device=model.w.device)
    examples, classes = 0, True
    for inputs, targets in batches:
        predictions = forward(model, inputs, precision)
        total += loss(predictions, targets) * len(targets)
        classes = not targets.is_floating_point()
        if classes:
            hits += (predictions.argmax(dim=-1) == targets).sum()
        examples += len(targets)
    if not examples:
        return {}
    mean_loss = {"loss": total.item() / examples}
    return mean_loss | {"accuracy": hits.item() / examples} if classes else mean_loss
