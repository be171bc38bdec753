"""One process at a time writes a folder; the lock of a dead process is ignored."""

import errno
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedaccord.runs import lock, origin
from fedaccord.runs.lock import Lock, LockedError, check, force, is_locked

CODE = (
    "import sys, time; from pathlib import Path; from fedaccord.runs.lock import Lock\n"
    "Lock(Path(sys.argv[1])); time.sleep(60)"
)


@contextmanager
def another(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the lock and has written its record."""
    other = subprocess.Popen([sys.executable, "-c", CODE, str(folder)])
    try:
        end = time.monotonic() + 30
        while not ((folder / ".lock").exists() and (folder / ".lock").stat().st_size):
            assert time.monotonic() < end
            time.sleep(0.01)
        yield other
    finally:
        other.kill()
        other.wait()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with another(tmp_path) as other:
        line = rf"process {other.pid} on .* writes here; wait for it, or end it$"
        for attempt in (Lock, check):
            with pytest.raises(LockedError, match=line):
                attempt(tmp_path)
        force(tmp_path)  # a lock that is seen stays
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    assert (tmp_path / ".lock").exists()  # of the killed one
    with Lock(tmp_path):
        assert is_locked(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_a_second_lock_of_one_process_is_refused(tmp_path: Path) -> None:
    with Lock(tmp_path), pytest.raises(LockedError, match=f"process {os.getpid()} on "):
        Lock(tmp_path)
    first = Lock(tmp_path)
    first.release()
    with Lock(tmp_path):
        first.release()  # twice: not the second one's
        assert is_locked(tmp_path)


def elsewhere(folder: Path, age: float, **record: Any) -> None:
    """Write the lock file of a process of another machine, last touched ``age`` seconds ago."""
    process = origin.process() | {"host": "elsewhere", "boot": "another", "locked": True}
    (folder / ".lock").write_text(json.dumps(process | record))
    now = time.time()
    os.utime(folder / ".lock", (now - age, now - age))


def test_another_machine_is_alive_while_it_writes(tmp_path: Path) -> None:
    elsewhere(tmp_path, 30)
    with pytest.raises(LockedError, match=r"of another machine, elsewhere, wrote here 3\d s ago;"):
        check(tmp_path)
    with pytest.raises(LockedError, match="--force"):
        Lock(tmp_path)
    force(tmp_path)
    assert not is_locked(tmp_path)
    for age, locked in ((1000, False), (-1000, True), (-100_000, False)):  # clocks may differ
        elsewhere(tmp_path, age)
        assert is_locked(tmp_path) == locked
    elsewhere(tmp_path, 1000)
    Lock(tmp_path).release()


def test_a_container_of_this_machine_sees_the_lock(tmp_path: Path) -> None:
    """It has another host name, but the same boot id."""
    elsewhere(tmp_path, 0, boot=origin.process()["boot"])
    assert bool(origin.process()["boot"]) != is_locked(tmp_path)


def test_a_lock_shows_that_its_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with Lock(tmp_path):
        os.utime(tmp_path / ".lock", (0, 0))
        end = time.monotonic() + 10
        while (tmp_path / ".lock").stat().st_mtime == 0:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the process that the file names decides."""

    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with Lock(tmp_path):
        assert "no locks on this file system" in caplog.text
        assert caplog.text.count("\n") == 1
        assert is_locked(tmp_path)
    owner = origin.process() | {"pid": 2**22 + 1, "locked": False}
    (tmp_path / ".lock").write_text(json.dumps(owner))
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "[" * 100_000])
def test_a_damaged_lock_file_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    assert not is_locked(tmp_path)
    Lock(tmp_path).release()
