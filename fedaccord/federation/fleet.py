"""The clients as the round sees them: visits out, answers in, by value.

`MessageFleet` reaches them with Flower's messages; `engine/fleet.py` holds them in this process.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedaccord.compat import flower_1_41 as flower
from fedaccord.core.options import listed
from fedaccord.core.request import StateLost, TrainInstruction, TrainReply, TrainRequest
from fedaccord.federation import ray_cluster
from fedaccord.federation.errors import FederationError, last_line
from fedaccord.federation.partition_ids import PartitionIds
from fedaccord.federation.roster import ASK_AGAIN, Roster
from fedaccord.wire.instruction import write_instruction
from fedaccord.wire.messages import read_reply, write_requests
from fedaccord.wire.records import CONFIG, METRICS, metrics_of

log = logging.getLogger("flwr")

LATE = "no reply in time"
PULL_INTERVAL = 0.01  # seconds
MORE = '"num-supernodes=20 client-resources-num-cpus=1"'
Reading = TrainReply | StateLost | str  # a string: what is wrong with the reply, in one line
TrainReplies = Iterable[tuple[int, Reading]]  # each asked client, once
T = TypeVar("T")


class Fleet(Protocol):
    """All clients of a federation."""

    @property
    def num_clients(self) -> int:
        """C."""

    def connect(self, seconds: float) -> None:
        """Wait until every client is here. Raises FederationError where one does not come."""

    def available(self) -> Sequence[int]:
        """The clients that can be asked now, in order."""

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        """What becomes of each visit, as answers come; timeout: seconds for all."""

    def client_states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        """(round, state after it) of the clients whose memory lies in this process.

        accepted: of every client, as in `RoundState`.
        """

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        """Give clients the states that `kept` told of, one after another."""

    def evaluate(
        self, questions: Sequence[TrainInstruction], timeout: float
    ) -> list[Mapping[str, float] | str]:
        """The metrics of clients' own models, or in one line why there are none."""


class MessageFleet:
    """Clients behind a Flower grid."""

    def __init__(
        self,
        grid: Grid,
        extra: Mapping[str, Any] | None = None,
        partition_ids: PartitionIds | None = None,
    ) -> None:
        self.simulated = flower.is_simulation(grid)
        if self.simulated:
            flower.set_pull_interval(grid, PULL_INTERVAL)
        self.grid = grid
        self.extra = extra or {}  # a caller's own entries in the config of training messages
        # a simulation loses no message, and does two at once: see `_still_late`
        ask_again = math.inf if self.simulated else ASK_AGAIN
        self.roster = Roster(partition_ids=partition_ids, ask_again=ask_again)
        self._sent: dict[int, Message] = {}  # client -> this round's message
        self._late: dict[str, int] = {}  # message -> client of a simulation that is late with it
        self._half: Any = None  # the client half that this round's messages carry

    @property
    def num_clients(self) -> int:
        return self.roster.num_clients

    def connect(self, seconds: float) -> None:
        if self.simulated and (problem := ray_cluster.unreachable()):  # Ray itself says nothing
            log.warning("Ray: %s, and start the run again", problem)
        self.roster.wait_for_all(self.grid, seconds)
        if self.simulated and self.num_clients == flower.DEFAULT_SUPERNODES:
            log.info("for more simulated clients: flwr run . --federation-config %s", MORE)

    def available(self) -> Sequence[int]:
        self.roster.update(self.grid)
        return sorted(self.roster.nodes)

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        end = time.monotonic() + timeout
        clients = [request.instruction.client for request in requests]
        late = self._still_late(clients, end)
        messages = self.messages([v for v in requests if v.instruction.client not in late])
        left = max(0.0, end - time.monotonic())
        found = self.read(self.grid.send_and_receive(messages, timeout=left))
        return [(i, found.get(i, LATE)) for i in clients]

    def _still_late(self, clients: Sequence[int], end: float) -> set[int]:
        """Those of a simulation's clients that are at an earlier message; it waits for one of them
        where all are.

        A SuperNode handles one after another. A simulation would do both at once, and the one that
        ends last put back the state that it began with.
        """
        while self._late:
            for reply in self.grid.pull_messages([*self._late]):
                self._late.pop(reply.metadata.reply_to_message_id, None)
            late = {*self._late.values()} & {*clients}
            if len(late) < max(1, len(clients)) or time.monotonic() > end:
                return late
            time.sleep(PULL_INTERVAL)
        return set()

    def messages(self, requests: Sequence[TrainRequest]) -> list[Message]:
        """A training message for each visit; they stay open until the next call."""
        contents = write_requests(requests, self.extra)
        clients = [request.instruction.client for request in requests]
        self._half = requests[0].instruction.half if requests else None
        self._sent = {
            i: Message(content, self.roster.nodes[i], MessageType.TRAIN)
            for i, content in zip(clients, contents, strict=True)
        }
        return list(self._sent.values())

    def read(self, replies: Iterable[Message]) -> Mapping[int, Reading]:
        """What became of the open messages; a reply to none of them is for nobody.

        Raises FederationError where Flower's simulation has lost a worker process.
        """
        heard = self._hear(self._sent, replies)
        _check_workers(heard.values())

        def read(reply: Message) -> TrainReply | StateLost:
            return read_reply(reply.content, self._half)

        return {i: _read(heard[i], read) if i in heard else LATE for i in sorted(self._sent)}

    def _hear(self, asked: Mapping[int, Message], replies: Iterable[Message]) -> dict[int, Message]:
        """As `_heard`; who is late stays known."""
        heard = _heard(asked, replies)
        if self.simulated:
            self._late |= {m.metadata.message_id: i for i, m in asked.items() if i not in heard}
        return heard

    def client_states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        return {}

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        pass

    def evaluate(
        self, questions: Sequence[TrainInstruction], timeout: float
    ) -> list[Mapping[str, float] | str]:
        asked = {
            question.client: Message(
                RecordDict({CONFIG: write_instruction(question, {})}),
                self.roster.nodes[question.client],
                MessageType.EVALUATE,
            )
            for question in questions
        }
        replies = self.grid.send_and_receive(list(asked.values()), timeout=timeout)
        heard = self._hear(asked, replies)
        return [_read(heard[i], _numbers) if i in heard else LATE for i in sorted(asked)]


