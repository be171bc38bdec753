"""Metrics of a model's predictions, by name: sums over batches, the value from the sums, and the
spread of values over clients."""

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import torch
from torch import Tensor

from fedaccord.core import named
from fedaccord.core.options import did_you_mean
from fedaccord.core.vectors import sum_dtype

NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")  # of a metric, in messages
SHARE_UNIT = "0 to 1"  # a unit, displayed in percent
MOST_SURPRISED = 69.0  # nats a target: perplexity ends at 9e29, below `LARGEST_METRIC`


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that compares predictions with targets; metrics.toml documents it and is also read
    without PyTorch.

    sums: (predictions, targets) of a batch -> a tensor that is added up over the batches, in
        float64 if the device has it, without synchronising if possible.
    value: the sums of all batches, on the host -> the metric.
    of_classes: targets are class numbers, int64, of any shape (...), and predictions (..., classes)
        the scores of the classes; negative targets are left out, as by `cross_entropy`'s
        ignore_index. Otherwise targets are numbers, of the shape of the predictions.
    """

    of_classes: bool
    sums: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], float]


def _total_and_count(values: Tensor, count: Tensor) -> Tensor:
    """(2,) the sum of values, and their number."""
    dtype = sum_dtype(values.device)
    return torch.stack([values.sum(dtype=dtype), count.to(dtype)])


def _mean(sums: Tensor) -> float:
    total, count = sums.tolist()
    return total / count if count else math.nan


def _counted(predictions: Tensor, targets: Tensor) -> Tensor:
    """Which targets have an output: a loss ignores others, as -100 or the 255 of void pixels."""
    return (targets >= 0) & (targets < predictions.shape[-1])


def _hits(predictions: Tensor, targets: Tensor) -> Tensor:
    check_classes(predictions, targets)
    hits = predictions.argmax(dim=-1) == targets
    return _total_and_count(hits, _counted(predictions, targets).sum())


def _hits_of_five(predictions: Tensor, targets: Tensor) -> Tensor:
    check_classes(predictions, targets)
    largest = predictions.topk(min(5, predictions.shape[-1]), dim=-1).indices
    hits = largest == targets[..., None]
    return _total_and_count(hits, _counted(predictions, targets).sum())


def _class_counts(predictions: Tensor, targets: Tensor) -> Tensor:
    """(3, classes): the right predictions of each class, all its predictions, its samples."""
    check_classes(predictions, targets)
    classes, counted = predictions.shape[-1], _counted(predictions, targets)
    target, guess = targets[counted], predictions.argmax(dim=-1)[counted]
    rows = [target[guess == target], guess, target]
    counts = torch.stack([torch.bincount(row, minlength=classes) for row in rows])
    return counts.to(sum_dtype(targets.device))


def _macro_f1(sums: Tensor) -> float:
    right, guessed, present = sums
    occurs = guessed + present > 0
    return float((2 * right[occurs] / (guessed + present)[occurs]).mean())


def _errors(predictions: Tensor, targets: Tensor) -> Tensor:
    check_alike(predictions, targets)
    errors = (predictions - targets).abs()
    return _total_and_count(errors, torch.full((), errors.numel(), device=errors.device))


def _surprises(predictions: Tensor, targets: Tensor) -> Tensor:
    """-log p of the targets under the softmax of the predictions."""
    check_classes(predictions, targets)
    scores, counted = predictions.to(sum_dtype(predictions.device)), _counted(predictions, targets)
    own = scores.gather(-1, torch.where(counted, targets, 0)[..., None]).squeeze(-1)
    surprise = torch.where(counted, scores.logsumexp(dim=-1) - own, 0.0)
    return _total_and_count(surprise, counted.sum())


def _exp_of_mean(sums: Tensor) -> float:
    return math.exp(min(_mean(sums), MOST_SURPRISED))


FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_COMPUTED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], float]]] = {
    "accuracy": (_hits, _mean),
    "top-5-accuracy": (_hits_of_five, _mean),
    "f1": (_class_counts, _macro_f1),
    "perplexity": (_surprises, _exp_of_mean),
    "mae": (_errors, _mean),
}
METRICS = {
    name: Metric(of_classes=FACTS[name]["of_classes"], sums=sums, value=value)
    for name, (sums, value) in _COMPUTED.items()
}


def select(names: str, of_classes: bool) -> dict[str, Metric]:
    """The metrics of a setting, as "accuracy, f1"; "": accuracy of classes, none of numbers.

    ``package.module:function`` is a metric of the user's own, see `own_metric`, whose name is the
    function's. Raises ValueError, in one line, for a name that is unknown, does not fit the
    targets, or is listed twice.
    """
    fitting = [name for name, metric in METRICS.items() if metric.of_classes == of_classes]
    chosen = [part.strip() for part in names.split(",") if part.strip()] or fitting[:of_classes]
    metrics: dict[str, Metric] = {}
    for name in chosen:
        own = name.partition(":")[2] if named.PATH.fullmatch(name) else ""
        if not own and name not in fitting:
            kind = "class labels" if of_classes else "numbers as targets"
            near = "" if name in METRICS else did_you_mean(name, fitting, named.Functions())
            raise ValueError(
                f"metrics: expected names among {', '.join(fitting)}, which fit {kind}, or "
                f"{named.FORM}, got {name!r}{near}"
            )
        if own and not NAME.fullmatch(own):
            raise ValueError(
                f"metrics: expected a function whose name begins with a letter and has at most 64, "
                f"got {name!r}"
            )
        if own in (*METRICS, "loss"):
            raise ValueError(
                f"metrics: expected a function of another name, got {name!r}: {own!r} is taken"
            )
        if (own or name) in metrics:
            raise ValueError(f"metrics: expected different names, got {names!r}")
        metrics[own or name] = own_metric(name, of_classes) if own else METRICS[name]
    return metrics


def own_metric(path: str, of_classes: bool) -> Metric:
    """The mean over the samples of a function (predictions, targets) -> (n,), numbers or booleans.

    Raises ValueError, in one line, if it cannot be imported; ``sums`` raises it for other results.
    """
    function = named.function("metrics", path)

    def sums(predictions: Tensor, targets: Tensor) -> Tensor:
        try:
            values = named.call_unchanged(function, predictions, targets)
        except Exception as error:  # the user's own code may raise anything
            raise ValueError(f"metrics: {path} failed: {named.one_line(error)}") from error
        if not isinstance(values, Tensor) or values.shape != targets.shape[:1]:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"metrics: expected {path} to return a number for each sample, a tensor of shape "
                f"{tuple(targets.shape[:1])}, got {got}"
            )
        return _total_and_count(values, torch.full((), len(values), device=values.device))

    return Metric(
        of_classes=of_classes,
        sums=sums,
        value=_mean,
    )


CLASSES_LAST = "put the classes last, with output.movedim(1, -1)"


def are_classes_second(predictions: Tensor, targets: Tensor) -> bool:
    """Whether predictions have the shape (n, classes, ...) for targets (n, ...) of several."""
    return targets.ndim > 1 and predictions.shape[:1] + predictions.shape[2:] == targets.shape


def check_classes(predictions: Tensor, targets: Tensor) -> None:
    """Raise ValueError unless predictions are scores of two or more classes for each target."""
    if predictions.shape[:-1] != targets.shape or predictions.shape[-1] < 2:
        advice = "give labels as (n,), as floats to predict numbers"
        if are_classes_second(predictions, targets):
            advice = CLASSES_LAST
        raise ValueError(
            "model: expected scores (..., classes) of two or more classes for labels of shape "
            f"{tuple(targets.shape)}, got {tuple(predictions.shape)}; {advice}, or set metrics= "
            "to functions that read such outputs"
        )


def check_alike(predictions: Tensor, targets: Tensor) -> None:
    """Raise ValueError unless predictions and targets have the same shape."""
    if predictions.shape != targets.shape:
        advice = "end the model with a layer of as many outputs, or give classes as integers"
        if predictions.shape == (*targets.shape, 1):
            advice = "give targets as (n, 1)"
        elif (*predictions.shape, 1) == targets.shape:
            advice = "return (n, 1), without squeeze"
        elif predictions.numel() == targets.numel() and targets.ndim == 2:
            advice = "return output.flatten(1)"
        raise ValueError(
            f"model: expected predictions of the targets' shape {tuple(targets.shape)}, got "
            f"{tuple(predictions.shape)}; {advice}"
        )


# --- over clients ---------------------------------------------------------------------------------

OUTPUT, PERSONAL = "client-", "personal-"  # prefixes of the clients' metrics, by model
WORST, STD = "-worst-tenth", "-std"  # suffixes of the spread of a metric over the clients
NODES, BROADCAST = "-nodes", "-broadcast"  # suffixes: of the nodes' models, of the broadcast model
TENTH = 10  # one in ten clients, at least one, is among the worst
MIN = "min"
BETTER = {"loss": MIN, **{name: facts["better"] for name, facts in FACTS.items()}}


def over_clients(
    name: str, values: Sequence[float], weights: Sequence[float] | None
) -> dict[str, float]:
    """The mean of a metric over clients, and its spread, if its better direction is known: the mean
    over the worst tenth of them, and the standard deviation.

    weights: of the mean; None: equal. The sums are exact, hence independent of the order.
    """
    mean = fmean(values, weights)
    better = BETTER.get(name.removeprefix(OUTPUT).removeprefix(PERSONAL))
    if better is None:  # a metric of the user's ClientApp
        return {name: mean}
    worst_first = sorted(values, reverse=better == MIN)
    worst = worst_first[: math.ceil(len(values) / TENTH)]
    return {name: mean, f"{name}{WORST}": fmean(worst), f"{name}{STD}": deviation(values)}


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; NaN if a value is not finite, for which Python's raises."""
    return pstdev(values) if all(map(math.isfinite, values)) else math.nan
