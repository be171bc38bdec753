"""File-backed tensors: as large as the free disk, in memory only while in use."""

import ctypes
import mmap
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaccord.core.vectors import Vector, map_vectors

VECTORS = 16  # in a file of `SpillPast`
REPLIES = 2**28  # bytes of a round's replies that stay in memory
PAST = 2**28  # bytes of vectors of past rounds that stay in memory
MADV_POPULATE_WRITE = 23  # of Linux, since 5.14


def mapped(numel: int, dtype: torch.dtype, folder: Path | None = None) -> Tensor:
    """(numel,) zeros in a new file in ``folder``, or in the system's temporary folder.

    The file has no name: it is freed with the tensor, however the process ends. Its space is
    allocated at once. Raises OSError, which names the folder, if it is full or not writable.
    """
    place = str(folder or tempfile.gettempdir())
    try:
        descriptor, path = tempfile.mkstemp(prefix=".fedaccord-", dir=place)
        try:
            if hasattr(os, "posix_fallocate"):  # a full disk raises here, not as a SIGBUS later
                os.posix_fallocate(descriptor, 0, max(1, numel * dtype.itemsize))
            return torch.from_file(path, shared=True, size=numel, dtype=dtype)
        finally:
            os.close(descriptor)
            os.unlink(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, place) from None


def in_file(v: Tensor) -> bool:
    """Whether a tensor is a result of `mapped`, or a part of one."""
    return v.untyped_storage().filename is not None


def write(place: Tensor, v: Tensor) -> None:
    """Copy ``v`` into a tensor of `mapped`, or a part of one.

    New pages are requested together: page faults one by one cost several times as much as the
    copy.
    """
    if sys.platform == "linux":
        _advise(place, MADV_POPULATE_WRITE)
    place.copy_(v)


def release(v: Tensor) -> None:
    """Drop the resident pages of a tensor of `mapped`, or of a part of one (madvise): its values
    stay in the file. No-op for other tensors."""
    if in_file(v) and v.numel():
        _advise(v, mmap.MADV_DONTNEED)


def _advise(v: Tensor, advice: int) -> None:
    """Advise the system about the pages of v; no-op if it does not support the advice."""
    first = v.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = v.data_ptr() + v.nbytes - first
    _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class SpillPast:
    """Moves the oldest vectors of past rounds that a server state holds into files as of `mapped`.

    ``folder``: of the files; None: the system's temporary one. `PAST` bytes stay in memory.
    Several vectors share a file. With one file per vector, glibc before 2.38 places a file's few
    bytes of memory behind the freed vector, and the next vector does not fit into the gap: with
    100 vectors of 3.2 MB resident memory grew by 250 to 370 MB, with 16 in a file by 40 to 46 MB.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._places: list[Tensor] = []

    def __call__(self, server: Any) -> Any:
        """The same state, a NamedTuple, with the oldest vectors of its dicts, round -> vector (d,),
        in files."""
        past = {name: self._oldest_in_files(vectors) for name, vectors in _past(server)}
        return server._replace(**past) if past else server

    def release(self, server: Any) -> None:
        """Drop the resident pages of the vectors in files."""
        for _, vectors in _past(server):
            for vector in vectors.values():
                release(vector)

    def _oldest_in_files(self, vectors: dict[int, Vector]) -> dict[int, Vector]:
        if not vectors:
            return vectors
        old = sorted(vectors)[: -max(1, PAST // vectors[max(vectors)].nbytes)]
        return vectors | {t: self._in_file(vectors[t]) for t in old}

    def _in_file(self, v: Vector) -> Vector:
        """The same vector in a file; unchanged if it is in a file already."""
        if in_file(v):
            return v
        if not self._places or _kind(self._places[-1]) != _kind(v):
            kind = VECTORS * v.numel(), v.dtype
            self._places = [*mapped(*kind, self._folder).view(VECTORS, -1)]
        return _written(self._places.pop(), v)


class SpillReplies:
    """Moves the vectors of a round's replies into files as of `mapped` once `REPLIES` bytes of them
    are in memory; only these and the current reply stay there.

    folder: as of `SpillPast`. Vectors on a GPU stay. Each vector has a file of its own, freed with
    the round: files of several, as of `SpillPast`, would also allocate places that no reply uses.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._left = folder, REPLIES

    def __call__(self, value: Any) -> Any:
        """The same NamedTuple with its vectors, nested ones too, in memory or in files."""
        return map_vectors(self._placed, value)

    def _placed(self, v: Vector) -> Vector:
        self._left -= v.nbytes
        if self._left >= 0 or not (v.is_cpu and v.numel()):
            return v
        return _written(mapped(v.numel(), v.dtype, self._folder).view(v.shape), v)


def _written(place: Tensor, v: Vector) -> Tensor:
    """A place in a file, with the values of ``v`` and without resident pages."""
    write(place, v)
    release(place)
    return place


def _past(server: Any) -> list[tuple[str, dict[int, Vector]]]:
    """The fields of a server state with vectors of past rounds."""
    fields = zip(server._fields, server, strict=True)
    return [(name, value) for name, value in fields if isinstance(value, dict)]


def _kind(v: Tensor) -> tuple[torch.Size, torch.dtype]:
    return v.shape, v.dtype
