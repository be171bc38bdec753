"""The connected nodes and their clients. A node that does not match is left out of the run."""

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedaccord.compat import flower, uploads
from fedaccord.core.options import listed
from fedaccord.core.request import ModelLayout
from fedaccord.federation.errors import FederationError, clean, last_line
from fedaccord.federation.partition_ids import PartitionIds
from fedaccord.wire.handshake import class_names, handshake, read_handshake

log = logging.getLogger("flwr")

Ask = Callable[[Callable[[], None]], object]

ASK_AGAIN = 30.0  # seconds after which a handshake without a reply is repeated, then 60, 120, ...
GRACE = 5.0  # seconds to wait for more nodes if all connected ones are refused
MOST_LINES = 10  # refused nodes that an error names
NOTICE = 60.0  # seconds between two log lines about missing clients
PAUSE = 0.1  # seconds between two updates while it waits for clients
FREE_MACHINE = "Free memory (Ray starts clients below 95% in use) and processors of other load"
KEY_ERROR = re.compile(r"(KeyError: )?'[^']*'")  # as reported


class PendingHandshake(NamedTuple):
    """The handshake with a node that has not replied."""

    message_ids: tuple[str, ...]  # of every repetition: a reply may need longer than ASK_AGAIN
    when: float  # of the last
    newcomer: bool  # a node that connected after round 1 had begun


class Claim(NamedTuple):
    """The client id that a node reports."""

    client: int | None  # None: the server assigns it
    num_clients: int


