"""Uses of undocumented parts of a SuperNode of Flower 1.41 and 1.42."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from fedaccord.compat.flower import is_transient

log = logging.getLogger("flwr")

# seconds between two polls of a SuperNode's SuperExec for a message to handle; Flower's default: 1
TASK_POLL_VARIABLE, TASK_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.2"
# bytes of a part of a message; Flower's: 5 MiB. A part is sent again from its start if the
# connection is lost or the response takes 30 s; a SuperLink gives a reply up after 180 s without a
# part, and a node learns only after a part that its run has ended
PART_VARIABLE, PART = "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 2**20
_IDLE, _SHORTEST, _SHARE = 3.0, 0.1, 0.2  # Flower's pause between two polls of an idle SuperNode


def node_commands() -> dict[str, Callable[[], object]]:
    """The commands that a SuperNode starts by their names: its SuperExec, and a ClientApp for each
    message. Importing them, with what they import later, takes a second."""
    import flwr.supernode.main  # noqa: F401  which a SuperNode imports later
    from flwr.supercore.cli import flower_superexec
    from flwr.supernode.cli import flwr_clientapp

    def client_app() -> None:
        with suppress(OSError):  # if memory runs out, Linux ends it before the SuperNode
            Path("/proc/self/oom_score_adj").write_text("500", encoding="utf-8")
        flwr_clientapp()

    return {"flower-superexec": flower_superexec, "flwr-clientapp": client_app}


def send_small_parts() -> None:
    """Let this process and those that it starts send parts of `PART` bytes, unless the environment
    sets another size."""
    from flwr.app.message import array

    if PART_VARIABLE not in os.environ:  # Flower has read it
        os.environ[PART_VARIABLE] = str(PART)
        cast(Any, array).FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE = PART


def run_supernode(words: Sequence[str], short_pauses: bool) -> None:
    """`flower-supernode` in this process, which it ends, also if the connection is lost for good.

    short_pauses: replace Flower's waits, which are fixed: 3 s between two polls for messages, and
    0.5 s between two looks for the reply of a ClientApp.
    """
    from flwr.supercore.exit import ExitCode, flwr_exit
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    sys.argv[:] = ["flower-supernode", *words]
    await_contexts()
    stay_connected()
    if short_pauses:
        cast(Any, start_client_internal).time = Pauses()
    flower_supernode()
    why = "The connection to the SuperLink ended: see the error above."  # other threads continue
    flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, why)


_CUT = "timed out", "EOF"  # in the errors of connections that are cut in their TLS handshake


def stay_connected() -> None:
    """Let the SuperNode of this process repeat requests that a SuperLink failed to handle, and
    those whose connection was cut in its TLS handshake; and end it if its heartbeats end.

    Flower repeats only other requests. Such a failure ended the polls for messages or the
    heartbeats, and the process stayed alive, or the message or reply in transfer was lost.
    """
    import httpx
    from flwr.supernode import fleet_http_connection

    room = cast(Any, fleet_http_connection)
    client, heartbeats = room.FleetHttpClient, room.HeartbeatSender

    def ask(self: Any, **request: Any) -> Any:
        try:
            return client._unary_unary(self, **request)
        except httpx.HTTPStatusError as error:
            if is_transient(error):
                error.response.status_code = httpx.codes.SERVICE_UNAVAILABLE
            raise
        except httpx.TransportError as error:
            if any(word in str(error) for word in _CUT):
                raise httpx.ConnectError("the connection was cut") from error
            raise

    def beat(self: Any) -> None:
        try:
            heartbeats._run(self)
        except Exception as error:
            log.error("the heartbeats ended, so this SuperNode stops: %s", error)
            os.kill(os.getpid(), signal.SIGTERM)

    room.FleetHttpClient = type("Client", (client,), {"_unary_unary": ask})
    room.HeartbeatSender = type("Heartbeats", (heartbeats,), {"_run": beat})


CONTEXT_SECONDS = 120.0  # largest wait for a Context
_UNFINISHED = "pending", "starting", "running"  # status of a task


def await_contexts() -> None:
    """Let the SuperNode of this process pull a message only after it stored the last one's Context.

    A ClientApp sends its reply before its Context. With short pauses the next ClientApp would begin
    with the earlier Context and store that one: the client's state of a round would be lost.
    """
    from flwr.supernode import start_client_internal
    from flwr.supernode.servicer.runtime import runtime_handlers

    loop, handlers = cast(Any, start_client_internal), cast(Any, runtime_handlers)
    send, store = loop._push_messages, handlers.push_task_output
    being_stored = set[int]()  # tasks: one counts as finished before its Context is stored

    def push_task_output(request: Any, state: Any, task: Any) -> Any:
        being_stored.add(task.task_id)
        try:
            return store(request, state, task)
        finally:
            being_stored.discard(task.task_id)

    def push_messages(state: Any, **others: Any) -> None:
        # the message's own: another stays pending if its run ended while its message was received
        own = state.get_tasks(order_by="pending_at", ascending=False, limit=1)
        send(state=state, **others)
        end, ids = time.monotonic() + CONTEXT_SECONDS, [task.task_id for task in own]
        while being_stored or state.get_tasks(task_ids=ids, statuses=_UNFINISHED):
            if time.monotonic() > end:
                return
            time.sleep(0.02)

    loop._push_messages, handlers.push_task_output = push_messages, push_task_output


class Pauses:
    """The module `time` as a SuperNode's main loop uses it, with pauses that grow.

    An idle SuperNode polls after 0.1 s, and then after a fifth of the time since it was last busy,
    at most Flower's 3 s; the reply of a ClientApp is looked for every 0.05 s.
    """

    def __init__(self, clock: Any = time) -> None:
        self._clock = clock
        self._busy = clock.monotonic()  # when it was last busy

    def sleep(self, seconds: float) -> None:
        now = self._clock.monotonic()
        if seconds < _IDLE:  # it waits for a ClientApp
            self._busy = now
            self._clock.sleep(seconds / 10)
        else:
            self._clock.sleep(min(max(_SHORTEST, _SHARE * (now - self._busy)), seconds))


# seconds until the next poll for a part of a message that is still being sent, doubled each time;
# Flower's: 1. A SuperNode that polls often meets such a message in most rounds.
_PART_PAUSE = 0.05


@contextmanager
def part_pauses() -> Iterator[None]:
    """A block in which this process polls again soon for the missing parts of a message."""
    from flwr.supercore.constant import PULL_INITIAL_BACKOFF
    from flwr.supercore.inflatable import inflatable_utils as parts

    defaults = [
        cast(dict[str, Any], pull.__kwdefaults__)
        for pull in (parts.pull_objects, parts.pull_and_inflate_object_from_tree)
    ]
    for its in defaults:
        its["initial_backoff"] = _PART_PAUSE
    try:
        yield
    finally:
        for its in defaults:
            its["initial_backoff"] = PULL_INITIAL_BACKOFF
