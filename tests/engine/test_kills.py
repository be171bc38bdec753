"""A process that is killed at any moment, also while it writes, leaves a run that resumes."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fedaccord import engine
from fedaccord.config import RunConfig
from fedaccord.runs import status
from tests.engine.test_resume import run, written
from tests.engine.test_resume import settings as settings  # a fixture

KILLS, ROUNDS = 20, 30


def child(config: RunConfig) -> int:
    """A process that runs the configuration and nothing of these tests."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with engine.quiet():
            engine.run(config)
    finally:
        os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("algo", "method"), [("scaffold", "none"), ("fedavg", "topk")])
def test_twenty_kills_change_no_bit(algo: str, method: str, settings: dict[str, Any]) -> None:
    more: dict[str, Any] = {"num-server-rounds": ROUNDS, "checkpoint-every": 1}
    more |= {"algo": algo, "compress.method": method}
    whole = run(RunConfig.make(settings | more | {"name": f"kills-{algo}-whole"}))
    more["name"] = f"kills-{algo}"
    path, rng = whole.path.with_name(f"kills-{algo}"), random.Random(0)
    kills = 0
    for _ in range(KILLS):
        pid = child(RunConfig.make(settings | more | {"resume": has_begun(path)}))
        time.sleep(rng.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        _, how = os.waitpid(pid, 0)
        kills += os.WIFSIGNALED(how)
        assert not path.exists() or has_ended(path)
    last = RunConfig.make(settings | more | {"resume": has_begun(path)})
    if kills == KILLS:  # else it came to its end in one of them
        run(last)
    assert written(path) == written(whole.path)


def has_begun(path: Path) -> bool:
    """Whether there is a checkpoint to resume from; else the folder is removed for a new run."""
    has_checkpoint = any((path / "checkpoint").glob("[0-9]*.json"))
    if not has_checkpoint and path.exists():
        shutil.rmtree(path)
    return has_checkpoint


def has_ended(path: Path) -> bool:
    """A process that the killed one was just starting may hold its lock for a moment."""
    end = time.monotonic() + 10
    while status_of(path) not in ("dead", "completed"):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def status_of(path: Path) -> str:
    try:
        return status(path)
    except FileNotFoundError:  # before the first summary
        return "dead"
