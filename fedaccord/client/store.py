"""What a client remembers between two visits, and where: Flower's Context, or `disk.py`.

The last two versions of its state are kept: the one that the last step made, and the one that it
was made from. A client whose last step the server did not accept goes back by one.
"""

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Context

from fedaccord.core.plugin import ClientHalf, state_like
from fedaccord.core.rule import Shapes
from fedaccord.core.vectors import leaves
from fedaccord.core.visit import TrainInstruction
from fedaccord.wire import records
from fedaccord.wire.tensor_array import KeptArray

STATE, BEFORE, STATE_INFO = "fedaccord-state", "fedaccord-state-before", "fedaccord-state-info"


class Version(NamedTuple):
    """A client's state after the step of a round."""

    round: int
    state: Any  # as the store keeps it: a NamedTuple of vectors, or a record of them


class Memory(NamedTuple):
    """What a client remembers."""

    latest: Version
    before: Version | None = None  # what the latest was made from; None: the first visit
    attempt: int = 0  # of the server, when it asked last


class LostState(Exception):
    """The client does not have the state that the server knows of."""


def recall(memory: Memory | None, asked: TrainInstruction) -> Any | None:
    """The state that a visit begins with, as it was kept; None: it is the client's first one.

    Raises LostState where it is not there, and ValueError for a message that came after the one of
    a later round.
    """
    if memory and asked.attempt <= memory.attempt and asked.round < memory.latest.round:
        raise ValueError(
            f"the message of round {asked.round + 1} came after that of round "
            f"{memory.latest.round + 1}: nothing was done"
        )
    if asked.accepted < 0:
        return None
    found = version(memory, asked.accepted)
    if found is not None:
        return found.state
    if is_stateless(asked.half, asked.shapes):  # nothing to remember, nothing lost
        return None
    raise LostState


def remember(memory: Memory | None, asked: TrainInstruction, state: Any) -> Memory:
    """What a client remembers after the visit that ``state`` comes from."""
    return Memory(Version(asked.round, state), version(memory, asked.accepted), asked.attempt)


def version(memory: Memory | None, round: int) -> Version | None:
    """The one that the step of a round made."""
    versions = (memory.latest, memory.before) if memory else ()
    return next((v for v in versions if v and v.round == round), None)


@lru_cache(maxsize=8)
def is_stateless(half: ClientHalf, shapes: Shapes) -> bool:
    """Whether a client keeps no vector between two rounds."""
    return next(leaves(state_like(half, shapes)), None) is None


class Store(Protocol):
    """Where a client's memory lies; `pack` makes what a version keeps of a state."""

    def load(self) -> Memory | None: ...

    def save(self, memory: Memory) -> None: ...

    def pack(self, round: int, state: Any) -> Any: ...

    def unpack(self, kept: Any, like: Any) -> Any:
        """The state, with the structure of ``like``. Raises LostState where it is damaged."""


class ContextStore:
    """Flower's Context: it lasts as long as the run and the SuperNode."""

    def __init__(self, context: Context) -> None:
        self.records = context.state

    def load(self) -> Memory | None:
        latest = records.arrays_of(self.records, STATE)
        if latest is None:
            return None
        info = records.config_of(self.records, STATE_INFO)
        kept = (latest, records.arrays_of(self.records, BEFORE))
        versions = [*map(Version, info["rounds"], kept)]
        return Memory(versions[0], versions[1] if len(versions) > 1 else None, info["attempt"])

    def save(self, memory: Memory) -> None:
        latest, before, attempt = memory
        self.records[STATE] = latest.state
        self.records.pop(BEFORE, None)
        if before is not None:
            self.records[BEFORE] = before.state
        rounds = [version.round for version in (latest, before) if version is not None]
        self.records[STATE_INFO] = ConfigRecord({"rounds": rounds, "attempt": attempt})

    def pack(self, round: int, state: Any) -> ArrayRecord:
        return records.pack(state, KeptArray)

    def unpack(self, kept: ArrayRecord, like: Any) -> Any:
        """Raises ValueError where it is a state of another method."""
        return records.unpack_state(like, kept)
