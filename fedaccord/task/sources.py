"""Samples that are read batch by batch: a torch Dataset, or a function that gives batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedaccord.task.batches import Batch, BatchFormat
from fedaccord.task.transfer import index_rows

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

        Transforms of a Dataset may draw from PyTorch's default generator, which is seeded for each
        batch, and restored.
        """
        order = torch.arange(self.size)
        if random and batch_size:
            order = torch.randperm(self.size, generator=random.generator)
        for rows in torch.split(order, batch_size or self.size):
            yield self._batch(rows, random.seed() if random else 0)

    def _batch(self, rows: Tensor, seed: int) -> Batch:
        if isinstance(self.rows, tuple):
            return tuple(index_rows(part, rows) for part in self.rows)
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            return default_collate([self.rows[i] for i in rows.tolist()])


@dataclass(frozen=True)
class FunctionSource:
    """The batches that a function gives for a generator, in its own sizes and order."""

    make: Callable[[torch.Generator], Iterable[Batch]]
    size: int  # samples of a pass
    number: int  # batches of a pass

    def batches_per_pass(self, batch_size: int) -> int:
        return self.number

    def batches(self, batch_size: int, random: "Random | None" = None) -> Iterator[Batch]:
        """A pass; without random numbers, that of seed 0."""
        yield from self.make(random.generator if random else torch.Generator().manual_seed(0))


Source = DatasetSource | FunctionSource


def is_tensors(given: Any) -> bool:
    """Whether these are meant as (x, y)."""
    return isinstance(given, tuple | list)


def source_of(given: Any, form: BatchFormat) -> Source:
    """``given``: as `FORMS` says; a function's batches are counted in a pass with seed 0.

    Raises ValueError, in one line, for anything else, for no samples, and for batches of another
    form.
    """
    if isinstance(given, Tensor | Mapping | str) or not (
        callable(given) or (hasattr(given, "__len__") and hasattr(given, "__getitem__"))
    ):
        raise ValueError(f"expected {FORMS}, got {type(given).__name__}")
    if hasattr(given, "__getitem__"):
        rows = tuple(given) if is_tensors(given) else given
        found: Source = DatasetSource(rows, len(given[1]) if is_tensors(given) else len(given))
    else:
        sizes = [len(form.split(batch)[1]) for batch in given(torch.Generator().manual_seed(0))]
        found = FunctionSource(given, sum(sizes), len(sizes))
    if not found.size:
        raise ValueError("expected at least one sample, got none")
    return found


@dataclass(eq=False)
class SourceClients:
    """Clients that read their samples batch by batch; as `Clients` otherwise."""

    sources: Sequence[Source]
    parts: None = None
    nbytes = 0  # of samples that this process holds

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

    @property
    def by_functions(self) -> bool:
        """Whether no client's batches are cut by ``batch-size``."""
        return not any(isinstance(source, DatasetSource) for source in self.sources)

    def size(self, client: int) -> int:
        return self.sources[client].size

    def largest(self, number: int) -> list[int]:
        return sorted(range(len(self)), key=lambda i: -self.size(i))[:number]


class Random:
    """The random numbers of a client's round: of the order, and of the Dataset's transforms."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._seeds = torch.Generator().manual_seed(generator.initial_seed())

    def seed(self) -> int:
        """Of the next batch's transforms."""
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
