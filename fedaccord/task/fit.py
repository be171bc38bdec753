"""Whether a model accepts a task's samples, and its predictions fit the targets."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedaccord.core.metrics import CLASSES_LAST, Metric, are_classes_second, check_alike
from fedaccord.core.named import call_unchanged
from fedaccord.data.samples import IGNORED, negative
from fedaccord.data.seeding import seeded
from fedaccord.task import batches
from fedaccord.task.batches import BatchFormat, describe
from fedaccord.task.clients import Clients
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.losses import LOSSES, OwnLoss, mean_squared_error, sequence_cross_entropy
from fedaccord.task.solver import Loss, forward
from fedaccord.task.sources import DatasetSource, PerClient, labels_of, returns_tensors
from fedaccord.task.tensors import warn_of_training

log = logging.getLogger("flwr")


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
    line = f"model: expected one that accepts {_form(inputs)} and returns predictions for targets"
    try:
        with torch.no_grad(), seeded(0):
            model.module.eval()
            warn_of_training(model.module)
            parts = batches.tensors_of(inputs)
            outputs: Tensor = call_unchanged(lambda *_: forward(model, inputs, precision), *parts)
            predictions = outputs.to(place)
    except Exception as error:  # the module's own code may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        reason += "; try precision=float32" if precision == "bfloat16" else ""
        if isinstance(inputs, Tensor) and not inputs.is_floating_point():
            reason += f"; its inputs are {inputs.dtype}: features must be floats, token ids int64"
        raise ValueError(f"{line} of {wanted}: {reason}") from error
    if loss is F.cross_entropy and predictions.shape[1:2] in ((), (1,)):
        raise ValueError(
            f"model: expected two or more outputs with loss=cross-entropy, got predictions "
            f"{tuple(predictions.shape)}: use (n, classes) with two classes or more, "
            "loss=mean-squared-error, or a function with binary_cross_entropy_with_logits"
        )
    in_a_row = predictions.numel() == targets.numel()  # (n,) beside (n, 1) is broadcast to (n, n)
    if targets.is_floating_point() and (in_a_row or loss is mean_squared_error):
        check_alike(predictions, targets)
    try:
        with torch.enable_grad(), seeded(0):
            leaf = predictions.detach().clone().requires_grad_(predictions.is_floating_point())
            value = loss(leaf.clone(), targets)  # CUDA would not survive a wrong class
    except Exception as error:
        if isinstance(loss, OwnLoss):
            raise
        with_loss = next((f", with loss={name}" for name, it in LOSSES.items() if it is loss), "")
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if loss is sequence_cross_entropy:
            one_hot = "replace one-hot targets by classes (n,), e.g. targets.argmax(1)"
            reason += f"; {CLASSES_LAST if are_classes_second(predictions, targets) else one_hot}"
        raise ValueError(f"{line} of {wanted}{with_loss}: {reason}") from error
    if isinstance(loss, OwnLoss) and value.isnan():
        log.warning("loss: %s is NaN for predictions of the untrained model", loss.name)
    return predictions


def check_kept(model: FlatModel, inputs: Any, precision: str) -> None:
    """Raise ValueError, in one line, for a pass in training mode that changes its inputs in place,
    for an averaged buffer that stays infinite or NaN, or as `FlatModel.check_kept`."""
    before, parts = model.frozen_checksums(), [*batches.tensors_of(inputs)]
    versions = [part._version for part in parts]
    constant: list[str] = []
    with torch.no_grad(), seeded(0), suppress(Exception):  # e.g. of BatchNorm with one sample
        infinite = _infinite(model)
        model.train()
        forward(model, inputs, precision)
        constant = [name for name in _infinite(model) if name in infinite]  # no running minimum
    if constant:
        raise ValueError(
            f"model: expected finite numbers with buffers=mean, {constant[0]} has inf or nan: "
            "register it with persistent=False, or set buffers=freeze"
        )
    if versions != [part._version for part in parts]:
        raise ValueError(
            "model: expected a forward pass that leaves its inputs as they are, in training mode "
            "it changes them in place: write x = x + noise for x += noise, and set inplace=False"
        )
    model.check_kept(before)
    model.load(model.w)


def _infinite(model: FlatModel) -> list[str]:
    """The names of averaged buffers with inf or NaN."""
    return [name for name, b in model.named_buffers().items() if not b.isfinite().all()]


def _form(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return f"inputs (n, ...) of {tuple(inputs.shape[1:])}"
    parts = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    if any(isinstance(part, tuple) for part in parts):  # collated lists
        advice = " (of lists? make them tensors, as a dataset's with_format('torch'))"
        return describe(inputs) + advice
    return describe(inputs)


def check_metrics(predictions: Tensor, targets: Tensor, chosen: Mapping[str, Metric]) -> None:
    """Compute the metrics, which raise as of their own, with a warning for each that is NaN.

    predictions: of these targets, as of `check_fit`.
    """
    for name, metric in chosen.items():
        if metric.sums(predictions, targets).isnan().any():
            log.warning("metrics: %s is NaN for predictions of the untrained model", name)


def check_labels(
    clients: Any, test: Any, predictions: Tensor, loss: Loss, form: BatchFormat
) -> None:
    """Raise ValueError, in one line, for labels without an output.

    clients, test, form: of a task. predictions: of samples, as of `check_fit`. The samples of a
    data set that was divided are not checked, nor samples that would have to be read.
    """
    if predictions.ndim < 2:
        return
    outputs = predictions.shape[1 if loss is F.cross_entropy else -1]
    for what, rows, labels in _every_labels(clients, test, loss):
        if labels.max() >= outputs and _is_returned(rows, labels, labels.max(), form):
            raise ValueError(
                f"{what}: expected labels below {outputs}, the model's outputs, got {labels.max()}"
            )


def check_from_zero(clients: Any, test: Any, loss: Loss, form: BatchFormat) -> None:
    """Raise ValueError, in one line, for labels below 0, except the ignored one.

    Arguments and checked samples as in `check_labels`.
    """
    for what, rows, labels in _every_labels(clients, test, loss):
        if len(wrong := negative(labels)) and _is_returned(rows, labels, wrong.min(), form):
            raise ValueError(
                f"{what}: expected labels from 0 on, got {wrong.min()}; number the classes "
                f"0, 1, ..., and mark ignored targets by {IGNORED}"
            )


def _every_labels(clients: Any, test: Any, loss: Loss) -> Iterator[tuple[str, Any, Any]]:
    """(name, samples, classes) of each part with classes; none with a loss of numbers."""
    if loss in (F.cross_entropy, sequence_cross_entropy):
        for what, rows in every_part(clients, test):
            if (labels := _labels(rows)) is not None and len(labels):
                yield what, rows, labels


def _is_returned(rows: Any, labels: Any, wrong: Any, form: BatchFormat) -> bool:
    """Whether samples have the label ``wrong`` of those that they store: a Dataset's own
    `__getitem__` may return another."""
    if tensors_of(rows) or not isinstance(rows, DatasetSource):
        return True
    first = torch.as_tensor(labels == wrong).nonzero()[0]
    _, targets = form.split(next(rows.only(first).batches(0)))
    return bool((targets == wrong).all())


def every_part(clients: Any, test: Any) -> Iterator[tuple[str, Any]]:
    """(name, samples) of each client and of the test; clients, test: of a task."""
    if clients.parts is None:
        of = clients.samples if isinstance(clients, Clients) else clients.sources.__getitem__
        yield from ((f"clients: client {i}", of(i)) for i in range(len(clients)))
    if isinstance(test, PerClient):
        yield from ((f"test of client {i}", part) for i, part in enumerate(test.parts))
    elif test is not None:
        yield "test", test


def _labels(rows: Any) -> Any:
    """The classes of samples, also of sequences; None: there are none, or they are unknown
    without reading the samples."""
    if tensors := tensors_of(rows):
        return None if tensors[-1].is_floating_point() else tensors[-1]
    return None if rows is None else labels_of(rows)


def tensors_of(rows: Any) -> tuple[Tensor, ...]:
    """The tensors of samples in tensors or a TensorDataset; empty for others, which are not
    read, and for one that returns others than its tensors."""
    rows = rows.rows if isinstance(rows, DatasetSource) else rows
    rows = rows.tensors if returns_tensors(rows) else rows
    return rows if isinstance(rows, tuple) and isinstance(rows[-1], Tensor) else ()
