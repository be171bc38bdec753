"""The memories of clients in this process."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedaccord.storage.store import Memory, MissingStateError, Version, version

log = logging.getLogger("flwr")


class Memories:
    """A `Store` in memory: states are stored as they are."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}

    def clients(self) -> list[int]:
        """Those that have a memory, in order."""
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
        """The client's state after the step of a round, which stays as it is; None: it has none."""
        found = version(self.load(client), round)
        try:
            return found and self.unpack(found.state)
        except MissingStateError:
            return None

    def states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        """(round, state) of each client whose state after the round ``accepted[client]`` is here;
        those of `Shards` may be used until the next call."""
        states = {}
        for client in self.clients():
            if found := version(self.load(client), accepted[client]):
                try:
                    states[client] = found.round, self.unpack(found.state)
                except MissingStateError as error:
                    log.warning("no state of client %d in the checkpoint: %s", client, error)
        return states

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        """Replace all memories by those of one version each, given as in `states`."""
        for client in self.clients():
            self.remove(client)
        for client, (round, state) in states:
            self.save(client, Memory(Version(round, self.pack(client, round, state))))
