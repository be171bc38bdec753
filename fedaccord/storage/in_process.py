"""The stores of all clients in this process: states by reference, in pages of their own, in files.

`RayStore`, for states in the memory of a cluster, is in `on_ray.py`.
"""

import logging
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.vectors import leaves, map_vectors
from fedaccord.storage.mapped import mapped, release, write
from fedaccord.storage.store import Memory, MissingStateError, Store, Version, version

log = logging.getLogger("flwr")

OWN_PAGES_BYTES = 2**20  # bytes of a state from which it has pages of its own
# private to this process: shareable pages take twice as long on some systems
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
SHARD = 2**26  # bytes of a file, unless a slot is larger
SLOTS = 1024  # of a file at most: each is a tensor in memory
ALIGNED = 64  # bytes: the alignment of vectors


class InProcessStore(Store):
    """Client -> memory; states are stored by reference, without a copy."""

    copies = False  # whether `pack` copies values: those from a GPU must then be complete

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}

    def clients(self) -> list[int]:
        """The clients that have a memory, in order."""
        return sorted(self._memories)

    def load(self, client: int) -> Memory | None:
        return self._memories.get(client)

    def save(self, client: int, memory: Memory) -> None:
        self._memories[client] = memory

    def remove(self, client: int) -> None:
        self._memories.pop(client, None)

    def pack(self, client: int, round: int, state: Any) -> Any:
        return state

    def unpack(self, packed: Any, like: Any = None) -> Any:
        return packed

    def state(self, client: int, round: int) -> Any:
        """The client's state after the step of a round, not to be changed; None: it has none."""
        entry = version(self.load(client), round)
        try:
            return entry and self.unpack(entry.state)
        except MissingStateError:
            return None

    def last_state(self, client: int, round: int) -> Any:
        """As `state`, if no other visit follows."""
        return self.state(client, round)

    def states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        """(round, state) of each client whose state after the round ``accepted[client]`` is stored;
        states from `FileStore` are valid until the next call."""
        states = {}
        for client in self.clients():
            if entry := version(self.load(client), accepted[client]):
                try:
                    states[client] = entry.round, self.unpack(entry.state)
                except MissingStateError as error:
                    log.warning("no state of client %d in the checkpoint: %s", client, error)
        return states

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        """Replace all memories by one version each, in the form of `states`."""
        for client in self.clients():
            self.remove(client)
        for client, (round, state) in states:
            self.save(client, Memory(Version(round, self.pack(client, round, state))))


class Packed(NamedTuple):
    """A state whose vectors are in one piece of memory."""

    place: Tensor | mmap.mmap  # (bytes,) uint8, or pages
    form: Any  # the state's structure, without values

    @property
    def memory(self) -> Tensor:
        """(bytes,) uint8"""
        if isinstance(self.place, Tensor):
            return self.place
        return torch.frombuffer(self.place, dtype=torch.uint8)


class PageStore(InProcessStore):
    """Client -> memory; large states have pages of their own, which are freed with them.

    A state lives for many rounds. On the heap it would cause fragmentation between the vectors of
    the steps, and so would a tensor object for each: `unpack` makes them (docs/results/scale.md).
    """

    copies = True

    def __init__(self) -> None:
        super().__init__()
        self._forms: dict[Any, Any] = {}

    def pack(self, client: int, round: int, state: Any) -> Any:
        vectors = [v for _, v in leaves(state)]
        place = self._place(sum(map(_room, vectors)))
        if place is None:
            return state
        packed = Packed(place, self._form(state))
        for part, v in zip(_parts(packed), vectors, strict=True):
            write(part, v)
        return packed

    def unpack(self, packed: Any, like: Any = None) -> Any:
        if not isinstance(packed, Packed):
            return packed
        parts = _parts(packed)
        return map_vectors(lambda _: next(parts), packed.form)

    def _place(self, size: int) -> Tensor | mmap.mmap | None:
        """Memory of ``size`` bytes; None: the state stays where it is."""
        return mmap.mmap(-1, size, **PRIVATE) if size >= OWN_PAGES_BYTES else None

    def _form(self, state: Any) -> Any:
        """The structure of a state; one object for all states of the same structure."""
        form = map_vectors(lambda v: v.new_empty(()).expand(v.shape), state)
        key = type(form), tuple((name, v.shape, v.dtype) for name, v in leaves(form))
        return self._forms.setdefault(key, form)


class FileStore(PageStore):
    """Client -> memory; states are in mapped files, if they do not fit into memory.

    A file has equal slots, each for one version of one client's state; the table of slots stays in
    memory. The vectors of a state that `unpack` gives are views of its slot, which another state
    overwrites after two more visits. folder: of the files; None: the system's temporary one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._free: dict[int, list[Tensor]] = {}  # free slots by size
        self._files: list[Tensor] = []

    def save(self, client: int, memory: Memory) -> None:
        before = self.load(client)
        super().save(client, memory)
        self._free_slots(before, memory)
        for packed in _packed(memory):
            release(packed.memory)

    def remove(self, client: int) -> None:
        before = self.load(client)
        super().remove(client)
        self._free_slots(before)

    def state(self, client: int, round: int) -> Any:
        return map_vectors(torch.clone, super().state(client, round))

    def last_state(self, client: int, round: int) -> Any:
        """Its vectors are views of the file, which is freed with them."""
        return super().state(client, round)

    def states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        for file in self._files:  # the pages of the last call's states
            release(file)
        return super().states(accepted)

    def _place(self, size: int) -> Tensor | None:
        """A slot; None: the state has no vectors. Raises OSError if the disk is full."""
        if not size:
            return None
        free = self._free.setdefault(size, [])
        if not free:
            number = max(1, min(SLOTS, SHARD // size))
            self._files.append(mapped(number * size, torch.uint8, self._folder))
            free += self._files[-1].view(number, size)
        return free.pop()

    def _free_slots(self, before: Memory | None, now: Memory | None = None) -> None:
        used = [packed.place for packed in _packed(now)]
        for packed in _packed(before):
            if not any(packed.place is place for place in used):
                self._free[len(packed.place)].append(packed.memory)


def _packed(memory: Memory | None) -> list[Packed]:
    """The versions of a memory that have a place."""
    versions = memory.versions if memory else ()
    return [v.state for v in versions if isinstance(v.state, Packed)]


def _room(v: Tensor) -> int:
    return -(-v.nbytes // ALIGNED) * ALIGNED


def _parts(packed: Packed) -> Iterator[Tensor]:
    """The vectors of a state, as views of its memory."""
    memory, first = packed.memory, 0
    for _, v in leaves(packed.form):
        yield memory[first : first + v.nbytes].view(v.dtype).view(v.shape)
        first += _room(v)
