"""A lock of a folder for one writing process, released also if the process is killed.

The file ``.lock`` in the folder is locked by flock, names its process, and is touched every `BEAT`
seconds. The kernel releases the lock of a process that was killed. Another machine may not see the
lock, as on some network file systems: then the age of the file decides.
"""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from fedaccord.runs import origin
from fedaccord.storage.files import of_file, read_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
BEAT = 15.0  # seconds between two signs of life
STALE = 120.0  # seconds without one, after which a process of another machine counts as dead
DAY = 86400.0  # seconds that another machine's clock may be ahead
PATIENCE = 1.0  # seconds that another process's check may delay a lock
log = logging.getLogger("flwr")


class LockedError(ValueError):
    """Another process writes the folder."""


class Lock(AbstractContextManager["Lock"]):
    """The lock of ``folder``, until `release` or the end of the block or of the process.

    Raises LockedError, in one line, if another process has it, and OSError, which names the file,
    if the lock cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        try:
            self._descriptor, locked = _open_locked(self.path)
        except BlockingIOError:
            raise LockedError(f"{folder}: {_live(_record(self.path))}") from None
        except OSError as error:
            raise of_file(error, self.path) from None
        if refusal := _refusal(self.path):
            os.close(self._descriptor)
            raise LockedError(f"{folder}: {refusal}")
        if not locked:
            log.warning("%s: no locks on this file system: do not start a second process", folder)
        record = json.dumps(origin.process() | {"locked": locked}).encode()
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, record, 0)
        except OSError as error:  # a full disk
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise of_file(error, self.path) from None
        self._released = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def release(self) -> None:
        """Release the folder; a second call does nothing."""
        if not self._released.is_set():
            self._released.set()
            self.path.unlink(missing_ok=True)  # while it is locked: see `_open_locked`
            os.close(self._descriptor)

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            with suppress(OSError):  # the folder may be gone
                os.utime(self.path)


def check(folder: Path) -> None:
    """Raises LockedError, in one line, if another process writes the folder, as far as this machine
    can tell."""
    path = folder / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        is_held = _flock(descriptor, shared=True) is False
    finally:
        os.close(descriptor)
    if refusal := _live(_record(path)) if is_held else _refusal(path):
        raise LockedError(f"{folder}: {refusal}")


def is_locked(folder: Path) -> bool:
    """Whether `check` raises."""
    try:
        check(folder)
    except LockedError:
        return True
    return False


def force(folder: Path) -> None:
    """Remove the lock of a process of another machine; locks of this machine stay."""
    path = folder / FILE
    if path.exists():
        with suppress(BlockingIOError):
            descriptor, _ = _open_locked(path)
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _open_locked(path: Path) -> tuple[int, bool]:
    """The locked file's descriptor, and whether the file system has locks. Raises BlockingIOError
    if another process has the lock."""
    end = time.monotonic() + PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        locked = _flock(descriptor)
        if locked is not False:
            with suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    return descriptor, locked is True
        os.close(descriptor)  # its owner has just removed the file
        if time.monotonic() > end:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        time.sleep(PATIENCE / 50)


def _flock(descriptor: int, shared: bool = False) -> bool | None:
    """Whether the file could be locked; None: the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _record(path: Path) -> dict[str, Any]:
    """The process that the file names; empty if none."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    is_record = isinstance(content, dict) and {"host", "pid", "started"} <= {*content}
    return content if is_record else {}


def _refusal(path: Path) -> str:
    """Why a file that is not locked still belongs to another process; empty: it does not."""
    record = _record(path)
    if not record:
        return ""
    if record.get("locked") and origin.is_here(record):
        return ""
    if origin.is_same_host(record):
        return _live(record) if origin.is_alive(record) else ""
    age = time.time() - path.stat().st_mtime
    if age > STALE or age < -DAY:  # of a clock that was wrong
        return ""
    return (
        f"process {record['pid']} of another machine, {record['host']}, wrote here "
        f"{max(0, age):.0f} s ago; if it has ended, try again {STALE:.0f} s after that, or now "
        "with --force (fedaccord resume, fedaccord sweep)"
    )


def _live(record: Mapping[str, Any]) -> str:
    who = f"process {record['pid']} on {record['host']}" if record else "another process"
    return f"{who} writes here; wait for it, or end it"
