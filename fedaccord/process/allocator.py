"""How FedAccord's own processes free memory."""

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from fedaccord.process.memory_groups import groups


@cache
def keep_freed_memory() -> None:
    """Let this process reuse the memory of large tensors, as PyTorch does on a GPU.

    glibc returns it to the system when it is freed, and every step then faults the pages in
    again: a quarter of LeNet's time. This changes the allocator of the whole process
    (mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD): `fedaccord run` and FedAccord's own
    ClientApp call it; `simulate` and `train_locally`, in the user's process, do not. Without glibc
    nothing happens.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 30)


def give_back_memory() -> None:
    """Return freed memory to the system: glibc retains memory below a block in use, such as the
    client states of a completed run. No-op without glibc."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def forget_file_pages() -> None:
    """Drop this process's clean file pages, such as those of imported libraries that are no longer
    used. The system loads them again if needed. No-op without Linux and its /proc/self/smaps.

    Mappings with private pages, relocated or written, do not change.
    """
    if sys.platform != "linux":
        return
    try:
        lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines()
    except OSError:  # of a kernel without it
        return
    place: tuple[int, int] | None = None
    libc = ctypes.CDLL(None)
    for words in filter(None, map(str.split, lines)):
        if not words[0].endswith(":"):  # a mapping, and its file if it has one
            first, last = (int(number, 16) for number in words[0].split("-"))
            place = (first, last - first) if words[-1].startswith("/") else None
        elif words[0] == "Anonymous:" and place and words[1] == "0":
            libc.madvise(ctypes.c_void_p(place[0]), ctypes.c_size_t(place[1]), mmap.MADV_DONTNEED)


def free_memory() -> float:
    """Bytes that this process may still allocate, on this machine and in its control groups."""
    import psutil

    return float(min([psutil.virtual_memory().available, *(group.free for group in groups())]))


@contextmanager
def uncollected() -> Iterator[None]:
    """A block without garbage collection, in which PyTorch is imported; later collections skip the
    objects that exist at its end. Every module makes thousands of permanent objects, and scanning
    them needs an eighth of the time. No-op if PyTorch is imported already."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
