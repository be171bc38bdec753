"""The task of a run configuration: data set, partition and model by name."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedaccord.core import metrics, named
from fedaccord.core.options import options
from fedaccord.data import datasets
from fedaccord.data.kind import Dataset
from fedaccord.data.partition import partition as partition_labels
from fedaccord.task import models
from fedaccord.task.clients import Clients, Samples
from fedaccord.task.config import TaskConfig
from fedaccord.task.losses import loss_of
from fedaccord.task.task import Task, find_device

log = logging.getLogger("flwr")  # what a run prints

VALIDATION = 1  # of the draw of validation samples, beside the run's seed
GIVEN = ("natural", "file")  # partitions that clients do not draw
MAX_REPORTED = 10**9  # inputs times outputs of a model that a server builds as clients report it


def load_task(config: TaskConfig, *, num_clients: int, whole: bool = False) -> Task:
    """The task of a run configuration, loaded once, and again after `forget_tasks` or if the code
    of one of its functions was reloaded.

    ``whole``: every client holds the whole training set (a device with its own data). Raises
    ValueError if data set, partition, model and number of clients do not fit.
    """
    values = {field: getattr(config, field.name) for field in options(TaskConfig)}
    code = [
        named.code(field.name, path)
        for field, value in values.items()
        for path in named.behind(field.metadata, value)
    ]
    return _load_task(config, num_clients, whole, tuple(code))


def forget_tasks() -> None:
    """Free the memory of the last tasks, which `load_task` keeps; it loads them anew."""
    _load_task.cache_clear()


@lru_cache(maxsize=4)
def _load_task(config: TaskConfig, num_clients: int, whole: bool, code: tuple[str, ...]) -> Task:
    data = datasets.load(config.dataset, config.data_dir, config.reading)
    if not data.vocabulary:
        tokens = models.vocabulary_of(config.model, data.x_train, data.x_test)
        data = data._replace(vocabulary=tokens)
    measured = config.metrics or _usual_metric(data.classes)
    if not config.metrics and not data.classes and named.PATH.fullmatch(config.loss):
        measured = ""  # outputs may differ from the targets in shape
    metrics.select(measured, of_classes=data.classes > 0)
    x, y = data.x_train, data.y_train
    test = (data.x_test, data.y_test) if len(data.y_test) else None
    held_out = _held_out(len(y), config.validation, config.seed) if config.validation else None
    divided = config.partition not in GIVEN and not whole
    if divided and data.owners is not None:
        log.warning(
            "partition=%s divides the samples anew: the data name clients; partition=natural keeps "
            "them",
            config.partition,
        )
    drawn = config.samples_per_client and divided
    if drawn and held_out is not None:  # clients get the other samples
        test, x, y = (x[held_out], y[held_out]), x[~held_out], y[~held_out]
    parts: Sequence[np.ndarray]
    if whole:
        parts = [np.arange(len(y))]
    else:
        parts = partition_labels(
            y.numpy(),
            num_clients,
            config.partition,
            owners=None if data.owners is None else data.owners.numpy(),
            alpha=config.dirichlet_alpha,
            replacement=config.replacement,
            classes_per_client=config.classes_per_client,
            samples_per_client=config.samples_per_client,
            file=config.partition_file,
            seed=config.seed,
        )
    clients, shape = Clients(x, y, parts), tuple(x.shape[1:])
    if held_out is not None and not drawn:
        clients, test = _without(clients, held_out, config.validation)
    if whole:
        assert clients.parts is not None
        clients = replace(clients, parts=[*clients.parts] * num_clients)

    kind = datasets.kind_of(config.dataset)

    def module() -> nn.Module:
        return models.build(
            config.model,
            shape,
            data.outputs,
            stem=config.stem,
            vocabulary=data.vocabulary,
            seed=config.seed,
        )

    return Task(
        module=module,
        clients=clients,
        test=test,
        loss=loss_of(config.loss, y),
        metrics=measured,
        split="validation" if config.validation else "test",
        device=find_device(config.device),
        prepare=lambda x, dtype: kind.prepare(x, data, dtype),
        augment=data.augment or (kind.augment if config.augment else None),
        augment_each=data.augment is not None,
        seed=config.seed,
        own_test=whole,
        card=_card(config, data),
        checksum=data.checksum,
    )


def task_of_card(config: TaskConfig, card: Mapping[str, Any]) -> Task:
    """A task without samples, with the clients' model; card: as reported by them.

    Raises ValueError if the configuration's model cannot be built from it, or is larger than one
    that a server builds for clients that it does not know.
    """
    arguments = card["arguments"] | {"shape": tuple(card["arguments"]["shape"])}
    if (size := math.prod(arguments["shape"]) * arguments["classes"]) > MAX_REPORTED:
        raise ValueError(
            f"evaluation=clients: expected at most {MAX_REPORTED:g} inputs times outputs of a "
            f"model that clients report, got {size:.3g}; give the server data, evaluation=server"
        )

    def module() -> nn.Module:
        try:
            return models.build(config.model, **arguments, seed=config.seed)
        except (TypeError, RuntimeError, MemoryError):  # also of a size beyond this machine's
            raise ValueError(f"model: expected arguments of {config.model}, got {card}") from None

    return Task(
        module=module,
        clients=Clients([], []),
        metrics=config.metrics or _usual_metric(len(card["class-names"])),
        device=find_device(config.device),
        seed=config.seed,
        card={"architecture": config.model, **card},
    )


def _usual_metric(classes: int) -> str:
    return "accuracy" if classes else "mae"


def _held_out(total: int, share: float, seed: int) -> Tensor:
    """(total,) bool: a random ``share`` of all samples."""
    rng = np.random.default_rng([seed, VALIDATION])
    mask = torch.zeros(total, dtype=torch.bool)
    mask[torch.from_numpy(rng.permutation(total)[: max(1, round(share * total))])] = True
    return mask


def _without(clients: Clients, held_out: Tensor, share: float) -> tuple[Clients, Samples]:
    """The clients without the ``held_out`` samples, and these samples.

    The other samples stay with their clients. Raises ValueError if a client has none left.
    """
    assert isinstance(clients.x, Tensor)
    assert isinstance(clients.y, Tensor)
    assert clients.parts is not None
    free = ~held_out.numpy()
    place = np.cumsum(free) - 1  # position of a sample among the remaining ones
    parts = [place[part[free[part]]] for part in clients.parts]
    if empty := [i for i, part in enumerate(parts) if not len(part)]:
        raise ValueError(
            f"validation: expected samples left for every client, got none for client {empty[0]} "
            f"with {share:g}; lower it, or num-clients"
        )
    left = Clients(clients.x[~held_out], clients.y[~held_out], parts)
    return left, (clients.x[held_out], clients.y[held_out])


def _card(config: TaskConfig, data: Dataset) -> dict[str, Any]:
    """How to build and feed the model, in JSON's types.

    architecture and arguments: of `models.build`. mean, std: per channel, of pixels in [0, 1];
    empty for features, which are not normalised.
    """
    arguments: dict[str, Any] = {"shape": [*data.x_train.shape[1:]], "classes": data.outputs}
    if config.model == "resnet18":
        arguments["stem"] = config.stem
    if data.vocabulary:
        arguments["vocabulary"] = data.vocabulary
    return {
        "architecture": config.model,
        "arguments": arguments,
        "class-names": [*data.class_names] or [""] * data.classes,  # "": it has no name
        "mean": [*data.mean],
        "std": [*data.std],
    }
