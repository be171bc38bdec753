"""The task that clients train and the server evaluates: samples, a model, a loss."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord.core.metrics import select
from fedaccord.core.request import DEFAULT, ModelSettings
from fedaccord.core.vectors import dtype_of, index_rows, to_device
from fedaccord.data import fingerprint
from fedaccord.data.partition import has_classes
from fedaccord.task.batches import PAIRS, Batch, BatchFormat, as_floats, map_tensors
from fedaccord.task.clients import Clients, Samples
from fedaccord.task.cohort_batches import cut
from fedaccord.task.cohort_solver import Stack, stacked
from fedaccord.task.evaluation import evaluate
from fedaccord.task.evaluation_shares import EvaluationShares
from fedaccord.task.fit import check_fit, check_from_zero, check_kept, check_labels, check_metrics
from fedaccord.task.flat_model import FlatModel, flat_model
from fedaccord.task.solver import AHEAD, Loss, Passes
from fedaccord.task.sources import (
    DatasetSource,
    FunctionSource,
    PerClient,
    Random,
    Source,
    SourceBatches,
    SourceClients,
    TestSource,
)

log = logging.getLogger("flwr")

TRAIN_NAMES = {"loss": "train-loss-of-model"}  # train-loss is of the local models during training
COUNTED_CLIENTS = 1000  # clients whose classes are counted
MAX_PREPARED_VALUES = 2**20  # of a client whose samples are prepared once per round
GPU_MEMORY_SHARE = 1 / 4  # of the free memory, for samples; larger sets stay on the host
AHEAD_ON_GPU = 2**25  # as AHEAD, for a GPU, to save launches


@dataclass(eq=False)
class Task:
    """The samples, model and loss for training and evaluation."""

    module: Callable[[], nn.Module]  # a fresh model with its initial parameters
    clients: Clients | SourceClients
    test: Samples | TestSource | None = None
    loss: Loss = F.cross_entropy
    device: torch.device | str = "cpu"
    format: BatchFormat = PAIRS
    prepare: Callable[[Tensor, torch.dtype], Tensor] = as_floats  # of inputs in tensors
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    augment_each: bool = False  # batch by batch; else several at once
    seed: int = 0  # of the clients' shares of the test samples
    own_test: bool = False  # whether the test samples are one client's own
    split: str = "test"  # the kind of test samples: "validation" if they were held out
    card: Mapping[str, Any] = field(default_factory=dict)  # how to build and feed the saved model
    metrics: str = ""  # names, as of `core.metrics.select`
    checksum: str = ""  # of the data set, before it was divided; empty: unknown
    _of_thread: threading.local = field(default_factory=threading.local)

    def __repr__(self) -> str:
        return f"Task({self.clients}, {self.num_tests} test samples, on {self.device})"

    @property
    def num_tests(self) -> int:
        """Test samples."""
        if self.test is None:
            return 0
        return len(self.test[1]) if isinstance(self.test, tuple) else self.test.size

    def __getstate__(self) -> dict[str, Any]:
        """The state without the parts that another process makes itself."""
        own = ("_near", "_of_thread")
        return {name: part for name, part in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _of_thread=threading.local())

    @property
    def _models(self) -> dict[ModelSettings, FlatModel]:
        """The models of this thread: runs in other threads may have the same task."""
        models: dict[ModelSettings, FlatModel] = self._of_thread.__dict__.setdefault("models", {})
        return models

    @cached_property
    def _near(self) -> tuple[Clients | SourceClients, Samples | TestSource | None]:
        """The clients' samples and the test samples, from which batches are cut: on the device if
        they need at most `GPU_MEMORY_SHARE` of its free memory."""
        device, test = torch.device(self.device), self.test
        if device.type != "cuda" or isinstance(self.clients, SourceClients):
            return self.clients, test
        tensors = test if isinstance(test, tuple) else ()
        size, free = self.clients.nbytes, torch.cuda.mem_get_info(device)[0]
        size += sum(part.nbytes for part in tensors)
        if size > GPU_MEMORY_SHARE * free:
            line = "samples stay on the host: %.1f GB, and %.1f GB of %s are free"
            log.info(line, size / 1e9, free / 1e9, device)
            return self.clients, test
        if isinstance(test, tuple):
            test = test[0].to(device), test[1].to(device)
        return self.clients.to(device), test

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Checksums of the data set and, if clients share one training set, of the partition."""
        digests: dict[str, Any] = {"samples": self.checksum}
        if self.clients.parts is not None and not self.own_test:
            digests["partition"] = fingerprint.of_parts(self.clients.parts)
        return digests

    def model(self, settings: ModelSettings = DEFAULT) -> FlatModel:
        """The cached model: before use, set its w and the tensors that the settings put beside w.

        Raises ValueError, in one line, if it does not accept the samples.
        """
        key = settings._replace(precision=str(dtype_of(settings.precision)))
        if key not in self._models:
            model = self.fresh_model(settings, self.device)
            if len(self.clients):
                self._check_fit(model, settings.precision)
            self._models[key] = model
        return self._models[key]

    def _check_fit(self, model: FlatModel, precision: str) -> None:
        inputs, targets = self.example(2, model.w.dtype)
        inputs = map_tensors(Tensor.clone, inputs)  # whatever the model does to them
        arguments = {} if targets.is_floating_point() else self.card.get("arguments", {})
        classes = arguments.get("classes")
        test = self.test if self.num_tests else None
        check_from_zero(self.clients, test, self.loss, self.format)
        before = {name for name, _ in model.module.named_parameters()}
        predictions = check_fit(model, inputs, targets, self.loss, classes, precision)
        if later := [n for n, _ in model.module.named_parameters() if n not in before]:
            raise ValueError(
                f"model: expected all parameters before the first forward pass, which makes "
                f"{later[0]}: make it in the module's __init__"
            )
        check_kept(model, inputs, precision)
        if self.num_tests:
            chosen = select(self.metrics, of_classes=not targets.is_floating_point())
            check_metrics(predictions, targets.to(predictions.device), chosen)
        check_labels(self.clients, test, predictions, self.loss, self.format)

    def fresh_model(self, settings: ModelSettings, device: torch.device | str) -> FlatModel:
        """A new model with the initial values."""
        return flat_model(self.module(), settings, device, self.format.forward)

    def num_examples(self, client: int) -> int:
        return self.clients.size(client)

    def function_of(self, client: int) -> FunctionSource | None:
        """The source of the client's batches in its own sizes; None: ``batch-size`` cuts them."""
        source = isinstance(self.clients, SourceClients) and self.clients.sources[client]
        return source if isinstance(source, FunctionSource) else None

    def samples_of_step(self, client: int, batch_size: int) -> float:
        """The samples of a full batch; for a function the mean over the batches of a pass."""
        if function := self.function_of(client):
            return function.size / function.number
        size = self.num_examples(client)
        return min(batch_size or size, size)

    def train_batches(
        self, client: int, round: int, batch_size: int, seed: int, dtype: torch.dtype
    ) -> "TrainBatches | SourceBatches":
        """The client's batches of a round: every pass over it is an epoch, shuffled again."""
        clients, key = self._near[0], (seed, round, client)
        if isinstance(clients, SourceClients):
            return SourceBatches(clients.sources[client], batch_size, Random(_generator(*key)))
        return TrainBatches(self, clients.samples(client), batch_size, key, dtype)

    def cohort_batches(
        self,
        clients: Sequence[int],
        round: int,
        batch_size: int,
        seed: int,
        dtype: torch.dtype,
        epochs: int,
        steps: int = 0,
    ) -> Iterator[Stack]:
        """The batches of many clients' rounds, a stack for each step: each client's are those of
        its `train_batches` over ``epochs`` passes, or of ``steps`` steps if that is not 0.

        Clients must be sorted by falling numbers of steps, for example from the largest to the
        smallest. Raises ValueError for another order.
        """
        near = self._near[0]
        if isinstance(near, SourceClients) or (self.augment is not None and batch_size):
            if isinstance(near, SourceClients) and not near.in_rows:
                raise NotImplementedError("expected clients whose batches are cut by batch-size")
            # each client's generator draws its batches
            each = [self.train_batches(i, round, batch_size, seed, dtype) for i in clients]
            passes = [Passes(batches, self.device, dtype, self.format) for batches in each]
            return stacked([one.steps(epochs, steps) for one in passes])

        def prepare(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x, y = (to_device(part, self.device) for part in (x, y))
            return self.prepare(x, dtype), as_floats(y, dtype)

        x, y, rows = near.together(clients)
        generators = [_generator(seed, round, i) for i in clients]
        return cut(x, y, rows, generators, batch_size, epochs, steps, prepare)

    def evaluate(
        self,
        w: Tensor,
        settings: ModelSettings = DEFAULT,
        threads: int = 1,
        buffers: Tensor | None = None,
    ) -> dict[str, float]:
        """test-loss and test-accuracy of the model at w (d,), or validation-loss and so on if the
        samples were held out; empty without any. ``settings``: as in `model`. ``threads``: as in
        `evaluation.evaluate`. ``buffers``: those that are averaged; None: the initial ones."""
        test = self._near[1]
        if test is None:
            return {}
        values = self._evaluate(w, self.batches(test, w.dtype), settings, threads, buffers)
        return {f"{self.split}-{name}": value for name, value in values.items()}

    def evaluate_train(self, w: Tensor, *model: Any) -> dict[str, float]:
        """Accuracy and mean loss of the model at w (d,) on all training samples, not augmented;
        model: as in `evaluate`."""
        values = self._evaluate(w, self._train_batches(w.dtype), *model)
        return {TRAIN_NAMES.get(name, f"train-{name}"): value for name, value in values.items()}

    def _evaluate(
        self,
        w: Tensor,
        batches: Iterator[Batch],
        settings: ModelSettings = DEFAULT,
        threads: int = 1,
        buffers: Tensor | None = None,
    ) -> dict[str, float]:
        if w.dtype == torch.float64:
            settings = settings._replace(precision="float64")
        model = self.model(settings)
        model.write_buffers(model.initial_buffers if buffers is None else buffers)
        model.write_local(model.initial_local)
        read = (self.format.read(batch, self.device, w.dtype) for batch in batches)
        return evaluate(model, w, read, self.loss, settings.precision, threads, self.metrics)

    def example(self, samples: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
        """The first samples, or the whole first batch of a function, prepared for the model."""
        clients = self.clients
        if isinstance(clients, SourceClients):
            batch = next(iter(clients.sources[0].batches(samples)))
        else:
            x, y = (p if isinstance(p, Tensor) else p[0] for p in (clients.x, clients.y))
            batch = next(self.batches((x[:samples], y[:samples]), dtype))
        return self.format.read(batch, self.device, dtype)

    def _train_batches(self, dtype: torch.dtype) -> Iterator[Batch]:
        clients = self._near[0]
        if isinstance(clients, SourceClients):
            for source in clients.sources:
                yield from self.batches(source, dtype)
            return
        x, y = clients.x, clients.y
        whole = isinstance(x, Tensor) and isinstance(y, Tensor)
        pairs: Any = [(x, y)] if whole else zip(x, y, strict=True)
        for pair in pairs:
            yield from self.batches(pair, dtype)

    def batches(self, samples: Samples | TestSource, dtype: torch.dtype) -> Iterator[Batch]:
        """The samples in order; tensors are prepared and on the task's device."""
        size = 100 if torch.device(self.device).type == "cpu" else 1000  # fits into the caches
        if not isinstance(samples, tuple):
            yield from samples.batches(size)
            return
        for x, y in zip(*(torch.split(part, size) for part in samples), strict=True):
            x, y = (to_device(part, self.device) for part in (x, y))
            yield self.prepare(x, dtype), as_floats(y, dtype)

    def class_counts(self) -> list[list[int]] | None:
        """Training samples of each class, a row for each of the first `COUNTED_CLIENTS`; None if
        clients have samples of their own, or these have no classes."""
        if isinstance(self.clients, SourceClients):
            return None
        parts, y = self.clients.parts, self.clients.y
        if parts is None or self.own_test or not isinstance(y, Tensor):
            return None
        if not has_classes(y.numpy()):
            return None
        labels, classes = y.numpy(), self.card["arguments"]["classes"]
        some = parts[:COUNTED_CLIENTS]
        return [np.bincount(labels[part], minlength=classes).tolist() for part in some]

    def client_test(self, client: int) -> Samples | Source | None:
        """The test samples that a client evaluates on: its own, or those of `EvaluationShares`."""
        test = self._near[1]
        if isinstance(test, PerClient):
            return test.parts[client]
        if test is None or self.own_test:
            return test
        assert not isinstance(test, FunctionSource), "a function cannot be divided"
        rows = self._shares.rows(client)
        if isinstance(test, DatasetSource):
            return test.only(rows) if len(rows) else None
        return index_rows(test[0], rows), index_rows(test[1], rows)

    @cached_property
    def _shares(self) -> EvaluationShares:
        return EvaluationShares(self.clients, self.test, self.num_tests, self.seed)


@dataclass(eq=False)
class TrainBatches:
    """Prepared batches on the task's device; every pass over it is one epoch.

    ``batch_size=0``: the whole client as one batch, in order, without augmentation.
    """

    task: Task
    samples: Samples
    batch_size: int
    key: tuple[int, int, int]  # seed, round, client: they determine the order and the augmentation
    dtype: torch.dtype

    @cached_property
    def generator(self) -> torch.Generator:
        return _generator(*self.key)

    @cached_property
    def _few(self) -> bool:
        """Whether all samples are prepared at once, before batches are cut."""
        alone = self.batch_size == 0 or self.task.augment is not None
        return not alone and self.samples[0].numel() <= MAX_PREPARED_VALUES

    @cached_property
    def _on_device(self) -> Samples:
        x, y = (to_device(part, self.task.device) for part in self.samples)
        return self.task.prepare(x, self.dtype) if self._few else x, as_floats(y, self.dtype)

    @cached_property
    def _ahead(self) -> int:
        """Samples that are cut, augmented and normalised together; a multiple of the batch."""
        most = AHEAD if torch.device(self.task.device).type == "cpu" else AHEAD_ON_GPU
        batch = self.samples[0][0].numel() * self.batch_size
        number = 1 if self.task.augment_each else most // max(1, batch)
        return self.batch_size * max(1, number)

    def __len__(self) -> int:
        return -(-len(self.samples[1]) // self.batch_size) if self.batch_size else 1

    def __iter__(self) -> Iterator[Batch]:
        x, y = self._on_device
        if self.batch_size == 0:
            yield self.task.prepare(x, self.dtype), y
            return
        order = torch.randperm(len(y), generator=self.generator)
        order = to_device(order, self.task.device)
        for rows in [order] if self._few else torch.split(order, self._ahead):
            some = index_rows(x, rows)
            if self.task.augment is not None:
                some = self.task.augment(some, self.generator)
            prepared = some if self._few else self.task.prepare(some, self.dtype)
            parts = (torch.split(part, self.batch_size) for part in (prepared, index_rows(y, rows)))
            yield from zip(*parts, strict=True)


def _generator(seed: int, round: int, client: int) -> torch.Generator:
    entropy = np.random.SeedSequence((seed, round, client)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(entropy[0]) >> 1)


def find_device(name: str) -> torch.device:
    """The device of this name. Raises ValueError if it is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device: expected one of {', '.join(have)}, got {name!r} ({reason})"
        ) from error
    return device
