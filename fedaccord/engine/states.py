"""Where the states of clients in this process lie: in memory, or in files where they do not fit."""

import logging
import mmap
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.vectors import leaves, map_vectors
from fedaccord.federation.method import Method
from fedaccord.process.allocator import free_memory
from fedaccord.storage.shards import Memories, Shards
from fedaccord.storage.store import Memory, Version
from fedaccord.task import Task

log = logging.getLogger("flwr")

SHARE = 1 / 2  # of the free memory that states may take
LARGE = 2**20  # bytes of a vector from which on it has pages of its own


class StorageChoice(NamedTuple):
    on_disk: bool
    size: float  # bytes of all states at the end of the run
    why: str  # in one line

    def __str__(self) -> str:
        return self.why


def choose(
    asked: str, method: Method, num_clients: int, rounds: int, vector: int, drawn: bool = True
) -> StorageChoice:
    """memory and disk as asked; auto: disk where the states of the clients that so many rounds
    can visit do not fit into the free memory. vector: bytes of a vector of d; drawn: the cohorts
    are, and not given."""
    visited = num_clients
    if drawn and method.sampling == "fixed" and not method.topology.is_decentralised:
        visited = min(num_clients, rounds * method.cohort_size(num_clients))
    size = 2 * visited * method.cost.client * vector  # the last two versions
    if asked != "auto":
        return StorageChoice(
            asked == "disk", size, f"client states {PLACES[asked == 'disk']}: as set"
        )
    free = free_memory()
    on_disk = size > SHARE * free
    why = f"up to {size / 1e9:,.1f} GB of {visited:,} clients, {free / 1e9:,.1f} GB of memory free"
    return StorageChoice(on_disk, size, f"client states {PLACES[on_disk]}: {why}")


PLACES = ("in memory", "on disk")


def memories(
    asked: str, method: Method, task: Task, rounds: int, folder: Path | None, drawn: bool = True
) -> MutableMapping[int, Memory]:
    """Where the clients' memories are stored; folder: that of files, which are made when the first
    state is kept; None: the system's temporary one."""
    vector = task.model(method.precision).w.nbytes
    choice = choose(asked, method, len(task.clients), rounds, vector, drawn)
    log.log(logging.WARNING if choice.on_disk and asked == "auto" else logging.INFO, "%s", choice)
    if choice.on_disk:
        return Shards(folder)
    # from a GPU they come into pinned memory, and have no values yet that could be copied
    return {} if torch.device(task.device).type == "cuda" else InMemory()


class SplitState(NamedTuple):
    """A state with large vectors."""

    form: Any  # the state, its vectors without values
    vectors: list[Tensor | mmap.mmap]  # pages: of a large one


class InMemory(Memories):
    """client -> memory, the large vectors of its versions in pages of their own.

    A state lives for many rounds. In the heap it would lie between what lives for a step, and leave
    holes when it goes; the little that a tensor itself takes there lies where a vector was freed,
    whose place the next one then does not fit. So tensors are made when they are asked for.
    """

    def _keep(self, version: Version) -> Version:
        vectors = [v for _, v in leaves(version.state)]
        if all(v.nbytes < LARGE for v in vectors):
            return version
        kept = SplitState(self._form(version.state), [*map(_apart, vectors)])
        return version._replace(state=kept)

    def _view(self, kept: Version) -> Version:
        if not isinstance(kept.state, SplitState):
            return kept
        left = iter(kept.state.vectors)

        def vector(like: Tensor) -> Tensor:
            found = next(left)
            if isinstance(found, Tensor):
                return found
            return torch.frombuffer(found, dtype=like.dtype).view(like.shape)

        return kept._replace(state=map_vectors(vector, kept.state.form))


def _apart(v: Tensor) -> Tensor | mmap.mmap:
    """Its values in pages that go back to the system with them; of a small vector, itself."""
    if v.nbytes < LARGE:
        return v
    pages = mmap.mmap(-1, v.nbytes)
    torch.frombuffer(pages, dtype=v.dtype).view(v.shape).copy_(v)
    return pages
