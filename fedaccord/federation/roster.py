"""Who is here: which node is which client. What is wrong with a node concerns that node alone."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedaccord.core.options import listed
from fedaccord.federation.errors import FederationError, clean, last_line
from fedaccord.federation.partition_ids import PartitionIds
from fedaccord.wire.handshake import handshake, read_handshake

log = logging.getLogger("flwr")

ASK_AGAIN = 30.0  # seconds after which a question without an answer is asked again
GRACE = 5.0  # seconds to wait for others where all nodes that came first are refused
MOST_LINES = 10  # refused nodes that an error names
PAUSE = 0.1  # seconds between two looks while the clients come


class Asked(NamedTuple):
    message_ids: tuple[str, ...]  # of every question: an answer may take longer than ASK_AGAIN
    when: float  # of the last
    newcomer: bool  # a node that came after round 1 had begun


class Claim(NamedTuple):
    """What a node says of itself."""

    client: int | None  # None: the server is to number it
    num_clients: int


class Roster:
    """The nodes that answered the handshake, by client; it never waits but in `wait_for_all`.

    A node is asked when it comes, after ``ask_again`` seconds without an answer, and anew when
    it comes back after it was gone, under the same node id (a registered key) or another. A node
    whose answer does not fit is refused with one line; it may come back with a better one. The
    number of clients is what most nodes say before round 1, and stays. Nodes with data and no
    number get theirs by `PartitionIds`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        partition_ids: PartitionIds | None = None,
        ask_again: float = ASK_AGAIN,
    ) -> None:
        self.nodes: dict[int, int] = {}  # client -> node id, of the connected clients
        self.num_clients = 0  # C; 0 until a node has answered
        self.refused: dict[int, str] = {}  # node id -> why, of the nodes that are online
        self._claims: dict[int, Claim] = {}  # by node id, of the nodes that are online
        self._asked: dict[int, Asked] = {}  # by node id, while there is no answer
        self._partition_ids = partition_ids or PartitionIds()
        self._settled = False  # round 1 has begun: C stays
        self._tie = ""  # which numbers of clients as many nodes report; empty: no tie
        self._clock = clock
        self._ask_again = ask_again

    def update(self, grid: Grid) -> None:
        """Forget who left, hear who answered, ask who is new. Never waits for an answer."""
        online = set(grid.get_node_ids())
        self._forget(online)
        self._ask(grid, online)
        self._seat_all(newcomers=self._hear(grid))

    def wait_for_all(self, grid: Grid, seconds: float) -> None:
        """Wait until every client has said who it is.

        Raises FederationError, which names the missing clients and the refused nodes, after
        ``seconds``, and soon where all nodes that are here have been refused.
        """
        began = self._clock()
        while True:
            self.update(grid)
            if self.num_clients and len(self.nodes) == self.num_clients and not self._tie:
                break
            waited = self._clock() - began
            hopeless = self._claims.keys() <= self.refused.keys() and not self._asked
            if waited > GRACE and self.refused and not self.nodes and hopeless:
                raise FederationError(f"no client could start: {next(iter(self.refused.values()))}")
            if waited > seconds:
                raise FederationError(self._tie or self._missing(seconds))
            time.sleep(PAUSE)
        self._settled = True

    def _forget(self, online: set[int]) -> None:
        for i, node in list(self.nodes.items()):
            if node not in online:
                log.warning("client %d is offline", i)
                del self.nodes[i]
        for known in (self._claims, self._asked, self.refused):
            for node in [node for node in known if node not in online]:
                del known[node]

    def _ask(self, grid: Grid, online: set[int]) -> None:
        now = self._clock()
        again = {n for n, asked in self._asked.items() if now - asked.when >= self._ask_again}
        answered = self._claims.keys() | self.refused.keys()
        wanted = sorted((online - answered - self._asked.keys()) | again)
        if not wanted:
            return
        messages = [Message(handshake(), node, MessageType.TRAIN) for node in wanted]
        for node, message_id in zip(wanted, grid.push_messages(messages), strict=True):
            before = self._asked.get(node)
            newcomer = before.newcomer if before else self._settled
            message_ids = (*(before.message_ids if before else ()), message_id)
            self._asked[node] = Asked(message_ids, now, newcomer)

    def _hear(self, grid: Grid) -> set[int]:
        """Take the answers in; returns the newcomers among the nodes that answered."""
        if not self._asked:
            return set()
        asked = {i: node for node, asked in self._asked.items() for i in asked.message_ids}
        replies = {
            asked[reply.metadata.reply_to_message_id]: reply
            for reply in grid.pull_messages(list(asked))
            if reply.metadata.reply_to_message_id in asked
        }
        newcomers = {node for node in replies if self._asked.pop(node).newcomer}
        for node, reply in replies.items():
            self._meet(node, reply)
        return newcomers

    def _meet(self, node: int, reply: Message) -> None:
        if reply.has_error():
            if reply.metadata.src_node_id == node:  # the SuperLink reports a node that died
                self._refuse(node, last_line(reply.error.reason))
            return
        try:
            client, num_clients = read_handshake(reply)
            if num_clients is None and not self._partition_ids.num_clients:
                raise ValueError(
                    "expected partition-id and num-partitions in its --node-config, got neither, "
                    "and this server numbers no clients"
                )
            self._claims[node] = Claim(client, num_clients or self._partition_ids.num_clients)
        except ValueError as error:
            self._refuse(node, str(error))
        except Exception as error:  # Flower's own complaints about what a message claims to be
            self._refuse(node, f"expected an answer that can be read, got {type(error).__name__}")

    def _seat_all(self, newcomers: set[int]) -> None:
        """Give every claim its place: C by the majority until round 1, one node a client."""
        if not self._settled and self._claims:
            self._count_votes()
            if self._tie:
                return
        numbered = self._numbered()
        for node, (client, num_clients) in numbered:
            if num_clients != self.num_clients:  # it keeps its vote
                if self.nodes.get(client) == node:
                    del self.nodes[client]
                self._refuse(
                    node,
                    f"expected num-partitions={self.num_clients}, as most nodes say, got "
                    f"partition-id={client} num-partitions={num_clients}",
                )
        # by node id: of two that answer at once, the first must not depend on chance
        for node, (client, num_clients) in numbered:
            if num_clients != self.num_clients:
                continue
            holder = self.nodes.setdefault(client, node)
            if holder == node:
                self.refused.pop(node, None)
            elif node in newcomers:
                # a device that restarted: the node that it was stays online for a while
                log.warning("client %d came back as another node, which takes its place", client)
                self.nodes[client] = node
            else:
                self._refuse(
                    node,
                    "expected one SuperNode per partition-id, got two with "
                    f"partition-id={client} (nodes {holder} and {node}): give each its own in "
                    "--node-config",
                )

    def _count_votes(self) -> None:
        """C is what most nodes report; of a tie it stays what it was, and nobody is seated."""
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
        """(client, number of clients) of the nodes that have a number, by node id."""
        claims, given = sorted(self._claims.items()), self._partition_ids.of
        if not self._settled:  # later every number belongs to somebody, who may come back
            waiting = (n for n, claim in claims if claim.client is None and n not in given)
            taken = (claim.client for _, claim in claims if claim.client is not None)
            self._partition_ids.give(waiting, taken, self.num_clients)
        found = []
        full = len({*given.values(), *self.nodes}) >= self.num_clients
        for node, (client, num_clients) in claims:
            number = given.get(node) if client is None else client
            if number is not None:
                found.append((node, (number, num_clients)))
            elif full:
                self._refuse(
                    node,
                    f"expected {self.num_clients} clients, and every number is taken; a node is "
                    "known by its registered key: start it with the key that it had",
                )
        return found

    def _refuse(self, node: int, why: str) -> None:
        why = clean(why)
        if self.refused.get(node) != why:
            log.warning("node %d is left out: %s", node, why)
        self.refused[node] = why

    def _missing(self, seconds: float) -> str:
        missing = sorted(set(range(self.num_clients)) - set(self.nodes))
        lines = [f"node {node}: {why}" for node, why in sorted(self.refused.items())]
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        refused = "; ".join([*lines[:MOST_LINES], *more])
        given = self._partition_ids.of
        nameless = [n for n, c in self._claims.items() if c.client is None and n not in given]
        waiting = len([n for n in nameless if n not in self.refused])
        return (
            f"expected {self.num_clients or 'some'} clients within {seconds:g} s, got "
            f"{len(self.nodes)}; missing partition-ids: {listed(missing) if missing else 'all'}"
            + (f"; nodes without a number: {waiting}, fewer than are missing" if waiting else "")
            + (f"; left out: {refused}" if refused else "")
            + ". Start their SuperNodes or give them more time with wait-timeout"
        )
