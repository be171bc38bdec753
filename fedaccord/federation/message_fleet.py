"""The clients behind a Flower grid: requests as messages, replies as values."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from flwr.app import DEFAULT_TTL, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedaccord.compat import flower
from fedaccord.core.request import (
    DEFAULT,
    EvaluateRequest,
    ModelLayout,
    ModelSettings,
    TrainInstruction,
    TrainRequest,
)
from fedaccord.federation import ray_cluster
from fedaccord.federation.errors import FederationError
from fedaccord.federation.fleet import (
    DEVICES,
    LATE,
    SIMULATED,
    Reading,
    SecureChannel,
    TrainReplies,
)
from fedaccord.federation.partition_ids import PartitionIds
from fedaccord.federation.polls import Polls, parts
from fedaccord.federation.reply_messages import (
    is_sender,
    read_content,
    read_metrics,
    read_training,
    readings,
)
from fedaccord.federation.roster import ASK_AGAIN, Roster
from fedaccord.secure.client import Payload
from fedaccord.wire.handshake import handshake
from fedaccord.wire.instruction import check_own_config, with_config
from fedaccord.wire.messages import write_evaluate_requests, write_requests
from fedaccord.wire.records import CONFIG, SECURE, config_of

log = logging.getLogger("flwr")

TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE
UNREAD_SECONDS = 30.0  # that a message outlives its timeout
REPLACED = "another node replaced its node"
RECONNECTED = "its node reconnected without the reply"
MORE = '"num-supernodes=20 client-resources-num-cpus=1"'
T = TypeVar("T")


class _SentRequest(NamedTuple):
    """A training request that a node has not answered."""

    message: Message
    message_id: str | None  # None: Flower could not send the message
    instruction: TrainInstruction
    since: str  # when its node connected, as in `Roster.online`
    deadline: float  # by `time.monotonic`
    size: int  # approximate bytes of its reply

    @property
    def node(self) -> int:
        return self.message.metadata.dst_node_id


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
        evaluate_config: Mapping[str, Any] | None = None,
    ) -> None:
        """config, evaluate_config: a caller's own, of messages; config_key: their record's name;
        card: of the server's own data, as `Task.card`."""
        check_own_config([*(config or {}), *(evaluate_config or {})], config_key)
        self.place = SIMULATED if flower.is_simulation(grid) else DEVICES
        self.grid, self._polls = grid, Polls(grid, self._is_simulated)
        self._configs = {TRAIN: config or {}, EVALUATE: evaluate_config or {}}
        self._config_key = config_key
        # a simulation loses no messages, and handles two of a client at once: see `_still_late`
        ask_again = math.inf if self._is_simulated else ASK_AGAIN
        self.roster = Roster(partition_ids=partition_ids, ask_again=ask_again, card=card)
        self._late: dict[str, int] = {}  # message -> node, of replies that no round awaits
        self._at_work: dict[int, _SentRequest] = {}  # by client
        self._ended: dict[int, Reading] = {}  # ended requests, not yet received, in order

    @property
    def num_clients(self) -> int:
        return self.roster.num_clients

    @property
    def _is_simulated(self) -> bool:
        return self.place == SIMULATED

    def connect(
        self,
        seconds: float,
        settings: ModelSettings = DEFAULT,
        model: ModelLayout | None = None,
        least: int = 0,
    ) -> None:
        earlier, self.roster.layout = self.roster.layout, model or self.roster.layout
        if model and earlier and (difference := earlier.difference(model)):
            raise FederationError(
                f"the server's model is not the clients': {difference}: build the same model on "
                "server and clients"
            )
        self.roster.handshake = self._with_config(handshake(settings), 0)
        if self._is_simulated and (problem := ray_cluster.unreachable()):  # Ray prints nothing
            log.warning("Ray: %s, and start the run again", problem)
        self.roster.wait_for_all(self.grid, seconds, self._polls.attempt, least)
        if self._is_simulated and self.num_clients == flower.DEFAULT_SUPERNODES:
            log.info("for more simulated clients: flwr run . --federation-config %s", MORE)

    def card(self, seconds: float, settings: ModelSettings, least: int = 0) -> Mapping[str, Any]:
        """As `Fleet.card`, from the first node's report."""
        self.connect(seconds, settings, least=least)
        if self.roster.card is None:
            raise FederationError(
                "evaluation=clients: expected clients that report the shape of a sample and the "
                "number of classes, got none: run the app of this version of FedAccord on them"
            )
        return self.roster.card

    def available(self) -> Sequence[int]:
        self._polls.attempt(lambda: self.roster.update(self.grid))
        return sorted(self.roster.nodes)

    def wait_for(
        self, least: int, at_work: Collection[int], seconds: float
    ) -> tuple[Sequence[int], str]:
        why = self.roster.wait_for(self.grid, seconds, self._polls.attempt, least, at_work)
        return sorted(self.roster.nodes), why

    def train(
        self,
        requests: Sequence[TrainRequest],
        timeout: float,
        payloads: Mapping[int, Payload] | None = None,
    ) -> TrainReplies:
        """payloads: of the stage of a secure sum, for each client's message."""
        end = time.monotonic() + timeout
        clients = [request.instruction.client for request in requests]
        late = self._still_late(clients, end)
        requests = [r for r in requests if r.instruction.client not in late]
        messages = self._training(requests, timeout)
        for i, payload in (payloads or {}).items():
            if i in messages:
                messages[i].content[SECURE] = ConfigRecord(dict(payload))
        size = max((request.nbytes for request in requests), default=0)
        replies = self._send(messages, max(0.0, end - time.monotonic()), size)
        instructions = {request.instruction.client: request.instruction for request in requests}
        return readings(clients, replies, instructions)

    def send(self, requests: Sequence[TrainRequest], timeout: float) -> None:
        messages = self._training(requests, timeout)
        message_ids = self._polls.push([*messages.values()], timeout)
        deadline = time.monotonic() + timeout
        for request, message_id in zip(requests, message_ids, strict=True):
            instruction = request.instruction
            message = messages[instruction.client]
            since = self.roster.online[message.metadata.dst_node_id]
            sent = _SentRequest(message, message_id, instruction, since, deadline, request.nbytes)
            if instruction.client in self._at_work:  # all visits ended, as by a reset
                self._give_up(instruction.client)
            self._at_work[instruction.client] = sent
            self._ended.pop(instruction.client, None)

    def receive(self, clients: Collection[int], wanted: int) -> dict[int, Reading]:
        for i in self._at_work.keys() - {*clients}:
            self._give_up(i)
        for i in self._ended.keys() - {*clients}:
            del self._ended[i]
        began = time.monotonic()
        while True:
            self._look(wanted)
            received, replies = list[int](), 0
            for i, reading in self._ended.items():
                if replies == wanted:
                    break
                received.append(i)
                replies += not isinstance(reading, str)
            if replies == wanted or not self._at_work:
                return {i: self._ended.pop(i) for i in received}
            time.sleep(self._polls.pause(time.monotonic() - began))

    def _look(self, wanted: int) -> None:
        """Record the requests that have ended since the last poll, the oldest first.

        Large replies beyond the ``wanted`` ones stay in the SuperLink's store.
        """
        self.available()
        clients = self._due()
        size = max((it.size for it in self._at_work.values()), default=0)
        now = time.monotonic()  # replies that arrived until now are read before a request is late
        for part in parts([*clients, *self._late], size):
            if sum(not isinstance(reading, str) for reading in self._ended.values()) >= wanted:
                return
            for reply in self._polls.pull(part):
                self._late.pop(reply.metadata.reply_to_message_id, None)
                i = clients.get(reply.metadata.reply_to_message_id)
                sent = None if i is None else self._at_work.get(i)
                if i is None or sent is None or not is_sender(reply, sent.message):
                    log.info("ignored a reply of no active client, or its second one")
                    continue
                del self._at_work[i]
                self._ended[i] = read_training(reply, sent.instruction)
        for i, sent in [*self._at_work.items()]:
            if why := self._why_lost(i, sent, now):
                self._give_up(i)
                self._ended[i] = why

    def _give_up(self, client: int) -> None:
        sent = self._at_work.pop(client)
        if sent.message_id:
            self._late[sent.message_id] = sent.node

    def _discard_late(self) -> None:
        """Read late replies, each of which a SuperLink keeps until it is read; after a message's
        lifetime it replies with an error."""
        if self._late:
            for reply in self._polls.pull([*self._late]):
                self._late.pop(reply.metadata.reply_to_message_id, None)

    def _due(self) -> dict[str, int]:
        """The messages to poll for now, and their clients.

        As in `Polls.due`, an offline node is not polled if an online client is at work and no idle
        client could replace the offline one.
        """
        clients = {it.message_id: i for i, it in self._at_work.items() if it.message_id}
        online = {m: i for m, i in clients.items() if self._at_work[i].node in self.roster.online}
        idle = self.roster.nodes.keys() - self._at_work.keys() - self._ended.keys()
        return online if online and not idle else clients

    def _why_lost(self, client: int, sent: _SentRequest, now: float) -> str:
        """Why a reply is no longer awaited; empty: it is awaited. A node replies in order: if it
        reconnected and then answered the handshake, it has lost the earlier request."""
        node = self.roster.nodes.get(client)
        if node not in (None, sent.node):
            return REPLACED
        is_new = node is not None and self.roster.online[node] != sent.since
        if is_new and not self._polls.fails:  # otherwise its reply may be unread
            return RECONNECTED
        return LATE if sent.message_id is None or now >= sent.deadline else ""

    def _training(self, requests: Sequence[TrainRequest], timeout: float) -> dict[int, Message]:
        """The message of each request, by client."""
        instructions = [request.instruction for request in requests]
        return {
            r.client: self._message(
                r.client, self._with_config(content, r.round + 1), TRAIN, timeout
            )
            for r, content in zip(instructions, write_requests(requests), strict=True)
        }

    def evaluate(
        self, requests: Sequence[EvaluateRequest], timeout: float
    ) -> list[Mapping[str, float] | str]:
        messages = {}
        for request, content in zip(requests, write_evaluate_requests(requests), strict=True):
            i = request.instruction.client
            content = self._with_config(content, request.instruction.round, EVALUATE)
            messages[i] = self._message(i, content, EVALUATE, timeout)
        return [*self._ask(messages, timeout, read_metrics).values()]

    def secure_channel(self) -> SecureChannel:
        return self

    def stage(self, payloads: Mapping[int, Payload], timeout: float) -> dict[int, Payload | str]:
        """As `SecureChannel.stage`."""
        contents = {i: RecordDict({SECURE: ConfigRecord(dict(p))}) for i, p in payloads.items()}
        messages = {i: self._message(i, c, TRAIN, timeout) for i, c in contents.items()}
        return self._ask(messages, timeout, lambda reply: dict(config_of(reply.content, SECURE)))

    def ask(
        self,
        clients: Sequence[int],
        content: RecordDict,
        timeout: float,
        read: Callable[[Message], T],
    ) -> dict[int, T | str]:
        """Each client's evaluation of ``content``, read by ``read``, or the reason for none."""
        messages = {i: self._message(i, content, EVALUATE, timeout) for i in clients}
        return self._ask(messages, timeout, read)

    def _ask(
        self, messages: Mapping[int, Message], timeout: float, read: Callable[[Message], T]
    ) -> dict[int, T | str]:
        replies = dict(self._send(messages, timeout))
        return {i: read_content(replies[i], read) if i in replies else LATE for i in messages}

    def _with_config(self, content: RecordDict, number: int, kind: str = TRAIN) -> RecordDict:
        return with_config(content, self._configs[kind], self._config_key, number)

    def _message(self, client: int, content: RecordDict, kind: str, timeout: float) -> Message:
        # a SuperNode would process old messages one after another, although it is too late; a
        # simulation handles each at once, and `_still_late` awaits the reply
        life = max(timeout, DEFAULT_TTL) if self._is_simulated else timeout + UNREAD_SECONDS
        return Message(content, self.roster.nodes[client], kind, ttl=life)

    def _send(
        self, messages: Mapping[int, Message], timeout: float, size: int = 0
    ) -> Iterator[tuple[int, Message]]:
        """The first reply of each client to its message, in order of arrival.

        size: bytes of a reply.
        """
        message_ids = self._polls.push([*messages.values()], timeout)
        nodes = [message.metadata.dst_node_id for message in messages.values()]
        sent = {i: node for i, node in zip(message_ids, nodes, strict=True) if i}
        return self._first_replies(messages, self._receive(sent, timeout, size))

    def _receive(self, sent: Mapping[str, int], timeout: float, size: int = 0) -> Iterator[Message]:
        """Poll for the replies until all have arrived or ``timeout`` seconds are over; record the
        late ones.

        `Grid.send_and_receive` of a deployment sleeps three seconds between two polls.
        sent: the node of each message.
        """
        waiting, began, is_over = dict(sent), time.monotonic(), False
        first = now = self._polls.connections()
        while waiting:
            due, is_last = ([*waiting], True) if is_over else self._polls.due(waiting, first, now)
            for part in parts(due, size):
                for reply in self._polls.pull(part):
                    waiting.pop(reply.metadata.reply_to_message_id, None)
                    yield reply
            if not waiting or is_over or (is_last and not self._polls.fails):
                break
            self._discard_late()
            waited = time.monotonic() - began
            time.sleep(max(0.0, min(self._polls.pause(waited), timeout - waited)))
            now, is_over = self._polls.connections(), time.monotonic() - began >= timeout
        self._late |= waiting

    def _first_replies(
        self, messages: Mapping[int, Message], replies: Iterable[Message]
    ) -> Iterator[tuple[int, Message]]:
        clients = {message.metadata.message_id: i for i, message in messages.items()}
        answered = set[str]()
        for reply in replies:
            name = reply.metadata.reply_to_message_id
            i = clients.get(name)
            if i is None:
                log.info("ignored a reply to no message of this round")
            elif not is_sender(reply, messages[i]):
                log.info("ignored a reply for client %d that another node sent", i)
            elif name in answered:
                log.info("ignored a second reply of client %d", i)
            else:
                answered.add(name)
                yield i, reply

    def _still_late(self, clients: Sequence[int], end: float) -> set[int]:
        """The clients of a simulation that are busy with an earlier message; if all are, it waits
        for one of them.

        A SuperNode handles one message after another. A simulation would handle both at once, and
        the later one would overwrite the state with that of its start.
        """
        while self._late and self._is_simulated:
            self._discard_late()
            nodes = {*self._late.values()}
            late = {i for i in clients if self.roster.nodes[i] in nodes}
            if len(late) < max(1, len(clients)) or time.monotonic() > end:
                return late
            time.sleep(self._polls.pause(0.0))
        return set()

    def client_states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        return {}

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        pass
