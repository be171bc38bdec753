"""The task of samples, a model and a loss that are arguments of a call."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord.config import RunConfig
from fedaccord.core.metrics import select
from fedaccord.core.named import one_line
from fedaccord.core.vectors import dtype_of
from fedaccord.data.samples import with_long_ids
from fedaccord.task import Clients, Samples, Task, find_device, models
from fedaccord.task.batches import BatchFormat, as_targets, describe
from fedaccord.task.fit import every_part, tensors_of
from fedaccord.task.losses import AUTO, LOSSES, loss_of, sequence_cross_entropy
from fedaccord.task.solver import Loss
from fedaccord.task.sources import (
    FORMS,
    FunctionSource,
    PerClient,
    Source,
    SourceClients,
    TestSource,
    is_tensors,
    source_of,
)
from fedaccord.task.unsaved import warn_of_views


def own_task(
    config: RunConfig,
    clients: Sequence[Any],
    test: Any,
    model: str | nn.Module,
    loss: str | Loss,
    form: BatchFormat,
) -> Task:
    """Raises ValueError, in one line, for invalid samples, and for a model that does not fit."""
    evaluation = config.strategy.evaluation
    by_clients = evaluation != "server" and config.strategy.fraction_evaluate > 0
    if (by_clients or evaluation == "both") and test is None:
        raise ValueError(
            f"test: expected samples, as evaluation={evaluation}, got none; give test=(x, y), or "
            "test=[...] with the samples of each client"
        )
    clients_evaluate = by_clients or (evaluation == "server" and config.strategy.has_personal)
    if isinstance(model, str):  # a module gets its inputs as they are
        clients, test = [*map(_with_long_ids, clients)], _with_long_ids(test)
    forms: dict[str, Tensor] = {}
    samples, tests = _clients(clients, form, forms), _test(test, clients, form, forms)
    is_own = not (isinstance(loss, str) and loss in (AUTO, *LOSSES))
    for what, part in every_part(samples, tests):  # a loss may leave out targets that are NaN
        _check_finite(what, part, with_targets=not is_own)
    if clients_evaluate and isinstance(tests, FunctionSource):
        raise ValueError(
            "test: expected tensors or a Dataset, of which each client evaluates on a share, got a "
            "function, which cannot be divided; give test=[...] with the samples of each client"
        )
    task = Task(
        _module(config, model, samples, tests),
        samples,
        tests,
        device=find_device(config.task.device),
        format=form,
        seed=config.strategy.seed,
        metrics=config.task.metrics,
    )
    settings = config.strategy.model_settings
    _, targets = task.example(1, dtype_of(settings.precision))
    task.loss = loss_of(loss, targets)
    _check_targets(forms, task.loss)
    flat = task.model(settings)
    if isinstance(model, nn.Module):  # the copies that train have no views
        trained = {*flat.names, *flat.local_names}
        warn_of_views(model, [p for name, p in model.named_parameters() if name in trained])
    select(task.metrics, of_classes=not targets.is_floating_point())
    return task


def _with_long_ids(samples: Any) -> Any:
    """Tensors (x, y), or a list of the samples of clients, with token ids as models read them."""
    if isinstance(samples, list) and not any(isinstance(part, Tensor) for part in samples):
        return [*map(_with_long_ids, samples)]
    if not is_tensors(samples) or not samples or not isinstance(samples[0], Tensor):
        return samples
    x = with_long_ids(samples[0])
    x = x.long() if x.dtype == torch.uint8 and x.ndim == 2 else x  # no images
    return samples if x is samples[0] else (x, *samples[1:])


def _clients(
    clients: Sequence[Any], form: BatchFormat, forms: dict[str, Tensor]
) -> Clients | SourceClients:
    """The clients, in tensors if all of them have tensors; forms: as `_part`."""
    sources = [
        _part(f"clients: client {i}", samples, clients, form, forms)
        for i, samples in enumerate(clients)
    ]
    if not all(map(is_tensors, clients)):
        return SourceClients(sources)
    xs, ys = zip(*clients, strict=True)
    return Clients(xs, [as_targets(y) for y in ys])


def _test(
    test: Any, clients: Sequence[Any], form: BatchFormat, forms: dict[str, Tensor]
) -> Samples | TestSource | None:
    """The test samples, in tensors if all clients and the test have tensors; forms: as `_part`."""
    if test is None:
        return None
    if isinstance(test, list) and not any(isinstance(part, Tensor) for part in test):
        if len(test) != len(clients):
            raise ValueError(
                f"test: expected (inputs, targets), a Dataset, or a list with the samples of each "
                f"of {len(clients)} clients, None if it has none, got a list of {len(test)}"
            )
        return PerClient(
            [
                None
                if samples is None
                else _part(f"test of client {i}", samples, clients, form, forms)
                for i, samples in enumerate(test)
            ]
        )
    source = _part("test", test, clients, form, forms)
    if is_tensors(test) and all(map(is_tensors, clients)):
        return test[0], as_targets(test[1])
    return source


def _part(
    what: str,
    samples: Any,
    clients: Sequence[Any],
    form: BatchFormat,
    forms: dict[str, Tensor],
) -> Source:
    """One client's samples, or test samples; forms: gets their first targets, without values."""
    if is_tensors(samples):
        _check_tensors(what, samples, clients[0])
    try:
        source, targets = source_of(samples, form)
    except ValueError as error:
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from error
    except Exception as error:  # the user's own code may raise anything
        raise ValueError(
            f"{what}: expected {FORMS}, got one that fails: {one_line(error)}"
        ) from error
    forms[what] = targets.to("meta")
    return source