def _heard(asked: Mapping[int, Message], replies: Iterable[Message]) -> dict[int, Message]:
    """The first reply of each client to the message that it was sent."""
    clients = {message.metadata.message_id: i for i, message in asked.items()}
    heard: dict[int, Message] = {}
    for reply in replies:
        i = clients.get(reply.metadata.reply_to_message_id)
        if i is None:
            log.info("ignored a reply to no message of this round")
        elif not _is_sender(reply, asked[i]):
            log.info("ignored a reply for client %d that another node sent", i)
        elif i in heard:
            log.info("ignored a second reply of client %d", i)
        else:
            heard[i] = reply
    return heard


def _is_sender(reply: Message, asked: Message) -> bool:
    """Whether the node that was asked sent it, or Flower in its place."""
    sender = reply.metadata.src_node_id
    by_flower = reply.has_error() and sender == asked.metadata.src_node_id
    return by_flower or sender == asked.metadata.dst_node_id


def _check_workers(replies: Iterable[Message]) -> None:
    """Flower's simulation goes on giving clients to a Ray actor that died, one after another.

    One such reply may be anybody's, so it takes two.
    """
    errors = [reply.error.reason or "" for reply in replies if reply.has_error()]
    if sum(flower.is_dead_worker(reason) for reason in errors) > 1:
        raise FederationError(
            "a worker process of Flower's simulation died, mostly for want of memory, and most "
            "clients of this run would fail from now on; give each client more with "
            "client-resources-num-cpus, or take fewer clients at once, and go on with resume=true"
        )


def _read(reply: Message, read: Callable[[Message], T]) -> T | str:
    """Whatever a client sends, the round goes on."""
    try:
        if reply.has_error():
            return f"error {reply.error.code}: {last_line(reply.error.reason)}"
        return read(reply)
    except ValueError as error:
        return str(error)
    except Exception as error:  # Flower's own complaints about what a message claims to be
        return f"expected a reply that can be read, got {type(error).__name__}"


def _numbers(reply: Message) -> Mapping[str, float]:
    metrics = metrics_of(reply.content, METRICS)
    if not metrics:
        raise ValueError(f"expected the record {METRICS!r}, got {listed(sorted(reply.content))}")
    numbers = {name: v for name, v in metrics.items() if isinstance(v, (int, float))}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("expected finite numbers in an evaluation, got NaN or Inf")
    return numbers
