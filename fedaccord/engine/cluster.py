"""Ray for `workers.py`: begun on this machine or joined, and how tensors pass through it."""

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # this process logs those that count
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without a share: every GPU

import ray
import torch
from ray._private import ray_constants

from fedaccord.federation.errors import last_line

# whether under `uv run` Ray copies the folder and builds an environment for each worker: minutes
UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"


@contextmanager
def ray_for(workers: int, address: str, threads: int, gpus: float) -> Iterator[Mapping[str, float]]:
    """A block with Ray, and what an actor asks of it for a worker; threads, gpus: of each.

    Where Ray runs in this process already it stays as it is. Raises ValueError, in one line, where
    there is no such cluster or not enough of it.
    """
    if ray.is_initialized():  # by somebody who also holds the cores of this process
        share_tensors()
        yield {"num_cpus": 0, "num_gpus": gpus}
        return
    begin(address, workers * threads)
    try:
        _check_room(workers, threads, gpus)
        share_tensors()
        yield {"num_cpus": threads, "num_gpus": gpus}
    finally:
        ray.shutdown()


def share_tensors() -> None:
    """Let Ray pass tensors as arrays; those that are read lie in its memory: not to be changed."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    ray.util.register_serializer(torch.Tensor, serializer=_to_array, deserializer=torch.from_numpy)


def _to_array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def begin(address: str, cores: int) -> None:
    """Start Ray here, with so many cores, or join a cluster, as ``address`` says.

    Raises ValueError, in one line, where there is none.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    before = signal.getsignal(signal.SIGTERM)
    if UV_RUN not in os.environ:
        setattr(ray_constants, UV_RUN, False)
    try:
        if address not in ("local", "auto"):
            _check_address(address)
        ray.init(
            address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            num_cpus=cores if address == "local" else None,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"ray-address: expected local, auto or HOST:PORT of a Ray cluster, got {address!r} "
            f"({last_line(str(error))})"
        ) from None
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray's own would end the process at once


def _check_address(address: str) -> None:
    """Raises OSError or ValueError where nobody listens; Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host:
        raise ValueError("no such form")
    socket.create_connection((host, int(port)), timeout=10).close()


def _check_room(workers: int, threads: int, gpus: float) -> None:
    """Raises ValueError where Ray could not start so many workers, ever."""
    have: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for what, each, key in (("CPU", threads, "threads"), ("GPU", gpus, "gpus-per-worker")):
        if workers * each > have.get(what, 0):
            raise ValueError(
                f"workers: expected {workers * each:g} {what}s for {workers} workers of {each:g}, "
                f"got {have.get(what, 0):g}; lower workers or {key}"
            )
