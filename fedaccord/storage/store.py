"""A client's memory between two visits, and the protocol of its stores.

`ContextStore` is Flower's Context; files of one client are in `disk.py`, the memories of clients in
this process in `memories.py`, `shards.py` and `on_ray.py`.

At most three versions of its state are kept: the latest, the one before, in case the server does
not accept the last step, and the one of the server's last checkpoint, in case the server resumes
from there. If the checkpoints contain the clients' states, as in process, the third is not needed.
"""

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Context

from fedaccord.compat.flower import KeptArray
from fedaccord.core.plugin import ClientHalf, state_like
from fedaccord.core.request import TrainInstruction
from fedaccord.core.rule import Shapes
from fedaccord.core.vectors import leaves
from fedaccord.wire import records

EARLIER_START = "earlier start of the run"  # in what a client replies to a replaced server
STATE, STATE_INFO = "fedaccord-state", "fedaccord-state-info"
BEFORE, DURABLE = "fedaccord-state-before", "fedaccord-state-durable"


class Version(NamedTuple):
    """A client's state after the step of a round."""

    round: int
    state: Any  # in the store's own form, of `Store.pack` and `Store.unpack`


class Memory(NamedTuple):
    """A client's memory."""

    latest: Version
    before: Version | None = None  # the one before the latest; None: the first visit
    attempt: int = 0  # the latest start of the server that sent a request
    durable: Version | None = None  # that of the server's last checkpoint; None: one of the above

    @property
    def versions(self) -> list[Version]:
        return [v for v in (self.latest, self.before, self.durable) if v is not None]


class MissingStateError(Exception):
    """The client does not have the state that the server expects."""


def recall(memory: Memory | None, instruction: TrainInstruction) -> Any | None:
    """The stored state at the start of a visit; None: it is the client's first visit.

    Every start of a run has a larger ``attempt`` than earlier starts, so messages are ordered by
    (attempt, round). A later start is accepted even if its first round is lower; after that,
    messages of earlier starts are refused in any round.

    Raises MissingStateError if the state is missing, and ValueError for a message that is older
    than the last one.
    """
    if memory and instruction.attempt < memory.attempt:
        raise ValueError(
            f"the message of round {instruction.round + 1} is of an {EARLIER_START} than the last "
            "message: nothing was done"
        )
    if memory and instruction.attempt == memory.attempt and instruction.round < memory.latest.round:
        raise ValueError(
            f"the message of round {instruction.round + 1} came after that of round "
            f"{memory.latest.round + 1}: nothing was done"
        )
    if instruction.accepted < 0:
        return None
    found = version(memory, instruction.accepted)
    if found is not None:
        return found.state
    if is_stateless(instruction.half, instruction.shapes):  # stateless: nothing can be lost
        return None
    raise MissingStateError


def remember(memory: Memory | None, instruction: TrainInstruction, state: Any) -> Memory:
    """The client's memory after the visit that resulted in ``state``."""
    accepted, durable = instruction.accepted, instruction.durable
    before = version(memory, accepted)
    older = None if durable == accepted else version(memory, durable)
    return Memory(Version(instruction.round, state), before, instruction.attempt, older)


def version(memory: Memory | None, round: int) -> Version | None:
    """The version after the step of a round."""
    return next((v for v in memory.versions if v.round == round), None) if memory else None


@lru_cache(maxsize=8)
def is_stateless(half: ClientHalf, shapes: Shapes) -> bool:
    """Whether a client keeps no vector between two rounds."""
    return next(leaves(state_like(half, shapes)), None) is None


class Store(Protocol):
    """Stores the memories of clients; it has its own form for states."""

    def load(self, client: int) -> Memory | None:
        """None before the client's first visit."""

    def save(self, client: int, memory: Memory) -> None:
        """Replace the client's memory; versions that the new one lacks are dropped."""

    def pack(self, client: int, round: int, state: Any) -> Any:
        """The stored form of the state after a round; `save` assigns it to the client."""

    def unpack(self, kept: Any, like: Any) -> Any:
        """The state, with the structure of ``like``. Raises MissingStateError if it is damaged."""


class ContextStore:
    """Flower's Context of one client, which lasts as long as the run and the SuperNode."""

    def __init__(self, context: Context) -> None:
        self.records = context.state

    def load(self, client: int) -> Memory | None:
        latest = records.arrays_of(self.records, STATE)
        if latest is None:
            return None
        info = records.config_of(self.records, STATE_INFO)
        others = (records.arrays_of(self.records, name) for name in (BEFORE, DURABLE))
        first, *rounds = info["rounds"]
        before, durable = (
            None if kept is None else Version(round, kept)
            for round, kept in zip(rounds, others, strict=True)
        )
        return Memory(Version(first, latest), before, info["attempt"], durable)

    def save(self, client: int, memory: Memory) -> None:
        rounds = []
        versions = (memory.latest, memory.before, memory.durable)
        for name, version in zip((STATE, BEFORE, DURABLE), versions, strict=True):
            self.records.pop(name, None)
            if version is not None:
                self.records[name] = version.state
            rounds.append(-1 if version is None else version.round)
        self.records[STATE_INFO] = ConfigRecord({"rounds": rounds, "attempt": memory.attempt})

    def pack(self, client: int, round: int, state: Any) -> ArrayRecord:
        return records.pack(state, KeptArray)

    def unpack(self, kept: ArrayRecord, like: Any) -> Any:
        """Raises ValueError if it is a state of another method."""
        return records.unpack_state(like, kept)
