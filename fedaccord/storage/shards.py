"""The memories of many clients in mapped files, where they do not fit into memory.

A shard is a file of equal places, each for one version of one client's state; a client has as many
as it has versions. What a version is, and where, stays in memory.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.vectors import leaves, map_vectors
from fedaccord.storage.mapped import mapped, release, write
from fedaccord.storage.store import Memory, Version

SHARD = 2**26  # bytes of a file, where a place is not larger
ALIGNED = 64  # bytes: where a vector begins


class Memories(MutableMapping[int, Memory]):
    """client -> memory, whose versions are kept in a form of their own."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}  # their versions as `_keep` made them
        self._forms: dict[Any, Any] = {}

    @abstractmethod
    def _keep(self, version: Version) -> Version:
        """A version as it is kept."""

    @abstractmethod
    def _view(self, kept: Version) -> Version:
        """The version that was kept."""

    def _let_go(self, kept: Iterable[Version]) -> None:
        """Of versions that nobody will ask for again."""

    def __getitem__(self, client: int) -> Memory:
        latest, before, attempt, durable = self._memories[client]
        others = (kept and self._view(kept) for kept in (before, durable))
        return Memory(self._view(latest), next(others), attempt, next(others))

    def __setitem__(self, client: int, memory: Memory) -> None:
        there = self._versions(client)
        latest = self._keep(memory.latest)
        before, durable = (
            version and (there.pop(version.round, None) or self._keep(version))
            for version in (memory.before, memory.durable)
        )
        self._memories[client] = Memory(latest, before, memory.attempt, durable)
        self._let_go(there.values())

    def __delitem__(self, client: int) -> None:
        there = self._versions(client)
        del self._memories[client]
        self._let_go(there.values())

    def __iter__(self) -> Iterator[int]:
        return iter(self._memories)

    def __len__(self) -> int:
        return len(self._memories)

    def _versions(self, client: int) -> dict[int, Version]:
        if client not in self._memories:
            return {}
        latest, before, _, durable = self._memories[client]
        return {v.round: v for v in (durable, before, latest) if v is not None}

    def _form(self, state: Any) -> Any:
        """The state, its vectors without values; of states that are alike it is one object."""
        form = map_vectors(lambda v: v.new_empty(()).expand(v.shape), state)
        key = type(form), tuple((name, v.shape, v.dtype) for name, v in leaves(form))
        return self._forms.setdefault(key, form)


class Place(NamedTuple):
    """A version's state in its place."""

    place: Tensor  # (bytes,) uint8
    form: Any  # the state, its vectors without values


class Shards(Memories):
    """client -> memory; the vectors of its versions are views of the files.

    A view shows what the place holds: it is another state's after the client was remembered twice.
    folder: where the files are; None: the system's temporary one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._free: dict[int, list[Tensor]] = {}  # places by their size
        self._shards: list[Tensor] = []

    def __setitem__(self, client: int, memory: Memory) -> None:
        """Raises OSError where the disk is full; the memory stays as it was."""
        super().__setitem__(client, memory)
        for version in self._versions(client).values():
            release(version.state.place)

    def __iter__(self) -> Iterator[int]:
        for shard in self._shards:  # what the last listing read
            release(shard)
        return super().__iter__()

    def _keep(self, version: Version) -> Version:
        vectors = [v for _, v in leaves(version.state)]
        free = self._free.setdefault(sum(map(_room, vectors)), [])
        if vectors and not free:
            free += self._new_places(sum(map(_room, vectors)))
        place = free.pop() if vectors else torch.empty(0, dtype=torch.uint8)
        for part, v in zip(_parts(place, vectors), vectors, strict=True):
            write(part, v)
        return Version(version.round, Place(place, self._form(version.state)))

    def _new_places(self, size: int) -> list[Tensor]:
        number = max(1, SHARD // size)
        shard = mapped(number * size, torch.uint8, self._folder)
        self._shards.append(shard)
        return list(shard.view(number, size))

    def _view(self, kept: Version) -> Version:
        place, form = kept.state
        parts = _parts(place, [v for _, v in leaves(form)])
        return Version(kept.round, map_vectors(lambda _: next(parts), form))

    def _let_go(self, kept: Iterable[Version]) -> None:
        for version in kept:
            place = version.state.place
            if len(place):
                self._free[len(place)].append(place)


def _room(v: Tensor) -> int:
    return -(-v.nbytes // ALIGNED) * ALIGNED


def _parts(place: Tensor, like: list[Tensor]) -> Iterator[Tensor]:
    """The vectors that lie in a place."""
    first = 0
    for v in like:
        yield place[first : first + v.nbytes].view(v.dtype).view(v.shape)
        first += _room(v)
