"""The memories of clients in this process."""

import logging
import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.vectors import leaves, map_vectors
from fedaccord.storage.store import Memory, MissingStateError, Version, version

log = logging.getLogger("flwr")

LARGE = 2**20  # bytes of a vector from which it has pages of its own
# private to this process: shareable pages take twice the time on some systems
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Memories:
    """A `Store` in memory, without a copy of the states."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}
        self._forms: dict[Any, Any] = {}

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

    def unpack(self, kept: Any, like: Any = None) -> Any:
        return kept

    def state(self, client: int, round: int) -> Any:
        """The client's state after the step of a round, not to be changed; None: it has none."""
        found = version(self.load(client), round)
        try:
            return found and self.unpack(found.state)
        except MissingStateError:
            return None

    def states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        """(round, state) of each client whose state after the round ``accepted[client]`` is stored;
        states from `Shards` are valid until the next call."""
        states = {}
        for client in self.clients():
            if found := version(self.load(client), accepted[client]):
                try:
                    states[client] = found.round, self.unpack(found.state)
                except MissingStateError as error:
                    log.warning("no state of client %d in the checkpoint: %s", client, error)
        return states

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        """Replace all memories by one version each, in the form of `states`."""
        for client in self.clients():
            self.remove(client)
        for client, (round, state) in states:
            self.save(client, Memory(Version(round, self.pack(client, round, state))))

    def _form(self, state: Any) -> Any:
        """The structure of a state; one object for all states of the same structure."""
        form = map_vectors(lambda v: v.new_empty(()).expand(v.shape), state)
        key = type(form), tuple((name, v.shape, v.dtype) for name, v in leaves(form))
        return self._forms.setdefault(key, form)


class Pages(NamedTuple):
    """A state with large vectors."""

    form: Any  # the state's structure, without values
    vectors: list[Tensor | mmap.mmap]  # pages: of a large one


class PagedMemories(Memories):
    """A `Store` in memory, with the large vectors of states in pages of their own.

    A state lives for many rounds. On the heap it would cause fragmentation between the vectors of a
    step, and so would even the small tensor objects: `unpack` makes them.
    """

    def pack(self, client: int, round: int, state: Any) -> Any:
        vectors = [v for _, v in leaves(state)]
        if all(v.nbytes < LARGE for v in vectors):
            return state
        return Pages(self._form(state), [*map(_apart, vectors)])

    def unpack(self, kept: Any, like: Any = None) -> Any:
        if not isinstance(kept, Pages):
            return kept
        left = iter(kept.vectors)

        def vector(form: Tensor) -> Tensor:
            found = next(left)
            if isinstance(found, Tensor):
                return found
            return torch.frombuffer(found, dtype=form.dtype).view(form.shape)

        return map_vectors(vector, kept.form)


def _apart(v: Tensor) -> Tensor | mmap.mmap:
    """The values in pages that are returned to the system when freed; small vectors stay."""
    if v.nbytes < LARGE:
        return v
    pages = mmap.mmap(-1, v.nbytes, **PRIVATE)
    torch.frombuffer(pages, dtype=v.dtype).view(v.shape).copy_(v)
    return pages
