"""The memories of many clients in mapped files, if they do not fit into memory.

A shard is a file of equal slots, each for one version of one client's state. The table of slots
stays in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.vectors import leaves, map_vectors
from fedaccord.storage.mapped import mapped, release, write
from fedaccord.storage.memories import Memories
from fedaccord.storage.store import Memory

SHARD = 2**26  # bytes of a file, unless a slot is larger
PLACES = 1024  # slots of a file at most: each is a tensor in memory
ALIGNED = 64  # bytes: the alignment of vectors


class Place(NamedTuple):
    """A version's state in its slot."""

    place: Tensor  # (bytes,) uint8
    form: Any  # the state's structure, without values


class Shards(Memories):
    """Client -> memory; the vectors of a state that `unpack` gives are views of the files.

    A view shows the content of its slot, which another state overwrites after two more visits.
    folder: of the files; None: the system's temporary one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._free: dict[int, list[Tensor]] = {}  # free slots by size
        self._shards: list[Tensor] = []

    def save(self, client: int, memory: Memory) -> None:
        before = self.load(client)
        super().save(client, memory)
        self._free_places(before, memory)
        for version in memory.versions:
            release(version.state.place)

    def remove(self, client: int) -> None:
        before = self.load(client)
        super().remove(client)
        self._free_places(before)

    def pack(self, client: int, round: int, state: Any) -> Place:
        """Raises OSError if the disk is full."""
        vectors = [v for _, v in leaves(state)]
        size = sum(map(_room, vectors))
        free = self._free.setdefault(size, [])
        if vectors and not free:
            free += self._new_places(size)
        place = free.pop() if vectors else torch.empty(0, dtype=torch.uint8)
        for part, v in zip(_parts(place, vectors), vectors, strict=True):
            write(part, v)
        return Place(place, self._form(state))

    def unpack(self, kept: Place, like: Any = None) -> Any:
        parts = _parts(kept.place, [v for _, v in leaves(kept.form)])
        return map_vectors(lambda _: next(parts), kept.form)

    def state(self, client: int, round: int) -> Any:
        return map_vectors(torch.clone, super().state(client, round))

    def states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        for shard in self._shards:  # the pages of the last call's states
            release(shard)
        return super().states(accepted)

    def _free_places(self, before: Memory | None, now: Memory | None = None) -> None:
        used = [version.state for version in now.versions] if now else []
        for version in before.versions if before else ():
            if len(version.state.place) and not any(version.state is kept for kept in used):
                self._free[len(version.state.place)].append(version.state.place)

    def _new_places(self, size: int) -> list[Tensor]:
        number = max(1, min(PLACES, SHARD // size))
        shard = mapped(number * size, torch.uint8, self._folder)
        self._shards.append(shard)
        return list(shard.view(number, size))


def _room(v: Tensor) -> int:
    return -(-v.nbytes // ALIGNED) * ALIGNED


def _parts(place: Tensor, like: list[Tensor]) -> Iterator[Tensor]:
    """The vectors in a slot."""
    first = 0
    for v in like:
        yield place[first : first + v.nbytes].view(v.dtype).view(v.shape)
        first += _room(v)
