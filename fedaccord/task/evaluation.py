"""Loss and metrics over a whole set."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from fedaccord.core.metrics import Metric, select
from fedaccord.core.named import one_line
from fedaccord.core.vectors import fetch, sum_dtype, to_device
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.generators import random_numbers
from fedaccord.task.losses import weight
from fedaccord.task.solver import Loss, Pair, forward, tf32_as


class Score(NamedTuple):
    """Loss and metric sums of one batch."""

    loss: Tensor  # (), the sum over the targets
    weight: Tensor | int  # their number, see `losses.weight`
    sums: dict[str, Tensor]  # the sums of each metric


@torch.no_grad()
def evaluate(
    model: FlatModel,
    w: Tensor,
    batches: Iterable[Pair],
    loss: Loss,
    precision: str = "float32",
    threads: int = 1,
    metrics: str = "",
) -> dict[str, float]:
    """Mean loss over the samples, and metrics of the model at w, as of `core.metrics.select`.

    ``loss`` must be a mean over its batch for the value to be the mean over the set; that of
    classes is over their counted targets. Afterwards the model holds w. A set without samples, or
    whose targets are all ignored, gives an empty dict. ``precision`` as in `SequentialSolver`.
    ``threads``: Python threads, each with a copy of the model and a batch of its own; the result
    does not depend on their number, bit for bit, unless the model's forward pass changes it or
    draws random numbers, which begin from the same seed at each call.
    """
    with random_numbers(0, model.w.device), tf32_as(precision, model.w.device):
        return _evaluate(model, w, batches, loss, precision, threads, metrics)


def _evaluate(
    model: FlatModel,
    w: Tensor,
    batches: Iterable[Pair],
    loss: Loss,
    precision: str,
    threads: int,
    metrics: str,
) -> dict[str, float]:
    model.load(w)
    model.module.eval()
    total = torch.zeros((), dtype=sum_dtype(model.w.device), device=model.w.device)
    sums: dict[str, Tensor] = {}
    chosen: dict[str, Metric] = {}
    weights: Tensor | int = 0

    @torch.no_grad()  # of a thread
    def score(own: FlatModel, batch: Pair) -> Score:
        inputs, targets = batch
        try:
            predictions = forward(own, inputs, precision)
        except ValueError:
            raise
        except Exception as error:  # the module's own code may raise anything
            raise ValueError(f"model: its evaluation failed: {one_line(error)}") from error
        number = weight(loss, targets)
        value = loss(predictions, targets) * number
        if isinstance(number, Tensor):
            value = value.masked_fill(number == 0, 0.0)  # cross-entropy of no target is NaN
        measured = select(metrics, of_classes=not targets.is_floating_point())
        chosen.update(measured)
        metric_sums = {name: metric.sums(predictions, targets) for name, metric in measured.items()}
        return Score(value, number, metric_sums)

    for batch in _scores(score, _copies(model, threads), batches):
        total += batch.loss
        weights = weights + batch.weight
        for name, part in batch.sums.items():
            sums[name] = sums[name] + part if name in sums else part
    on_host = {name: to_device(part, "cpu") for name, part in sums.items()}
    loss_sum, number = fetch([total, weights])  # after this the sums' copies are complete, too
    if not number:
        return {}
    values = {name: metric.value(on_host[name]) for name, metric in chosen.items()}
    return {"loss": loss_sum / number, **values}


def _copies(model: FlatModel, number: int) -> list[FlatModel]:
    """The model and copies of it; no copies if it cannot be copied, as with `weight_norm`."""
    try:
        return [model, *(deepcopy(model) for _ in range(number - 1))]
    except Exception:  # attributes of any kind
        return [model]


def _scores(
    score: Callable[[FlatModel, Pair], Score], models: list[FlatModel], batches: Iterable[Pair]
) -> Iterator[Score]:
    """Scores of the batches in order, which this thread reads; each model has a thread."""
    if len(models) == 1:
        yield from (score(models[0], batch) for batch in batches)
        return
    idle, ahead = SimpleQueue[FlatModel](), deque[Future[Score]]()
    for model in models:
        idle.put(model)

    def work(batch: Pair) -> Score:
        own = idle.get()
        try:
            return score(own, batch)
        finally:
            idle.put(own)

    with ThreadPoolExecutor(len(models)) as pool:
        for batch in batches:
            if len(ahead) > len(models):
                yield ahead.popleft().result()
            ahead.append(pool.submit(work, batch))
        yield from (future.result() for future in ahead)
