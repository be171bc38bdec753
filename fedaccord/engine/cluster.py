"""Start or join Ray for `workers.py`, and pass tensors through it."""

import logging
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray._private import ray_constants
from ray._private import utils as ray_utils

from fedaccord.compat.read_only import over
from fedaccord.data.seeding import ALONE
from fedaccord.federation import ray_cluster
from fedaccord.federation.errors import clean
from fedaccord.process.interrupts import interruptible, take_back
from fedaccord.process.threads import check_workers
from fedaccord.storage.files import nearest

ZERO_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"  # 0: workers without a share of a GPU see all
ENVIRONMENT = {  # of this process and of Ray's while Ray runs; the user's values have priority
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # this process logs the relevant ones
    # seconds after which Ray's agents exit if the run was killed; Ray's default is a minute
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
FULL = "RAY_local_fs_capacity_threshold"  # the used share of the disk at which Ray stops spilling
LEFT = 250e6  # bytes that stay free; Ray's own share, 0.95, leaves 12 GB of 250 GB

# whether Ray, under `uv run`, copies the folder and builds an environment per worker: minutes
UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"


ONE_THREAD = threading.RLock()  # held while Ray is in use, which is global to the process

BY_RAY = ("RAY_USAGE_STATS_ENABLED", "PYTHONBREAKPOINT")  # further variables that Ray sets


@contextmanager
def environment(zero_gpus: str = "0") -> Iterator[None]:
    """A block in which `ENVIRONMENT`, `ZERO_GPUS` and `FULL` are set; after it the variables are as
    before."""
    ours = {**ENVIRONMENT, ZERO_GPUS: zero_gpus, FULL: f"{_share():.6f}"}
    before = {name: os.environ.get(name) for name in (*ours, *BY_RAY)}
    os.environ.update({**ours, **os.environ})
    try:
        yield
    finally:
        for name, text in before.items():
            os.environ.pop(name, None)
            if text is not None:
                os.environ[name] = text


def _share() -> float:
    """The share of the disk of Ray's folder that may be used; on a small disk Ray's default."""
    total = shutil.disk_usage(nearest(ray_cluster.folder())).total
    return max(0.95, 1 - LEFT / max(total, 1))


@contextmanager
def ray_for(workers: int, address: str, threads: int, gpus: float) -> Iterator[Mapping[str, float]]:
    """A block with Ray; gives the resources that an actor requests. threads, gpus: of each worker.

    If Ray already runs in this process, it stays as it is. Raises ValueError, in one line, if there
    is no such cluster, it has too few resources, or another thread is in such a block.
    """
    with _in_one_thread(), environment():
        more = f" for {workers} workers of {{:g}}; lower workers or {{}}"
        needed_gpus = workers * gpus, "GPU", more.format(gpus, "gpus-per-worker")
        if ray.is_initialized():  # the caller has also reserved the cores of this process
            check_room("workers", *needed_gpus)
            with tensors_as_arrays():
                yield {"num_cpus": 0, "num_gpus": gpus}
            return
        check_workers(workers, address)
        with started(address, workers * threads):
            check_room("workers", workers * threads, "CPU", more.format(threads, "threads"))
            check_room("workers", *needed_gpus)
            with tensors_as_arrays():
                yield {"num_cpus": threads, "num_gpus": gpus}


@contextmanager
def _in_one_thread() -> Iterator[None]:
    if not ONE_THREAD.acquire(blocking=False):
        raise ValueError(
            "workers: expected one run with workers at a time in a process, got a second one in "
            "another thread; use workers=0 in threads, or a process for each run"
        )
    try:
        yield
    finally:
        ONE_THREAD.release()


@contextmanager
def tensors_as_arrays() -> Iterator[None]:
    """A block in which `share_tensors` applies in this process."""
    share_tensors()
    try:
        yield
    finally:
        ray.util.deregister_serializer(torch.Tensor)


def share_tensors() -> None:
    """Let Ray pass tensors as arrays; received ones are in Ray's memory and must not be changed."""
    ray.util.register_serializer(torch.Tensor, serializer=_to_array, deserializer=_over)


def _to_array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # which NumPy lacks
        return tensor.view(torch.int16).numpy(), True
    return tensor.numpy(), False


def _over(content: tuple[Any, bool]) -> torch.Tensor:
    array, is_bfloat16 = content
    return over(array).view(torch.bfloat16) if is_bfloat16 else over(array)


@contextmanager
def started(address: str, cores: int) -> Iterator[None]:
    """A block with Ray, here with so many cores, or with the cluster at ``address``; signals act
    as elsewhere.

    Raises ValueError, in one line, if there is none.
    """
    with interruptible() as interrupts:
        try:
            with interrupts.held():  # an exception in Ray's start would end the process with a dump
                begin(address, cores)
                take_back()  # Ray would abort the process three seconds after SIGTERM
            yield
        finally:
            ray.shutdown()


def begin(address: str, cores: int) -> None:
    """Start or join Ray, as in `started`."""
    uv_run, sigterm = getattr(ray_constants, UV_RUN), ray_utils.set_sigterm_handler
    if UV_RUN not in os.environ:
        setattr(ray_constants, UV_RUN, False)
    # Ray's handler would end the process at once
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        if address == "auto" and (problem := ray_cluster.unreachable()):
            raise ValueError(problem)
        if address not in ("local", "auto") and not ray_cluster.connect(address, 10):
            raise ValueError("no such form")
        with ALONE, warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
            ray.init(
                address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                num_cpus=cores if address == "local" else None,
            )
    except Exception as error:  # Ray raises plain ones, too
        what = f"ray-address: expected local, auto or HOST:PORT of a Ray cluster, got {address!r}"
        what = "workers: Ray did not start here" if address == "local" else what
        raise ValueError(f"{what} ({clean(str(error))})") from None
    finally:
        setattr(ray_constants, UV_RUN, uv_run)
        ray_utils.set_sigterm_handler = sigterm


def check_room(key: str, wanted: float, what: str, more: str = "") -> None:
    """Raises ValueError, in one line that begins with ``key`` and ends with ``more``, if the
    cluster has fewer CPUs or GPUs (``what``) than wanted: Ray would wait for a machine."""
    have = ray.cluster_resources().get(what, 0.0)  # type: ignore[no-untyped-call]
    if wanted > have:
        raise ValueError(
            f"{key}: expected at most {have:g}, the {what}s that Ray has, got {wanted:g}{more}"
        )
