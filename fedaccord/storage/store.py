"""A client's memory between two visits, and the protocol of all stores of them, `Store`.

`ContextStore` is Flower's Context. `DiskStore` (`disk.py`) survives restarts of a device. All
clients of a run in this process have one store, as in `in_process.py` and `on_ray.py`.

At most three versions of its state are kept: the latest, the one before, in case the server does
not accept the last step, and the one of the server's last checkpoint, in case the server resumes
from there. If the checkpoints contain the clients' states, as in process, the third is not needed.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context

from fedaccord.compat.flower import KeptArray
from fedaccord.core.client_half import state_like
from fedaccord.core.request import TrainInstruction, round_of
from fedaccord.core.vectors import leaves
from fedaccord.wire import records

EARLIER_START = "earlier start of the run"  # in a client's reply to a replaced server
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


def packed_before(memory: Memory | None, instruction: TrainInstruction) -> Any | None:
    """The stored form of the state at the start of a visit; None: it is the client's first visit.
    If ``accepted`` is below -1, only the client's own parameters and buffers still count.

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
    entry = version(memory, instruction.accepted)
    if entry is not None:
        return entry.state
    if instruction.accepted == -1 or _is_stateless(instruction):  # nothing can be lost
        return None
    raise MissingStateError


def memory_after(memory: Memory | None, instruction: TrainInstruction, packed: Any) -> Memory:
    """The client's memory after the visit that resulted in a state, here in its stored form."""
    accepted, durable = instruction.accepted, instruction.durable
    before = version(memory, accepted)
    older = None if round_of(durable) == round_of(accepted) else version(memory, durable)
    return Memory(Version(instruction.round, packed), before, instruction.attempt, older)


def _like(instruction: TrainInstruction) -> Any:
    return state_like(instruction.half, instruction.shapes)


def _is_stateless(instruction: TrainInstruction) -> bool:
    return next(leaves(_like(instruction)), None) is None


def version(memory: Memory | None, accepted: int) -> Version | None:
    """The version after the step of a round, as of `RoundState.accepted`."""
    round = round_of(accepted)
    return next((v for v in memory.versions if v.round == round), None) if memory else None


class Store(ABC):
    """Client -> memory, with a form of its own for states: `pack` and `unpack`."""

    @abstractmethod
    def load(self, client: int) -> Memory | None:
        """The client's memory; None before its first visit."""

    @abstractmethod
    def save(self, client: int, memory: Memory) -> None:
        """Replace the client's memory; versions that the new one lacks are dropped."""

    @abstractmethod
    def pack(self, client: int, round: int, state: Any) -> Any:
        """The stored form of the state after a round; `save` assigns it to the client."""

    @abstractmethod
    def unpack(self, packed: Any, like: Any) -> Any:
        """The state, with the structure of ``like``. Raises MissingStateError if it is damaged."""

    def recall(self, instruction: TrainInstruction) -> Any | None:
        """The client's state at the start of a visit; None: it is the first one. Raises as
        `packed_before` and `unpack`."""
        packed = packed_before(self.load(instruction.client), instruction)
        if packed is None:
            return None
        try:
            return self.unpack(packed, _like(instruction))
        except MissingStateError:
            if _is_stateless(instruction):
                return None
            raise

    def remember(self, instruction: TrainInstruction, state: Any) -> None:
        """Store the state after a visit."""
        packed = self.pack(instruction.client, instruction.round, state)
        memory = memory_after(self.load(instruction.client), instruction, packed)
        self.save(instruction.client, memory)


class ContextStore(Store):
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
            None if packed is None else Version(round, packed)
            for round, packed in zip(rounds, others, strict=True)
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

    def unpack(self, packed: ArrayRecord, like: Any) -> Any:
        """Raises ValueError if it is a state of another method."""
        return records.unpack_state(like, packed)