class Roster:
    """The nodes that replied to the handshake, by client; only the `wait_for` methods wait.

    A node receives a handshake when it connects, again after ``ask_again`` seconds without a reply,
    then after twice as many and so on (infinite in a simulation, which loses none), and when it
    reconnects, however soon, with the same node id (a registered key) or another. A node whose
    reply does not match is refused with one line; it may reconnect with another. The number of
    clients is that of most nodes before round 1, and then fixed. Nodes with data and no
    partition-id get one from `PartitionIds`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        partition_ids: PartitionIds | None = None,
        ask_again: float = ASK_AGAIN,
        card: Mapping[str, Any] | None = None,
    ) -> None:
        self.handshake = handshake()  # the handshake's content
        self.layout: ModelLayout | None = None  # of every node's model; None: the first node's
        self.card = card  # how the model is built; None: from the first node that reports it
        self.nodes: dict[int, int] = {}  # client -> node id, of the connected clients
        self.online: dict[int, str] = {}  # node id -> since when, also of nodes without a client
        self.num_clients = 0  # C; 0 until a node has replied
        self.refused: dict[int, str] = {}  # node id -> why, of the nodes that are online
        self._claims: dict[int, Claim] = {}  # by node id, of the nodes that are online
        self._last: dict[int, int] = {}  # client -> its last node, perhaps offline
        self._duplicates: set[int] = set()  # nodes that were refused beside that of their client
        self._pending: dict[int, PendingHandshake] = {}  # by node id
        self._newcomers: set[int] = set()  # that replied, not yet returned
        self._partition_ids = partition_ids or PartitionIds()
        self._has_begun = False  # round 1: C stays
        self._first_wait: float | None = None  # when it began
        self._tie = ""  # the tied numbers of clients; empty: no tie
        self._clock = clock
        self._ask_again = ask_again

    def update(self, grid: Grid) -> None:
        """Remove nodes that left, read replies, send handshakes; does not wait for replies."""
        before, self.online = self.online, flower.connections(grid)
        self._forget({n for n, since in self.online.items() if before.get(n, since) == since})
        self._ask(grid, {*self.online})
        self._seat_all(newcomers=self._read_replies(grid))

    def wait_for_all(
        self,
        grid: Grid,
        seconds: float,
        ask: Ask = lambda update: update(),
        least: int = 0,
    ) -> None:
        """Wait until every client has replied to the handshake; ask: calls an `update`.

        Raises FederationError, which names the missing clients and the refused nodes, ``seconds``
        after the first call, and soon if all connected nodes have been refused. least: clients with
        which a run resumes then; 0: all.
        """
        if self._first_wait is None:
            self._first_wait = self._clock()
        if why := self.wait_for(grid, seconds, ask, since=self._first_wait):
            if self._tie or not 0 < least <= len(self.nodes):
                raise FederationError(why)
            if not self._has_begun:
                log.warning("the run resumes without some of its clients: %s", why)
        self._has_begun = True

    def wait_for(
        self,
        grid: Grid,
        seconds: float,
        ask: Ask,
        least: int = 0,
        at_work: Collection[int] = (),
        since: float | None = None,
    ) -> str:
        """Wait until ``least`` clients are connected or ``at_work``; 0: all clients, whose number C
        is unknown before round 1.

        Returns why they are not after ``seconds``, in one line; empty: they are. ask: calls an
        `update`. since: the start of the seconds; None: now.
        """
        began = self._clock() if since is None else since
        notice = began + NOTICE / 4
        while True:
            ask(lambda: self.update(grid))
            ready = len({*self.nodes, *at_work}) >= (least or self.num_clients)
            if ready and self.num_clients and not self._tie:
                return ""
            waited = self._clock() - began
            hopeless = self._claims.keys() <= self.refused.keys() and not self._pending
            if waited > GRACE and self.refused and not self.nodes and hopeless and not least:
                return f"no client could start: {next(iter(self.refused.values()))}"
            if waited > seconds:
                return self._tie or self._missing(seconds, least)
            if self._clock() > notice:
                log.info("waiting for clients: %s", self._tie or self._missing(seconds, least))
                notice += NOTICE
            time.sleep(PAUSE)

    def _forget(self, connected: set[int]) -> None:
        """connected: the nodes that have been online since the last update, and new ones."""
        for i, node in list(self.nodes.items()):
            if node not in connected:
                what = "reconnected" if node in self.online else "is offline"
                log.warning("client %d %s", i, what)
                del self.nodes[i]
        for table in (self._claims, self._pending, self.refused):
            for node in table.keys() - connected:
                del table[node]

    def _ask(self, grid: Grid, online: set[int]) -> None:
        now = self._clock()
        again = {
            node
            for node, it in self._pending.items()
            # each handshake starts a process on a slow device: limit them
            if now - it.when >= self._ask_again * 2 ** (len(it.message_ids) - 1)
        }
        new = online - self._claims.keys() - self.refused.keys() - self._pending.keys()
        nodes = sorted(new | again)
        if not nodes:
            return
        messages = [Message(self.handshake, node, MessageType.TRAIN) for node in nodes]
        for node, message_id in zip(nodes, grid.push_messages(messages), strict=True):
            last = self._pending.get(node, PendingHandshake((), now, self._has_begun))
            message_ids = (*last.message_ids, message_id)
            self._pending[node] = PendingHandshake(message_ids, now, last.newcomer)

    def _read_replies(self, grid: Grid) -> set[int]:
        """The newcomers among the nodes that replied."""
        node_of = {i: node for node, it in self._pending.items() for i in it.message_ids}
        # it may raise after some replies
        for reply in uploads.pull_messages(grid, list(node_of)) if node_of else ():
            node = node_of.get(reply.metadata.reply_to_message_id)
            if node in self._pending:
                if self._pending.pop(node).newcomer:
                    self._newcomers.add(node)
                self._read(node, reply)
        newcomers, self._newcomers = self._newcomers, set()
        return newcomers

    def _read(self, node: int, reply: Message) -> None:
        if reply.has_error():
            reason = reply.error.reason or ""
            if flower.has_no_parts(reason):
                self._refuse(node, "expected an answer that can be read, got one without its parts")
            elif reply.metadata.src_node_id == node:  # the SuperLink reports a node that died
                self._refuse(node, _why(last_line(reason)))
            return
        try:
            client, num_clients, layout, card = read_handshake(reply)
            if num_clients is None and not self._partition_ids.num_clients:
                raise ValueError(
                    "expected partition-id and num-partitions in its --node-config, got neither, "
                    "and this server assigns no ids"
                )
            self._check_classes(card)
            self._check_model(layout, card)
            self.card = self.card or card
            self._claims[node] = Claim(client, num_clients or self._partition_ids.num_clients)
        except ValueError as error:
            self._refuse(node, str(error))
        except Exception as error:  # Flower's errors for inconsistent messages
            self._refuse(node, f"expected an answer that can be read, got {type(error).__name__}")

    def _check_classes(self, card: Mapping[str, Any] | None) -> None:
        """Raise ValueError if a node's classes have another order than the run's."""
        if not (card and self.card):
            return
        names, theirs = ([*each["class-names"]] for each in (self.card, card))
        if bool(names) != bool(theirs):
            words = "classes", "numbers to predict"
            wanted, got = words if names else words[::-1]
            raise ValueError(
                f"expected targets that are {wanted}, got {got}: labels of classes are integers, "
                "numbers to predict are floats, at every site"
            )
        if names != theirs and ((any(names) and any(theirs)) or len(names) != len(theirs)):
            wanted, got = listed(class_names(self.card)), listed(class_names(card))
            raise ValueError(
                f"expected the classes {wanted} in this order, got {got}: name all of them at "
                "every site, by labels= of the run or as the data set allows"
            )

    def _check_model(self, layout: ModelLayout | None, card: Mapping[str, Any] | None) -> None:
        """Raise ValueError, which names the first tensor, if a node's model is not the run's."""
        if layout is None:
            return
        if self.layout and (difference := self.layout.difference(layout)):
            cards = (self.card, card) if self.card and card else ()
            shapes = [tuple(each["arguments"]["shape"]) for each in cards]
            if len({*shapes}) > 1:
                raise ValueError(
                    f"expected samples of shape {shapes[0]}, got {shapes[1]}, for another model "
                    f"({difference}): prepare the data of all sites alike"
                )
            raise ValueError(
                f"{difference}: build the same model on server and clients, with frozen tensors "
                "from the same file or seed, and initial_arrays without frozen or tied tensors "
                "and buffers that are not averaged"
            )
        self.layout = layout  # with the digests, which the server may lack

    def _seat_all(self, newcomers: set[int]) -> None:
        """Assign nodes to clients: C by the majority until round 1, one node for each client."""
        if not self._has_begun and self._claims:
            self._count_votes()
            if self._tie:
                return
        numbered = self._numbered()
        for node, (client, num_clients) in numbered:
            if num_clients != self.num_clients:  # its vote still counts
                if self.nodes.get(client) == node:
                    del self.nodes[client]
                self._refuse(
                    node,
                    f"expected num-partitions={self.num_clients}, as most nodes report, got "
                    f"partition-id={client} num-partitions={num_clients}",
                )
        # by node id: deterministic if two reply at once
        for node, (client, num_clients) in numbered:
            if num_clients != self.num_clients:
                continue
            holder = self.nodes.get(client)
            is_duplicate = node in self._duplicates  # also after it reconnected
            if holder is None and is_duplicate and self._last.get(client) in self._pending:
                holder = self._last[client]  # which has reconnected, too
            if holder is None or holder == node:
                self._seat(client, node)
            elif node in newcomers and not is_duplicate:
                # a restarted device: its old node stays online for a while
                text = "client %d reconnected as a new node, which replaces the old one"
                log.warning(text, client)
                self._seat(client, node)
            else:
                self._duplicates.add(node)
                self._refuse(
                    node,
                    "expected one SuperNode per partition-id, got two with "
                    f"partition-id={client} (nodes {holder} and {node}): give each its own in "
                    "--node-config",
                )

    def _seat(self, client: int, node: int) -> None:
        self.nodes[client] = self._last[client] = node
        self.refused.pop(node, None)
        self._duplicates.discard(node)

    def _count_votes(self) -> None:
        """C by the majority of nodes; in a tie it does not change, and no node is assigned."""
        votes = Counter(claim.num_clients for claim in self._claims.values())
        (first, most), *others = votes.most_common()
        tied = [first, *(c for c, number in others if number == most)]
        tie = ""
        if len(tied) == 1:
            self.num_clients = first
        else:
            nodes = {c: [n for n, x in self._claims.items() if x.num_clients == c] for c in tied}
            words = [
                f"{c} from nodes {listed(sorted(nodes[c]))}" for c in sorted(tied)[:MOST_LINES]
            ]
            tie = (
                f"expected one num-partitions from most nodes, got {' and '.join(words)}: "
                "give all SuperNodes the same in --node-config"
            )
            if tie != self._tie:
                log.warning("%s", tie)
        self._tie = tie

    def _numbered(self) -> list[tuple[int, tuple[int, int]]]:
        """(client, number of clients) of the nodes that have a partition-id, by node id."""
        claims, assigned = sorted(self._claims.items()), self._partition_ids.client_of
        if not self._has_begun:  # later each id belongs to a node, which may reconnect
            waiting = (n for n, claim in claims if claim.client is None and n not in assigned)
            taken = (claim.client for _, claim in claims if claim.client is not None)
            self._partition_ids.assign(waiting, taken, self.num_clients)
        numbered = []
        full = len({*assigned.values(), *self.nodes}) >= self.num_clients
        for node, (client, num_clients) in claims:
            number = assigned.get(node) if client is None else client
            if number is not None:
                numbered.append((node, (number, num_clients)))
            elif full:
                self._refuse(
                    node,
                    f"expected {self.num_clients} clients, and every id is assigned; a node is "
                    "identified by its registered key: start it with its earlier key; without a "
                    "key it is a new node at each start: give it partition-id and num-partitions",
                )
        return numbered

    def _refuse(self, node: int, why: str) -> None:
        why = clean(why)
        if self.refused.get(node) != why:
            log.warning("node %d is left out: %s", node, why)
        self.refused[node] = why

    def _missing(self, seconds: float, least: int = 0) -> str:
        missing = sorted(set(range(self.num_clients)) - set(self.nodes))
        lines = [f"node {node}: {why}" for node, why in sorted(self.refused.items())]
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        refused = "; ".join([*lines[:MOST_LINES], *more])
        served = self._partition_ids.client_of.keys() | self.refused.keys()
        claims = self._claims.items()
        is_simulation = math.isinf(self._ask_again)
        start = FREE_MACHINE if is_simulation else "Start their SuperNodes"
        waiting = sum(claim.client is None and node not in served for node, claim in claims)
        wanted = f"{self.num_clients or 'some'} clients"
        if least:
            wanted = f"at least {least} of {wanted} to be connected"
        return (
            f"expected {wanted} within {seconds:g} s, got "
            f"{len(self.nodes)}; missing partition-ids: {listed(missing) if missing else 'all'}"
            + (
                f"; nodes without a partition-id: {waiting}, fewer than are missing: if no others "
                f"will connect, start the run with num-clients={len(self.nodes) + waiting}"
                if waiting
                else ""
            )
            + (f"; left out: {refused}" if refused else "")
            + f". {start} or give them more time with wait-timeout"
        )


def _why(line: str) -> str:
    """Advice for the handshake error of an app that is written for Flower's strategies."""
    if not KEY_ERROR.fullmatch(line):
        return line
    return (
        f"its ClientApp looked for {line.removeprefix('KeyError: ')}; if in the handshake, the "
        "first message, which has no model: return fedaccord.train_locally(message, context, "
        "model=..., batches=...) from @app.train(): it answers the handshake, and trains later"
    )