def _check_targets(forms: dict[str, Tensor], loss: Loss) -> None:
    """Raise ValueError for targets that the loss does not read as those of client 0.

    A function of the user's own may broadcast (n,) beside (n, 1) to (n, n). forms: of `_part`,
    client 0 first.
    """
    first = next(iter(forms.values()))
    of_classes = loss in (F.cross_entropy, sequence_cross_entropy)
    for what, targets in forms.items():
        is_alike = targets.dim() == first.dim()
        if of_classes:
            is_alike &= targets.is_floating_point() == first.is_floating_point()
        if not is_alike and not _are_probabilities(targets, first):
            raise _other_targets(what, targets, first)


def _are_probabilities(a: Tensor, b: Tensor) -> bool:
    """Whether targets are classes (n, ...) beside probabilities of classes (n, classes, ...)."""
    soft, hard = (a, b) if a.is_floating_point() else (b, a)
    is_hard = soft.is_floating_point() and not hard.is_floating_point()
    return is_hard and soft.dim() == hard.dim() + 1 and soft.shape[1] > 1


def _other_targets(what: str, targets: Tensor, first: Tensor) -> ValueError:
    return ValueError(
        f"{what}: expected targets (n, ...) as at client 0, {tuple(first.shape[1:])} "
        f"{first.dtype}, got {tuple(targets.shape[1:])} {targets.dtype}"
    )


def _check_tensors(what: str, samples: Any, first: Any) -> None:
    """Raise ValueError unless these are (x, y) of one length, alike client 0's."""
    if len(samples) != 2:
        raise ValueError(
            f"{what}: expected tensors (x, y) or a torch Dataset, e.g. TensorDataset(a, b, y), got "
            f"{describe(samples)}"
        )
    for part in samples:
        if not isinstance(part, Tensor):
            kind = type(part).__name__
            numbers = "table.to_numpy()" if hasattr(part, "to_numpy") else "array"
            raise ValueError(
                f"{what}: expected tensors, got {kind}; use torch.as_tensor({numbers})"
            )
    x, y = samples
    if x.layout is not torch.strided or y.layout is not torch.strided:
        raise ValueError(f"{what}: expected dense tensors, got a sparse one; use its to_dense()")
    if x.is_inference() or y.is_inference():
        raise ValueError(
            f"{what}: expected tensors that a gradient can be computed with, got one made under "
            "torch.inference_mode(); use its clone(), or make it under torch.no_grad()"
        )
    if not (x.ndim and y.ndim) or len(x) != len(y) or not len(x):
        raise ValueError(f"{what}: expected equally many inputs and targets, at least one each")
    if y.is_complex():
        raise ValueError(f"{what}: expected classes or real numbers as targets, got {y.dtype}")
    like = first[0] if is_tensors(first) else x
    if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
        raise ValueError(
            f"{what}: expected inputs (n, ...) as at client 0, {tuple(like.shape[1:])} "
            f"{like.dtype}, got {tuple(x.shape[1:])} {x.dtype}"
        )
    like = first[1] if is_tensors(first) else y
    alike = y.shape[1:] == like.shape[1:] and like.is_floating_point()
    if y.is_floating_point() and y.isfinite().all() and not alike:
        raise _other_targets(what, y, like)


def _check_finite(what: str, samples: Any, with_targets: bool) -> None:
    """Raise ValueError for NaN or Inf in tensors; samples of other forms are not read."""
    tensors = tensors_of(samples)
    named = [("inputs", tensors[:1]), ("targets", tensors[-1:] if with_targets else ())]
    for name, parts in named:
        if any(part.is_floating_point() and not part.isfinite().all() for part in parts):
            raise ValueError(f"{what}: expected finite {name}, got nan or inf")


def _copied(module: nn.Module) -> nn.Module:
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks]
    if hooked:
        raise ValueError(
            f"model: expected parameters without hooks, {hooked[0]} has one, which copies lose: "
            "register it on a module, or give fedaccord run a function that builds the model"
        )
    try:
        return copy.deepcopy(module)
    except Exception as error:  # attributes may raise anything
        raise ValueError(
            f"model: expected a module that can be copied, {type(module).__name__} cannot: "
            f"{one_line(error)}"
        ) from error


def _module(
    config: RunConfig,
    model: str | nn.Module,
    clients: Clients | SourceClients,
    test: Samples | TestSource | None,
) -> Any:
    """A function that makes the model, of tokens up to the largest one of clients and test."""
    if not isinstance(model, str):
        return partial(_copied, model)
    if isinstance(clients, SourceClients):
        raise ValueError(
            f"model: expected a module, as clients= are not tensors, got the name {model!r}"
        )
    x, y = clients.samples(0)
    shape, outputs = tuple(x.shape[1:]), y.shape[1:].numel()
    if not y.is_floating_point():
        outputs = max(int(y.max()) for y in clients.y) + 1
    tokens = (*clients.x, *(test[:1] if isinstance(test, tuple) else ()))
    more: dict[str, Any] = {"vocabulary": models.vocabulary_of(model, *tokens)}
    more |= {"seed": config.strategy.seed, "stem": config.task.stem}
    return lambda: models.build(model, shape, outputs, **more)
