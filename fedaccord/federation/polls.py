"""Requests to a grid: the interval of polls, the number of replies per poll, and failures."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from flwr.app import Message
from flwr.serverapp import Grid

from fedaccord.compat import flower, uploads
from fedaccord.federation.errors import FederationError

log = logging.getLogger("flwr")

PULL_INTERVAL = 0.01  # seconds between two polls of a simulation
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two polls of SuperNodes' replies
PAUSE_SHARE = 0.1  # of the time since the messages were sent: the largest delay
READ_AT_ONCE = 2**27  # bytes of replies that are fetched together
TOO_LARGE = (
    "the SuperLink, or a proxy before it, refused a message as too large (HTTP status 413): Flower "
    "sends parts of 5 MB; raise the proxy's limit, e.g. client_max_body_size of nginx"
)
T = TypeVar("T")
_END = object()


class Polls:
    """A grid whose SuperLink may fail for a while: requests are repeated until their timeout."""

    def __init__(self, grid: Grid, simulated: bool) -> None:
        self._grid, self._simulated = grid, simulated
        self.fails = False  # whether the last request failed

    def push(self, messages: Sequence[Message], timeout: float) -> Sequence[str | None]:
        """The ids of the messages, None for one that Flower did not send in ``timeout`` seconds.

        A SuperLink stores a message that is sent twice once: its id is a hash of its content.
        Raises FederationError if it is refused as too large, for which Flower returns no ids.
        """
        began = time.monotonic()
        while (ids := self.attempt(lambda: [*self._grid.push_messages(messages)])) is None:
            waited = time.monotonic() - began
            if waited >= timeout:
                return [None] * len(messages)
            time.sleep(min(self.pause(waited), timeout - waited))
        self.fails = False
        if len(ids) < len(messages):
            raise FederationError(TOO_LARGE)
        return [message_id or None for message_id in ids]  # "": the node has just left

    def pull(self, message_ids: Sequence[str]) -> Iterator[Message]:
        """The replies that have arrived completely; until the SuperLink fails."""
        replies = uploads.pull_messages(self._grid, message_ids)
        while reply := self.attempt(lambda: next(replies, _END)):
            self.fails = False
            if reply is _END:
                return
            yield cast(Message, reply)

    def connections(self) -> Mapping[int, str] | None:
        """As in `compat`; None: unknown, and in a simulation, whose nodes are always online."""
        return None if self._simulated else self.attempt(lambda: flower.connections(self._grid))

    def due(
        self,
        awaited: Mapping[str, int],
        first: Mapping[int, str] | None,
        now: Mapping[int, str] | None,
    ) -> tuple[Sequence[str], bool]:
        """The messages to poll for now, and whether this is the last time.

        A SuperLink gives up a message that is polled while its node is offline. Polled later, it
        has the reply of the node that was away. This reply counts as long as a node that stayed
        online is awaited, but no longer: the node may also have restarted without the message.

        awaited: message -> node; first, now: the connections when the messages were sent, and now.
        """
        if first is None:
            return [*awaited], False
        if now is None:
            return [], False
        if any(node in now and now[node] == first.get(node) for node in awaited.values()):
            return [i for i, node in awaited.items() if node in now], False
        return [*awaited], True

    def attempt(self, request: Callable[[], T]) -> T | None:
        """The result; None if the SuperLink fails, which is logged once until it recovers."""
        try:
            return request()
        except Exception as error:
            if not flower.is_transient(error):
                raise
            if not self.fails:
                why = str(error).partition("\n")[0]
                log.warning("the SuperLink fails; asking it again until the timeout: %s", why)
            self.fails = True
            return None

    def pause(self, waited: float) -> float:
        """Seconds until the next poll; waited: seconds since the messages were sent."""
        if self._simulated:
            return PULL_INTERVAL
        return min(max(SHORTEST_PAUSE, PAUSE_SHARE * waited), LONGEST_PAUSE)


def parts(message_ids: Sequence[str], size: int) -> list[Sequence[str]]:
    """Groups of ids whose replies, of ``size`` bytes each, are fetched together."""
    at_once = max(1, READ_AT_ONCE // size if size else len(message_ids))
    return [message_ids[k : k + at_once] for k in range(0, len(message_ids), at_once)]
