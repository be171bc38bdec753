"""The clients as the round sees them: visits out, answers in, by value.

`MessageFleet` reaches them with Flower's messages; `engine/fleet.py` holds them in this process.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedaccord.core.visit import Answer, Lost, TrainInstruction, Visit
from fedaccord.federation.errors import last_line
from fedaccord.federation.roster import Roster
from fedaccord.wire.instruction import write_instruction
from fedaccord.wire.messages import read_answer, write_visits
from fedaccord.wire.records import CONFIG, METRICS, metrics_of

log = logging.getLogger("flwr")

LATE = "no reply in time"
Reading = Answer | Lost | str  # a string: what is wrong with the reply, in one line


class Fleet(Protocol):
    """All clients of a federation."""

    @property
    def num_clients(self) -> int:
        """C."""

    def connect(self, seconds: float) -> None:
        """Wait until every client is here. Raises FederationError where one does not come."""

    def here(self) -> Sequence[int]:
        """The clients that can be asked now, in order."""

    def train(self, visits: Sequence[Visit], timeout: float) -> Mapping[int, Reading]:
        """What becomes of each visit, in the order of clients; timeout: seconds for all."""

    def kept(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        """(round, state after it) of the clients whose memory lies in this process.

        accepted: of every client, as in `RoundState`.
        """

    def restore(self, states: Mapping[int, tuple[int, Any]]) -> None:
        """Give clients the states that `kept` told of."""

    def test(
        self, questions: Sequence[TrainInstruction], timeout: float
    ) -> list[Mapping[str, float] | str]:
        """The metrics of clients' own models, or in one line why there are none."""


class MessageFleet:
    """Clients behind a Flower grid."""

    def __init__(self, grid: Grid, extra: Mapping[str, Any] | None = None) -> None:
        self.grid = grid
        self.extra = extra or {}  # a caller's own entries in the config of training messages
        self.roster = Roster()
        self._sent: dict[int, Message] = {}  # client -> this round's message
        self._half: Any = None  # the client half that this round's messages carry

    @property
    def num_clients(self) -> int:
        return self.roster.num_clients

    def connect(self, seconds: float) -> None:
        self.roster.wait_for_all(self.grid, seconds)

    def here(self) -> Sequence[int]:
        self.roster.update(self.grid)
        return sorted(self.roster.nodes)

    def train(self, visits: Sequence[Visit], timeout: float) -> Mapping[int, Reading]:
        return self.read(self.grid.send_and_receive(self.messages(visits), timeout=timeout))

    def messages(self, visits: Sequence[Visit]) -> list[Message]:
        """A training message for each visit; they stay open until the next call."""
        contents = write_visits(visits, self.extra)
        clients = [visit.instruction.client for visit in visits]
        self._half = visits[0].instruction.half if visits else None
        self._sent = {
            i: Message(content, self.roster.nodes[i], MessageType.TRAIN)
            for i, content in zip(clients, contents, strict=True)
        }
        return list(self._sent.values())

    def read(self, replies: Iterable[Message]) -> Mapping[int, Reading]:
        """What became of the open messages; a reply to none of them is for nobody."""
        found: dict[int, Reading] = dict.fromkeys(sorted(self._sent), LATE)
        asked = {message.metadata.message_id: i for i, message in self._sent.items()}
        for reply in replies:
            i = asked.get(reply.metadata.reply_to_message_id)
            if i is None:
                log.info("ignored a reply to no message of this round")
            elif found[i] is not LATE:
                log.info("ignored a second reply of client %d", i)
            else:
                found[i] = _read(reply, self._half)
        return found

    def kept(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        return {}

    def restore(self, states: Mapping[int, tuple[int, Any]]) -> None:
        pass

    def test(
        self, questions: Sequence[TrainInstruction], timeout: float
    ) -> list[Mapping[str, float] | str]:
        asked = [
            Message(
                RecordDict({CONFIG: write_instruction(question, {})}),
                self.roster.nodes[question.client],
                MessageType.EVALUATE,
            )
            for question in questions
        ]
        return [*map(_numbers, self.grid.send_and_receive(asked, timeout=timeout))]


def _read(reply: Message, half: Any) -> Reading:
    """Whatever a client sends, the round goes on."""
    if reply.has_error():
        return f"error {reply.error.code}: {last_line(reply.error.reason)}"
    try:
        return read_answer(reply.content, half)
    except ValueError as error:
        return str(error)
    except Exception as error:  # Flower's own complaints about what a message claims to be
        return f"expected a reply that can be read, got {type(error).__name__}"


def _numbers(reply: Message) -> Mapping[str, float] | str:
    if reply.has_error():
        return last_line(reply.error.reason)
    metrics = metrics_of(reply.content, METRICS)
    if not metrics:
        return f"expected the record {METRICS!r}, got {sorted(reply.content)}"
    return {name: v for name, v in metrics.items() if isinstance(v, (int, float))}
