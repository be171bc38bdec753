"""Every use of undocumented parts of Flower 1.41 and 1.42; tests/compat checks each.

Those of a SuperNode are in `supernode.py`, those of secure sums in `crypto.py`, those of replies
that are being sent in `uploads.py`. All else that this package uses is in Flower's documented
packages, `flwr.app`, `flwr.clientapp`, `flwr.serverapp`, and its commands. A new release of Flower
is supported when tests/compat passes.
"""

import base64
import re
import sys
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import Array
from flwr.serverapp import Grid
from torch import Tensor

from fedaccord.compat.read_only import over

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
    """An array that outlives its message: unpickling copies it out of Ray's memory."""

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

    A ClientApp of a SuperNode may use Ray itself: its process is not a Ray actor, and the processes
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

# a client's exception as text: Flower writes its class, then its message, as <class 'X'>:<'...'>,
# and in a simulation this inside the text of its own exception; no field has the message alone
_RAISED = re.compile(r"^(<class '[\w.]+'>:<')?(Exception ClientAppException occurred\. Message: )?")


def raised_message(line: str) -> str:
    """The last line of an error's reason without Flower's words around the client's."""
    return _RAISED.sub("", line).removesuffix("'>")


def has_no_function(reason: str) -> bool:
    """Whether a ClientApp has no function for a kind of message: no error code says so."""
    return "function registered with name" in reason


def has_no_parts(reason: str) -> bool:
    """Whether the parts of a reply are gone: they were not sent in time, or cannot be decoded."""
    return "Reply message objects are unavailable" in reason


def is_transient(error: Exception) -> bool:
    """Whether a SuperLink failed to handle a request, for example because its database is locked:
    HTTP status 500 and above. Flower repeats requests that do not reach it."""
    return getattr(getattr(error, "response", None), "status_code", 0) >= 500


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


def read_node_config(text: str) -> dict[str, Any]:
    """The pairs of a ``--node-config``, as a SuperNode reads them. Raises click's ClickException if
    it refuses them."""
    from flwr.common.config import parse_config_args

    return {**parse_config_args([text])}


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
