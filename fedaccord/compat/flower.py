"""Every use of undocumented parts of Flower 1.41 and 1.42; tests/compat checks each.

Those of secure sums are in `crypto.py`, those of replies that are being sent in `uploads.py`. All
else that this package uses is in Flower's documented packages, `flwr.app`, `flwr.clientapp`,
`flwr.serverapp`, and its commands. A new release of Flower is supported when tests/compat passes.
"""

import base64
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import Array
from flwr.serverapp import Grid
from torch import Tensor

from fedaccord.compat.read_only import over

log = logging.getLogger("flwr")

# --- arrays ---------------------------------------------------------------------------------------


NUMPY = "numpy.ndarray"  # how an Array's bytes are written: an .npy file


class TensorArray(Array):
    """An Array that holds a tensor and writes its bytes when a runtime first asks for them.

    Flower's own writes them when it is made. In process they are never requested, so vectors pass
    by reference: do not change one after packing it. Ray pickles messages without copying the
    tensor's memory; a received tensor is in Ray's memory, which is read-only.
    """

    # Flower sends the name of an object's class, and reads the classes that it knows
    __qualname__ = "Array"

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__.update(  # not one by one: Array checks each assignment
            tensor=tensor.detach(),
            dtype=_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stype=NUMPY,
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]  # Array keeps its bytes in a field
        if "bytes" not in self.__dict__:
            self.__dict__["bytes"] = Array(self.__dict__["tensor"].cpu().numpy()).data
        return cast(bytes, self.__dict__["bytes"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.__dict__["tensor"].cpu().numpy(),)


class KeptArray(TensorArray):
    """One that outlives its message: unpickling it makes a copy outside of Ray's memory."""

    __qualname__ = "Array"

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self.__dict__["tensor"].cpu().numpy(),)


def _received(array: np.ndarray) -> TensorArray:
    return TensorArray(over(array))


def _copied(array: np.ndarray) -> KeptArray:
    return KeptArray(torch.from_numpy(array.copy()))


_NAMES: dict[torch.dtype, str] = {}


def _name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return _NAMES[dtype]


# --- the simulation -------------------------------------------------------------------------------

# the simulation's number of clients, if the user sets none: runs of two are mostly a mistake
DEFAULT_SUPERNODES = 2
_PULL_INTERVAL = "pull_interval"  # an attribute of its grid alone


def is_simulation(grid: Grid) -> bool:
    """Whether Flower's simulation is behind a grid: no documented attribute says so."""
    return _PULL_INTERVAL in vars(grid)


_ACTORS = "flwr.simulation.ray_transport.ray_actor"  # the module of its workers' class


def in_simulation() -> bool:
    """Whether this process is a worker of Flower's simulation: no documented attribute says so.

    A ClientApp of a SuperNode may use Ray itself: its process is no Ray actor, and the processes
    that it starts do not load Flower's actor.
    """
    ray = sys.modules.get("ray")
    if ray is None or _ACTORS not in sys.modules or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def is_dead_worker(reason: str) -> bool:
    """Whether a reply's error is the death of a Ray actor, which has no error code of its own.

    Flower continues to assign clients to that actor.
    """
    return "ActorDiedError" in reason


# --- errors ---------------------------------------------------------------------------------------

# a client's exception as text: within its class, and in a simulation within the words of Flower's
# own exception, which holds the client's; neither has a field for the client's message alone
_RAISED = re.compile(r"^(<class '[\w.]+'>:<')?(Exception ClientAppException occurred\. Message: )?")


def raised_message(line: str) -> str:
    """The last line of an error's reason without Flower's words around the client's."""
    return _RAISED.sub("", line).removesuffix("'>")


def has_no_function(reason: str) -> bool:
    """Whether a ClientApp has no function for a kind of message: no error code says so."""
    return "function registered with name" in reason


# --- `flwr` commands ------------------------------------------------------------------------------


def is_superlink_away(message: str) -> bool:
    """Whether a `flwr` command failed because no server answered: JSON has no code for it."""
    return "SuperLink is unavailable" in message


def has_lost_superlink(details: str) -> bool:
    """Whether a run failed because its server stopped: its status is that of other failures.

    The words of a SuperLink that finds the run without a ServerApp, and of a ServerApp that lost
    its SuperLink.
    """
    return any(words in details for words in ("No heartbeat", "unknown error"))


