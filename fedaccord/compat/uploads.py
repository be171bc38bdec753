"""Replies that a device is still sending: the server does not wait for them.

A SuperLink announces a reply once, when its upload begins, and `Grid.pull_messages` then waits for
its parts, up to two hours, and with it for all other replies of the call. The parts stay at the
SuperLink until the reply is confirmed.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

log = logging.getLogger("flwr")


def pull_messages(grid: Grid, message_ids: Iterable[str]) -> Iterator[Message]:
    """`Grid.pull_messages` without replies that lack parts: a later call returns these.

    Replies are read one by one: Flower deletes each one that was read, and drops those of a failed
    call. If no part arrives for three minutes, the SuperLink gives up the reply, which is then an
    error. So is, at a later call, one whose parts Flower cannot decode.
    """
    client = _client_of(grid)
    if client is None:
        yield from grid.pull_messages(message_ids)
        return
    for message_id in client.complete(message_ids):
        try:
            with _one_try():
                replies = [*grid.pull_messages([message_id])]
        except httpx.HTTPError:
            raise
        except Exception as error:  # of the bytes that a node sent; the SuperLink has deleted them
            kind = type(error).__name__
            log.warning("a reply cannot be read (%s): is the same Flower installed there?", kind)
            continue
        yield from (reply for reply in replies if client.is_complete(reply))


class _Client:
    """An `HttpGrid`'s client of its SuperLink, which announces a reply when its last part is there,
    and again until it has been read."""

    def __init__(self, client: Any, grid: Any) -> None:
        self._client, self._grid = client, grid
        self._begun: dict[str, tuple[Any, Any]] = {}  # by the id of the message that they answer
        self._read = ""  # the id whose complete reply is read now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def complete(self, message_ids: Iterable[str]) -> Iterator[str]:
        """The ids of the messages whose replies have arrived; `PullMessages` has the last one's."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        ids = [*message_ids]
        if new := [i for i in ids if i not in self._begun]:
            response = self._client.PullMessages(PullAppMessagesRequest(message_ids=new))
            for message, tree in zip(
                response.messages_list, response.message_object_trees, strict=True
            ):
                self._begun[message.metadata.reply_to_message_id] = message, tree
        for i in ids:
            if i in self._begun and self._has_last_part(self._begun[i][1]):
                self._read = i
                yield i

    def PullMessages(self, request: Any) -> Any:
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse

        if [*request.message_ids] != [self._read]:  # another caller's
            return self._client.PullMessages(request)
        message, tree = self._begun[self._read]
        return PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree])

    def _has_last_part(self, tree: Any) -> bool:
        """Whether the message itself, which a SuperNode sends after its parts, has arrived or, as
        Flower reports, will never arrive."""
        from flwr.proto.message_pb2 import PullObjectRequest

        grid = self._grid
        request = PullObjectRequest(
            node=grid.node, run_id=grid.run.run_id, object_id=tree.object_id
        )
        response = self._client.PullObject(request)
        return bool(response.object_available or not response.object_found)

    def is_complete(self, reply: Message) -> bool:
        """Whether all parts of a reply were there: a SuperNode sends two of them at a time."""
        waits = reply.has_error() and _WAITED in (reply.error.reason or "")
        if not waits:
            self._begun.pop(reply.metadata.reply_to_message_id, None)
        return not waits


_WAITED = "timeout or retry limit reached"  # in the error of a part that did not arrive in time


def _client_of(grid: Any) -> _Client | None:
    """The grid's client, replaced by ours; None: it has none, as in a simulation."""
    client = getattr(grid, "_runtime_client", None)
    if client is not None and not isinstance(client, _Client):
        client = grid._client = _Client(client, grid)
    return client


@contextmanager
def _one_try() -> Iterator[None]:
    """A block that does not wait for missing parts of a message."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    defaults = cast(dict[str, Any], pull_objects.__kwdefaults__)
    usual, defaults["max_tries_per_object"] = defaults["max_tries_per_object"], 1
    try:
        yield
    finally:
        defaults["max_tries_per_object"] = usual
