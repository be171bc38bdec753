"""Files that are complete even if writing them is interrupted."""

import ctypes
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

BESIDE = re.compile(r"\..+\.(?:csv|json|safetensors|toml)\.[0-9]+")  # unfinished files


def replace(
    path: Path,
    content: bytes,
    *,
    synced: bool = True,
    durable: bool = False,
    mode: int = 0o666,
) -> None:
    """Write a file atomically: readers see its whole old or its whole new content.

    synced: after a power failure too; False: once the caller has called `sync_files`. durable:
    after one the new content, if the file system can promise that. On macOS neither covers what
    the drive itself still caches, as fsync does not flush it (F_FULLFSYNC would). mode: of the
    new file, less the process's umask, from its first byte on. A link stays a link; /dev/stdout
    and the like are written to. Raises OSError, which names the file.
    """
    if is_special(path):  # unresolved: a pipe at /dev/stdout has no path
        path.write_bytes(content)
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)  # of a killed process of this number
        beside.touch(mode, exist_ok=False)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())  # no empty file after a power failure
        beside.replace(path)
    except OSError as error:
        raise of_file(error, path) from None
    finally:
        beside.unlink(missing_ok=True)  # exists only if something above failed
    if durable:
        with suppress(OSError):  # some file systems cannot
            _sync_folder(path.parent, os.fsync)


def sync_files(paths: Iterable[Path]) -> None:
    """Sync many files, written by `replace`, with all others of their file systems: it takes a
    tenth of the time of each alone. Raises OSError, which names their folder."""
    for folder in {path.parent for path in paths}:
        try:
            _sync_folder(folder, syncfs)
        except OSError as error:
            raise of_file(error, folder) from None


def syncfs(descriptor: int) -> None:
    """Linux's function of this name: `os.sync` waits for all disks, and reports no error."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None, use_errno=True), "syncfs"):
        if libc.syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    else:
        os.sync()


def nearest(folder: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _sync_folder(folder: Path, sync: Callable[[int], None]) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def contents(path: Path) -> str:
    """A hash of a file's content, independent of its path. If it is not a file: the path."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return str(path)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError, and ValueError if it is not a regular file or
    not JSON."""
    try:
        return json.loads(regular(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name}: expected JSON, got hundreds of nested lists") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: expected JSON, got a damaged file ({error})") from None


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises OSError, and ValueError if it is not a regular file."""
    return regular(path).read_bytes()


def regular(path: Path) -> Path:
    """The path. Raises ValueError for a folder, and for a pipe, which would block."""
    if is_special(path):
        raise ValueError(f"{path.name}: expected a file, got a folder, a pipe or a device")
    return path


def is_special(path: Path) -> bool:
    """Whether it is a folder, a pipe or a device, such as /dev/stdout."""
    return path.exists() and not path.is_file()


def unfinished(folder: Path) -> Iterator[Path]:
    """The files in a folder that killed processes left unfinished in `replace`."""
    if folder.is_dir():
        yield from (p for p in folder.iterdir() if BESIDE.fullmatch(p.name) and p.is_file())


def of_file(error: OSError, path: Path) -> OSError:
    """The same error, with the file's name."""
    return OSError(error.errno, error.strerror, str(path))