# the server that a first `flwr run` on this machine starts and leaves running: its port, the
# environment variable that replaces it, and its program with the option of the port
LOCAL_PORT_VARIABLE, LOCAL_PORT = "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "39091"
LOCAL_PROGRAM, LOCAL_PORT_OPTION = "flower-superlink", "--port"
LOCAL = "local"  # its name in Flower's first configuration

# --- messages of which parts are on their way -----------------------------------------------------

# seconds until a part of a message that is still being sent is asked for again, and twice as many
# the next time; Flower's: 1. A SuperNode that polls often meets such a message in most rounds.
_PART_PAUSE = 0.05


@contextmanager
def part_pauses() -> Iterator[None]:
    """A block in which this process asks soon again for a part of a message that is still sent."""
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


def is_transient(error: Exception) -> bool:
    """Whether a SuperLink failed to handle a request, as one whose database is locked: HTTP status
    500 and above. Flower repeats requests that do not reach it."""
    return getattr(getattr(error, "response", None), "status_code", 0) >= 500


# --- a SuperNode ----------------------------------------------------------------------------------

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
        with suppress(OSError):  # short of memory, Linux ends it before the SuperNode
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
    why = "The connection to the SuperLink ended: see the error above."  # its other threads go on
    flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, why)


_CUT = "timed out", "EOF"  # in the errors of connections that are cut in their TLS handshake


def stay_connected() -> None:
    """Let the SuperNode of this process repeat requests that a SuperLink failed to handle, and
    those whose connection was cut in its TLS handshake; and end it if its heartbeats end.

    Flower repeats others alone. Such a failure ended the polls for messages or the heartbeats, and
    the process lived on, or it lost the message or the reply that was being sent.
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
            log.error("the heartbeats ended, and with them this SuperNode: %s", error)
            os.kill(os.getpid(), signal.SIGTERM)

    room.FleetHttpClient = type("Client", (client,), {"_unary_unary": ask})
    room.HeartbeatSender = type("Heartbeats", (heartbeats,), {"_run": beat})


CONTEXT_SECONDS = 120.0  # largest wait for a Context
_UNFINISHED = "pending", "starting", "running"  # status of a task


def await_contexts() -> None:
    """Let the SuperNode of this process pull a message only after it stored the last one's Context.

    A ClientApp sends its reply before its Context. With short pauses the next ClientApp would begin
    with the Context before, and then store that one: the client's state of a round was lost.
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


# --- the nodes of a grid --------------------------------------------------------------------------


def connections(grid: Grid) -> dict[int, str]:
    """The online nodes, and since when: a SuperLink records a new time when a SuperNode starts, and
    when it sends a heartbeat after a minute without one. In a simulation it is constant."""
    return {node.node_id: node.last_activated_at for node in grid.get_nodes()}


# --- a SuperLink's HTTP interface -----------------------------------------------------------------

HEALTH = "/health"  # answers without a key: `doctor` reads the server's clock from its Date
# seconds that a device's clock may be ahead of and behind the server's: signatures of other times
# are refused, with the same status as wrong ones
CLOCK_AHEAD, CLOCK_BEHIND = 5.0, 300.0
REGISTERED, UNKNOWN = 400, 412  # HTTP status of the answers to `activation_request`


class HttpRequest(NamedTuple):
    path: str
    body: bytes
    headers: dict[str, str]


def signed_time() -> str:
    """The text that a device signs: the time, of a form that Flower reads."""
    return datetime.now(UTC).isoformat()


def activation_request(public: bytes, time: str, signature: bytes) -> HttpRequest:
    """Ask a SuperLink whether a key is registered, which no command of a device does.

    It requests to activate the key with a heartbeat interval of 0: Flower looks for the key first
    and then refuses the interval, so nothing changes.

    public: the key, PEM; signature: of ``time`` by its private half.
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    headers = {
        "content-type": "application/protobuf",
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-signature": base64.b64encode(signature).decode(),
        "flwr-timestamp": time,
    }
    body = ActivateNodeRequest(public_key=public, heartbeat_interval=0).SerializeToString()
    return HttpRequest("/v1/fleet/activate-node", body, headers)
