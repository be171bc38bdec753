"""The clients as a round sees them: requests and replies, as values.

`MessageFleet` reaches them with Flower's messages; `engine/fleet.py` holds them in this process.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedaccord.compat import flower_1_41 as flower
from fedaccord.core.options import listed
from fedaccord.core.request import (
    DEFAULT,
    EvaluateRequest,
    ModelLayout,
    ModelSettings,
    StateLost,
    TrainReply,
    TrainRequest,
)
from fedaccord.federation import ray_cluster
from fedaccord.federation.errors import FederationError, last_line
from fedaccord.federation.partition_ids import PartitionIds
from fedaccord.federation.roster import ASK_AGAIN, Roster
from fedaccord.wire.handshake import handshake
from fedaccord.wire.instruction import check_own_config, with_config
from fedaccord.wire.messages import read_reply, write_evaluate_requests, write_requests
from fedaccord.wire.records import CONFIG, METRICS, SECURE, config_of, metrics_of

log = logging.getLogger("flwr")

LATE = "no reply in time"
PULL_INTERVAL = 0.01  # seconds between two polls of a simulation
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two polls of SuperNodes' replies
READ_AT_ONCE = 2**28  # bytes of replies that are fetched together
PAUSE_SHARE = 0.1  # of the time since the messages were sent: at most so much later is a round over
MORE = '"num-supernodes=20 client-resources-num-cpus=1"'
Reading = TrainReply | StateLost | str  # a string: what is wrong with the reply, in one line
TrainReplies = Iterable[tuple[int, Reading]]  # each client of the requests, once
T = TypeVar("T")


class Fleet(Protocol):
    """All clients of a federation."""

    home: torch.device  # of the server's vectors
    evaluators: int  # threads that may evaluate: the cores of clients that are idle meanwhile

    @property
    def num_clients(self) -> int:
        """C."""

    def connect(self, seconds: float, settings: ModelSettings, model: ModelLayout) -> None:
        """Wait until every client is connected, with a model that these settings make this one.

        Raises FederationError if one does not connect.
        """

    def available(self) -> Sequence[int]:
        """The clients that are connected now, in order."""

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        """The replies to the requests, as they come; timeout: seconds for all."""

    def client_states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        """(round, state after it) of the clients whose states this process stores.

        accepted: of every client, as in `RoundState`.
        """

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        """Give clients the states that `client_states` returned, one after another."""

    def evaluate(
        self, requests: Sequence[EvaluateRequest], timeout: float
    ) -> list[Mapping[str, float] | str]:
        """The metrics of each client on its own samples, or in one line why there are none."""


class MessageFleet:
    """Clients behind a Flower grid."""

    home = torch.device("cpu")
    evaluators = 1

    def __init__(
        self,
        grid: Grid,
        config: Mapping[str, Any] | None = None,
        partition_ids: PartitionIds | None = None,
        config_key: str = CONFIG,
        card: Mapping[str, Any] | None = None,
    ) -> None:
        """config: a caller's own, of training messages; config_key: its record's name; card: of the
        server's own data, as `Task.card`."""
        check_own_config(config or {}, config_key)
        self.simulated = flower.is_simulation(grid)
        self.grid = grid
        self._config, self._config_key = config or {}, config_key
        # a simulation loses no message, and handles two of a client at once: see `_still_late`
        ask_again = math.inf if self.simulated else ASK_AGAIN
        self.roster = Roster(partition_ids=partition_ids, ask_again=ask_again, card=card)
        self._late: dict[str, int] = {}  # message -> client of a simulation that is late with it

    @property
    def num_clients(self) -> int:
        return self.roster.num_clients

    def connect(
        self, seconds: float, settings: ModelSettings = DEFAULT, model: ModelLayout | None = None
    ) -> None:
        known, self.roster.layout = self.roster.layout, model or self.roster.layout
        if model and known and (difference := known.difference(model)):
            raise FederationError(
                f"the server's model is not the clients': {difference}: build the same model on "
                "server and clients"
            )
        self.roster.handshake = self._with_config(handshake(settings), 0)
        if self.simulated and (problem := ray_cluster.unreachable()):  # Ray itself says nothing
            log.warning("Ray: %s, and start the run again", problem)
        self.roster.wait_for_all(self.grid, seconds)
        if self.simulated and self.num_clients == flower.DEFAULT_SUPERNODES:
            log.info("for more simulated clients: flwr run . --federation-config %s", MORE)

    def card(self, seconds: float, settings: ModelSettings) -> Mapping[str, Any]:
        """How to build the clients' model, and its inputs and classes, as the first node reports.

        Raises FederationError as `connect`, and if none reports it.
        """
        self.connect(seconds, settings)
        if self.roster.card is None:
            raise FederationError(
                "evaluation=clients: expected clients that report the shape of a sample and the "
                "number of classes, got none: run the app of this version of FedAccord on them"
            )
        return self.roster.card

    def available(self) -> Sequence[int]:
        self.roster.update(self.grid)
        return sorted(self.roster.nodes)

    def train(
        self,
        requests: Sequence[TrainRequest],
        timeout: float,
        more: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> TrainReplies:
        """more: for each client the stage of a secure sum that its message is."""
        end = time.monotonic() + timeout
        clients = [request.instruction.client for request in requests]
        late = self._still_late(clients, end)
        requests = [r for r in requests if r.instruction.client not in late]
        instructions = [request.instruction for request in requests]
        messages = {
            r.client: self._message(
                r.client, self._with_config(content, r.round + 1), MessageType.TRAIN
            )
            for r, content in zip(instructions, write_requests(requests), strict=True)
        }
        for i, stage in (more or {}).items():
            if i in messages:
                messages[i].content[SECURE] = ConfigRecord(dict(stage))
        size = max((request.nbytes for request in requests), default=0)
        replies = self._send(messages, max(0.0, end - time.monotonic()), size)
        return _readings(clients, replies, lambda it: read_reply(it.content, instructions[0].half))

    def evaluate(
        self, requests: Sequence[EvaluateRequest], timeout: float
    ) -> list[Mapping[str, float] | str]:
        messages = {}
        for request, content in zip(requests, write_evaluate_requests(requests), strict=True):
            i = request.instruction.client
            messages[i] = self._message(i, content, MessageType.EVALUATE)
        replies = dict(self._send(messages, timeout))
        return [_read(replies[i], _metrics) if i in replies else LATE for i in messages]

    def stage(
        self, payloads: Mapping[int, Mapping[str, Any]], timeout: float
    ) -> dict[int, dict[str, Any] | str]:
        """The answers to a stage of a secure sum, or why there is none."""
        contents = {i: RecordDict({SECURE: ConfigRecord(dict(p))}) for i, p in payloads.items()}
        messages = {
            i: self._message(i, content, MessageType.TRAIN) for i, content in contents.items()
        }
        replies = dict(self._send(messages, timeout))

        def read(reply: Message) -> dict[str, Any]:
            return dict(config_of(reply.content, SECURE))

        return {i: _read(replies[i], read) if i in replies else LATE for i in messages}

    def ask(
        self,
        clients: Sequence[int],
        content: RecordDict,
        timeout: float,
        read: Callable[[Message], T],
    ) -> dict[int, T | str]:
        """What ``read`` makes of each client's evaluation of ``content``, or why it cannot."""
        messages = {i: self._message(i, content, MessageType.EVALUATE) for i in clients}
        replies = dict(self._send(messages, timeout))
        return {i: _read(replies[i], read) if i in replies else LATE for i in clients}

    def _with_config(self, content: RecordDict, server_round: int) -> RecordDict:
        return with_config(content, self._config, self._config_key, server_round)

    def _message(self, client: int, content: RecordDict, kind: str) -> Message:
        return Message(content, self.roster.nodes[client], kind)

    def _send(
        self, messages: Mapping[int, Message], timeout: float, size: int = 0
    ) -> Iterator[tuple[int, Message]]:
        """The first reply of each client to its message, as they arrive; a simulation's late ones
        are noted. size: bytes of a reply."""
        message_ids = self.grid.push_messages([*messages.values()])
        return self._first_replies(messages, self._receive(message_ids, timeout, size))

    def _receive(
        self, message_ids: Iterable[str | None], timeout: float, size: int = 0
    ) -> Iterator[Message]:
        """Poll for the replies until all have arrived or ``timeout`` seconds are over.

        `Grid.send_and_receive` of a deployment sleeps three seconds between two polls.
        message_ids: None: Flower could not send the message. Of large replies a few are fetched at
        a time, and wait in the SuperLink's store until then.
        """
        waiting, began = [i for i in message_ids if i], time.monotonic()
        at_once = max(1, READ_AT_ONCE // size) if size else len(waiting)
        while waiting:
            answered = set[str]()
            for first in range(0, len(waiting), at_once):
                for reply in self.grid.pull_messages(waiting[first : first + at_once]):
                    answered.add(reply.metadata.reply_to_message_id)
                    yield reply
            waiting = [i for i in waiting if i not in answered]
            waited = time.monotonic() - began
            if not waiting or waited >= timeout:
                break
            time.sleep(min(self._pause(waited), timeout - waited))

    def _first_replies(
        self, messages: Mapping[int, Message], replies: Iterable[Message]
    ) -> Iterator[tuple[int, Message]]:
        clients = {message.metadata.message_id: i for i, message in messages.items()}
        late = dict(clients)
        for reply in replies:
            name = reply.metadata.reply_to_message_id
            i = clients.get(name)
            if i is None:
                log.info("ignored a reply to no message of this round")
            elif not _is_sender(reply, messages[i]):
                log.info("ignored a reply for client %d that another node sent", i)
            elif name not in late:
                log.info("ignored a second reply of client %d", i)
            else:
                del late[name]
                yield i, reply
        if self.simulated:
            self._late |= late

    def _pause(self, waited: float) -> float:
        """Seconds until the next poll; waited: since the messages were sent."""
        if self.simulated:
            return PULL_INTERVAL
        return min(max(SHORTEST_PAUSE, PAUSE_SHARE * waited), LONGEST_PAUSE)

    def _still_late(self, clients: Sequence[int], end: float) -> set[int]:
        """The clients of a simulation that are busy with an earlier message; if all are, it waits
        for one of them.

        A SuperNode handles one message after another. A simulation would handle both at once, and
        the one that ends last would put back the state that it began with.
        """
        while self._late:
            for reply in self.grid.pull_messages([*self._late]):
                self._late.pop(reply.metadata.reply_to_message_id, None)
            late = {*self._late.values()} & {*clients}
            if len(late) < max(1, len(clients)) or time.monotonic() > end:
                return late
            time.sleep(PULL_INTERVAL)
        return set()

    def client_states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        return {}

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        pass


def _readings(
    clients: Sequence[int],
    replies: Iterable[tuple[int, Message]],
    read: Callable[[Message], TrainReply | StateLost],
) -> TrainReplies:
    """What is read of each client's reply, as they arrive, then of the clients without one."""
    late, errors = dict.fromkeys(clients), list[str]()
    for i, reply in replies:
        del late[i]
        if reply.has_error():
            errors.append(reply.error.reason or "")
        yield i, _read(reply, read)
    _check_workers(errors)
    yield from ((i, LATE) for i in late)


def _is_sender(reply: Message, message: Message) -> bool:
    """Whether the receiver of the message sent the reply, or Flower in its place."""
    sender = reply.metadata.src_node_id
    by_flower = reply.has_error() and sender == message.metadata.src_node_id
    return by_flower or sender == message.metadata.dst_node_id


def _check_workers(errors: Iterable[str]) -> None:
    """Raise FederationError if Flower's simulation has lost a worker process.

    It continues to give clients to a Ray actor that died, one after another. One such reply may be
    made up by a client: at least two are needed.
    """
    if sum(flower.is_dead_worker(reason) for reason in errors) > 1:
        raise FederationError(
            "a worker process of Flower's simulation died, mostly because of too little memory, "
            "and most clients of this run would fail from now on; give each client more with "
            "client-resources-num-cpus, so that fewer run at once, and resume with resume=true"
        )


def _read(reply: Message, read: Callable[[Message], T]) -> T | str:
    """The content of a reply, or in one line why it cannot be used: no reply ends a run."""
    try:
        if reply.has_error():
            return f"error {reply.error.code}: {last_line(reply.error.reason)}"
        return read(reply)
    except ValueError as error:
        return str(error)
    except Exception as error:  # Flower's own complaints about what a message claims to be
        return f"expected a reply that can be read, got {type(error).__name__}"


def _metrics(reply: Message) -> Mapping[str, float]:
    metrics = metrics_of(reply.content, METRICS)
    if not metrics:
        raise ValueError(f"expected the record {METRICS!r}, got {listed(sorted(reply.content))}")
    numbers = {name: v for name, v in metrics.items() if isinstance(v, (int, float))}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("expected finite numbers in an evaluation, got NaN or Inf")
    return numbers
