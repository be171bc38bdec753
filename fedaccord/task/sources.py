"""Samples that are read batch by batch: a torch Dataset, or a function that returns batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from fedaccord.core.named import one_line
from fedaccord.core.vectors import index_rows
from fedaccord.data.partition import has_classes
from fedaccord.data.seeding import each_seeded, seeded
from fedaccord.task.batches import Batch, BatchFormat

FORMS = "tensors (x, y), a torch Dataset, or a function of a torch.Generator that gives batches"


@dataclass(frozen=True)
class DatasetSource:
    """The rows of a map-style Dataset, or of tensors (x, y)."""

    rows: Any  # a Dataset, or (x, y)
    size: int

    def batches_per_pass(self, batch_size: int) -> int:
        return -(-self.size // batch_size) if batch_size else 1

    def batches(self, batch_size: int, random: "Random | None" = None) -> Iterator[Batch]:
        """A pass; without random numbers, or with ``batch_size=0``, in order.

        Transforms of a Dataset may draw from the default generators of PyTorch, NumPy and Python,
        which are seeded for each batch, and restored.
        """
        order = torch.arange(self.size)
        if random and batch_size:
            order = torch.randperm(self.size, generator=random.generator)
        step = batch_size or self.size
        for first in range(0, self.size, step):
            yield self._batch(order[first : first + step], random.seed() if random else 0)

    def only(self, rows: Tensor) -> "DatasetSource":
        """Some of the rows, (n,) from 0."""
        if isinstance(self.rows, tuple):
            return DatasetSource(tuple(index_rows(part, rows) for part in self.rows), len(rows))
        return DatasetSource(Subset(self.rows, rows.tolist()), len(rows))

    def _batch(self, rows: Tensor, seed: int) -> Batch:
        if isinstance(self.rows, tuple):
            return tuple(index_rows(part, rows) for part in self.rows)
        with seeded(seed):
            samples = [self.rows[i] for i in rows.tolist()]
            try:
                return default_collate(samples)
            except Exception as error:  # of samples of any form
                raise ValueError(
                    "expected a Dataset whose samples have one form and shape, got others "
                    f"({one_line(error)}): pad them, or give the batches of a DataLoader with "
                    "collate_fn, e.g. lambda generator: loader"
                ) from error


@dataclass(frozen=True)
class FunctionSource:
    """The batches that a function returns for a generator, in its own sizes and order."""

    make: Callable[[torch.Generator], Iterable[Batch]]
    form: BatchFormat
    size: int = 0  # samples of a pass; 0: not counted yet
    number: int = 0  # batches of a pass

    def batches_per_pass(self, batch_size: int) -> int:
        return self.number

    def batches(self, batch_size: int, random: "Random | None" = None) -> Iterator[Batch]:
        """A pass; without random numbers, that of seed 0.

        The default generators of PyTorch, NumPy and Python are seeded for each batch, and restored.
        Raises ValueError for another number of samples than in the counted pass.
        """
        content = self.make(random.generator if random else torch.Generator().manual_seed(0))
        if not isinstance(content, Iterable):
            raise ValueError(
                "expected a function that gives batches, got one that returns "
                f"{type(content).__name__}; return or yield (inputs, targets)"
            )
        count = 0
        for batch in each_seeded(content, random.seed if random else lambda: 0):
            count += len(self.form.split(batch)[1])
            if count > self.size > 0:
                break
            yield batch
        if self.size and count != self.size:
            raise ValueError(
                f"expected {self.size} samples in every pass, as in the one that was counted, got "
                f"{'at least ' * (count > self.size)}{count}; give the same samples at each call"
            )

    def counted(self) -> "FunctionSource":
        """A copy with the sizes counted in a pass with seed 0."""
        sizes = [len(self.form.split(batch)[1]) for batch in self.batches(0)]
        return FunctionSource(self.make, self.form, sum(sizes), len(sizes))


@dataclass(frozen=True)
class PerClient:
    """Test samples of each client's own; the server evaluates on all of them."""

    parts: Sequence["Source | None"]  # None: the client has none

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts if part)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        for part in self.parts:
            yield from part.batches(batch_size) if part else ()


