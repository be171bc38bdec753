"""The task of samples, a model and a loss that are arguments of a call."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedaccord.config import RunConfig
from fedaccord.core.metrics import select
from fedaccord.task import Clients, Samples, Task, find_device, models
from fedaccord.task.batches import BatchFormat, describe
from fedaccord.task.solver import Loss
from fedaccord.task.sources import Source, SourceClients, is_tensors, source_of


def own_task(
    config: RunConfig,
    clients: Sequence[Any],
    test: Any,
    model: str | nn.Module,
    loss: Loss,
    form: BatchFormat,
) -> Task:
    """Raises ValueError, in one line, for samples that are none, and a model that does not fit."""
    task = Task(
        _module(config, model, clients),
        *_samples(clients, test, form),
        loss,
        find_device(config.task.device),
        form,
        metrics=config.task.metrics,
    )
    dtype = task.model(config.strategy.model_settings).w.dtype
    select(task.metrics, of_classes=not task.example(1, dtype)[1].is_floating_point())
    return task


def _samples(
    clients: Sequence[Any], test: Any, form: BatchFormat
) -> tuple[Clients | SourceClients, Samples | Source | None]:
    """In tensors, if all clients have tensors."""
    for i, samples in enumerate([*clients, test]):
        if is_tensors(samples):
            _check_tensors(_name(i, clients), samples, clients[0])
    if all(map(is_tensors, clients)):
        xs, ys = zip(*clients, strict=True)
        if test is not None and not is_tensors(test):
            test = _source(test, "test", form)
        return Clients(xs, ys), test if test is None or not is_tensors(test) else (test[0], test[1])
    sources = [_source(given, _name(i, clients), form) for i, given in enumerate(clients)]
    return SourceClients(sources), None if test is None else _source(test, "test", form)


def _name(i: int, clients: Sequence[Any]) -> str:
    return f"clients: client {i}" if i < len(clients) else "test"


def _source(given: Any, name: str, form: BatchFormat) -> Source:
    try:
        return source_of(given, form)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_tensors(what: str, samples: Any, first: Any) -> None:
    """Raise ValueError unless these are (x, y) of one length, with inputs as client 0 has."""
    if len(samples) != 2:
        raise ValueError(f"{what}: expected tensors (x, y), got {describe(samples)}")
    for part in samples:
        if not isinstance(part, Tensor):
            kind = type(part).__name__
            raise ValueError(f"{what}: expected tensors, got {kind}; use torch.as_tensor")
    x, y = samples
    if not (x.ndim and y.ndim) or len(x) != len(y) or not len(x):
        raise ValueError(f"{what}: expected equally many inputs and targets, at least one each")
    like = first[0] if is_tensors(first) else x
    if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
        raise ValueError(
            f"{what}: expected inputs (n, ...) as client 0 has, {tuple(like.shape[1:])} "
            f"{like.dtype}, got {tuple(x.shape[1:])} {x.dtype}"
        )


def _module(config: RunConfig, model: str | nn.Module, clients: Sequence[Any]) -> Any:
    """A function that makes the model."""
    if not isinstance(model, str):
        template = model
        return lambda: copy.deepcopy(template)
    if not all(map(is_tensors, clients)):
        raise ValueError(
            f"model: expected a module with clients= that are no tensors, got the name {model!r}"
        )
    shape = tuple(clients[0][0].shape[1:])
    classes = int(max(int(y.max()) for _, y in clients)) + 1
    seed, stem = config.strategy.seed, config.task.stem
    return lambda: models.build(model, shape, classes, stem=stem, seed=seed)
