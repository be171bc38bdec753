"""How memory is freed, in processes that are ours."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@cache
def keep_freed_memory() -> None:
    """Let this process reuse the memory of large tensors, as PyTorch does on a GPU.

    glibc hands them back to the system when they are freed, and every step then faults their
    pages in anew: a quarter of LeNet's time. It changes the allocator of the whole process
    (mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD): `fedaccord run` and FedAccord's own
    ClientApp call it; `simulate` and `train_locally`, in the user's process, do not. Without glibc
    nothing happens.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 30)


def free_memory() -> float:
    """Bytes that this process may still allocate."""
    import psutil

    free = float(psutil.virtual_memory().available)
    try:  # a container's own limit
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        return min(free, int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError):  # no group, or no limit
        return free


@contextmanager
def uncollected() -> Iterator[None]:
    """A block without garbage collection, in which PyTorch is imported; later collections leave out
    the objects that exist at its end. Every module makes thousands of objects that stay, and the
    searches through them need an eighth of the time. No-op if PyTorch is imported already."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