Source = DatasetSource | FunctionSource
TestSource = Source | PerClient


def is_tensors(samples: Any) -> bool:
    """Whether these look like (x, y)."""
    return isinstance(samples, tuple | list)


def is_function(samples: Any) -> bool:
    """Whether samples are a function that returns batches, which ``batch-size`` does not cut."""
    return callable(samples) and not hasattr(samples, "__getitem__")


def source_of(samples: Any, form: BatchFormat) -> tuple[Source, Tensor]:
    """The source of samples, one of `FORMS`, and the targets of its first sample, or of a
    function's first batch; a function's batches are counted.

    Raises ValueError, in one line, for anything else, for no samples, and for batches of another
    form, and any error of the user's code.
    """
    if isinstance(samples, Tensor | Mapping | str) or not (
        callable(samples) or (hasattr(samples, "__len__") and hasattr(samples, "__getitem__"))
    ):
        loader = "; a function may return a DataLoader, e.g. lambda generator: loader"
        advice = loader if isinstance(samples, DataLoader | IterableDataset) else ""
        raise ValueError(f"expected {FORMS}, got {type(samples).__name__}{advice}")
    if is_function(samples):
        source: Source = FunctionSource(samples, form).counted()
    else:
        rows = tuple(samples) if is_tensors(samples) else samples
        source = DatasetSource(rows, len(samples[1]) if is_tensors(samples) else len(samples))
    if not source.size:
        raise ValueError("expected at least one sample, got none")
    return source, form.split(next(iter(source.batches(1))))[1]


def returns_tensors(rows: Any) -> bool:
    """Whether it is a TensorDataset whose samples are those of its tensors."""
    own = type(rows).__getitem__ if isinstance(rows, TensorDataset) else None
    return own is TensorDataset.__getitem__


def labels_of(rows: Any) -> NDArray[Any] | None:
    """The class of each sample of (x, y) or a Dataset; None: it has none, or they are unknown
    without reading its rows."""
    if isinstance(rows, DatasetSource):
        return labels_of(rows.rows)
    joint = getattr(rows, "transforms", None) and not getattr(rows, "transform", None)
    if getattr(rows, "target_transform", None) or joint:
        return None  # it returns other targets
    if isinstance(rows, Subset):
        every = labels_of(rows.dataset)
        return None if every is None else every[[*rows.indices]]
    targets = rows[1] if isinstance(rows, tuple) else getattr(rows, "targets", None)
    if isinstance(rows, TensorDataset):
        targets = rows.tensors[-1] if returns_tensors(rows) else None
    if isinstance(targets, Tensor):
        targets = targets.cpu()
    elif isinstance(targets, list) and not all(isinstance(label, int) for label in targets):
        return None
    labels = np.asarray(targets)
    return labels if has_classes(labels) else None


@dataclass(eq=False)
class SourceClients:
    """Clients that read their samples batch by batch; as `Clients` otherwise."""

    sources: Sequence[Source]
    parts: None = None

    def __repr__(self) -> str:
        return f"{len(self)} clients with {self.total} samples"

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def total(self) -> int:
        return sum(source.size for source in self.sources)

    @property
    def in_rows(self) -> bool:
        """Whether batches are cut by ``batch-size`` for every client."""
        return all(isinstance(source, DatasetSource) for source in self.sources)

    def size(self, client: int) -> int:
        return self.sources[client].size

    def labels(self, client: int) -> NDArray[Any] | None:
        """The client's classes, as `labels_of`."""
        return labels_of(self.sources[client])


class Random:
    """The random numbers of a client's round, for the order and the Dataset's transforms."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._seeds = torch.Generator().manual_seed(generator.initial_seed())

    def seed(self) -> int:
        """The seed of the next batch's transforms."""
        return int(torch.randint(2**63 - 1, (), generator=self._seeds))


@dataclass(eq=False)
class SourceBatches:
    """A client's batches of a round: every pass over it is one epoch."""

    source: Source
    batch_size: int
    random: Random

    def __len__(self) -> int:
        return self.source.batches_per_pass(self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.source.batches(self.batch_size, self.random)
