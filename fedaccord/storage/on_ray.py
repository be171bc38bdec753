"""The store of clients' states as Ray objects, in the memory of a cluster."""

from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError, OutOfDiskError

from fedaccord.core.vectors import map_vectors
from fedaccord.storage.in_process import InProcessStore
from fedaccord.storage.store import MissingStateError

GONE = "its state was lost with the machine that held it"


class RayStore(InProcessStore):
    """Client -> memory; Ray moves states to the worker that needs them, and to disk if memory is
    short."""

    def pack(self, client: int, round: int, state: Any) -> Any:
        """The Ray object of a state; a worker's is one already."""
        return state if isinstance(state, ray.ObjectRef) else put(state)

    def unpack(self, packed: Any, like: Any = None) -> Any:
        """The state, over read-only memory of Ray."""
        try:
            return ray.get(packed)
        except ObjectLostError:
            raise MissingStateError(GONE) from None

    def state(self, client: int, round: int) -> Any:
        return map_vectors(torch.clone, super().state(client, round))


def put(what: Any) -> Any:
    """A new Ray object. Raises OSError, in one line, if neither memory nor the disk has room."""
    try:
        return ray.put(what)
    except OutOfDiskError:
        raise OSError(
            "Ray has no room for a client's state or a model, neither in memory nor on the disk; "
            "free some of the disk of Ray's folder, or choose another folder with RAY_TMPDIR"
        ) from None


def is_lost(reference: Any) -> bool:
    """Whether the machine that held a Ray object is gone."""
    try:
        ray.get(reference)
    except ObjectLostError:
        return True
    return False
