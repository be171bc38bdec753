"""The threads of PyTorch on the CPU: their number for a run, and how they wait for each other.

The number follows from the model, the batch and the cores that this process may use, never from a
timing or from the machine's load: sums in another order differ in the last bits, and the same
machine must give the same weights. With other load on the machine it helps to wait without
spinning.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

MULTIPLICATIONS_PER_THREAD = 50_000_000  # of a batch: some milliseconds a step
POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP's threads wait


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait; by default they spin, which occupies a core.

    With other load a spinning thread blocks the thread that it waits for, and steps are 3 to 30
    times as slow. OpenMP reads the setting when PyTorch is loaded: FedAccord's own processes call
    this before that. The user's settings have priority.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in POLICIES):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


class Threads(NamedTuple):
    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.number} thread{'s' if self.number > 1 else ''}: {self.why}"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A block in which PyTorch uses these threads; afterwards as many as before."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.number)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def check(wanted: int, key: str = "threads", advice: str = "0 uses a fitting number") -> None:
    """Raises ValueError, which names the ``key``, for more threads than this machine has cores."""
    cores = os.cpu_count() or 1
    if wanted > cores:
        raise ValueError(
            f"{key}: expected at most {cores}, the cores of this machine, got {wanted}; {advice}"
        )


def check_workers(wanted: int, address: str) -> None:
    """As `check`, for worker processes with Ray at this address."""
    if address == "local":
        check(wanted, "workers", "0 trains the clients in this process")


def cores() -> int:
    """The cores that this process may use: by affinity and by its container's quota."""
    try:
        import joblib
    except ImportError:  # on a device; only this reads quotas
        return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return int(joblib.cpu_count())


def processes(wanted: int) -> int:
    """Number of parallel processes on this machine; 0: one a core, a single one with a GPU."""
    import torch

    return wanted or (1 if torch.cuda.is_available() else cores())


def choose(wanted: int, multiplications: Callable[[], int], workers: int = 0) -> Threads:
    """``wanted`` threads, or for 0 one for each `MULTIPLICATIONS_PER_THREAD` of a batch, up to the
    cores.

    multiplications: counts those of a batch, as in `task/multiplications.py`; called only for 0
    without ``workers``, which have one each.
    Raises ValueError as `check`.
    """
    import torch

    check(wanted)
    if wanted:
        return Threads(wanted, "as set")
    if workers:
        return Threads(1, f"for each of {workers} workers")
    work = multiplications()
    if work < 2 * MULTIPLICATIONS_PER_THREAD:
        return Threads(1, f"the model is small ({work:,} multiplications a batch)")
    free = min(torch.get_num_threads(), cores())  # the first knows OMP_NUM_THREADS, which Ray sets
    number = min(free, work // MULTIPLICATIONS_PER_THREAD)
    if free <= number:
        return Threads(free, "all that this process may use")
    return Threads(number, f"{work / 1e6:,.0f} million multiplications a batch")
