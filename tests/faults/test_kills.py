"""Twenty kills of a run under `flwr run`, at any moment, change no bit of it."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fedaccord import engine, runs
from fedaccord.config import RunConfig
from fedaccord.runs.checkpoint import Checkpoints
from tests.engine.test_kills import has_begun
from tests.flower.conftest import REPOSITORY, assert_same_run, running, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(3000)]

KILLS, ROUNDS = 20, 400


@pytest.mark.parametrize(
    "method",
    [
        {"algo": "scaffold", "relaxed-init.beta": 0.05},
        {"algo": "fedavg", "compress.method": "topk", "compress.share": 0.05},
    ],
    ids=["scaffold", "compressed"],
)
def test_twenty_kills_under_flower_change_no_bit(tmp_path: Path, method: dict[str, Any]) -> None:
    """SIGKILL of the process that holds ServerApp and clients; what they knew is on disk."""
    path, rng = tmp_path / "there", random.Random(0)
    config: dict[str, Any] = {
        **method,
        "model": "linear",
        "fraction-train": 0.5,
        "local-epochs": 1,
        "num-server-rounds": ROUNDS,
        "eval-every": 10,
        "checkpoint-every": 1,
        "threads": 1,
        "device": "cpu",
        "state-dir": str(tmp_path / "states"),
        "out-dir": str(tmp_path),
    }
    before = 0
    with running(tmp_path / "home", simulation=True) as flower:
        for _ in range(KILLS):
            start = rounds(path)
            resume = has_begun(path)
            flower.submit(REPOSITORY, config | {"name": "there", "resume": resume})
            wait_until(lambda last=before: process(path) not in (0, last), "a run", flower.log)
            before, goal = process(path), start + rng.randrange(4)  # 0: while it starts
            wait_until(lambda goal=goal: rounds(path) >= goal, "rounds", flower.log)
            time.sleep(rng.uniform(0.0, 0.5))
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: runs.status(path) != "running", "its end", flower.log)
            assert runs.status(path) == "dead", "it came to its end before the last kill"
        outcome = flower.run(REPOSITORY, config | {"name": "there", "resume": has_begun(path)})
        assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2, "vectorize": "off"}))
    assert_same_run(path, tmp_path / "here")


def rounds(path: Path) -> int:
    """Rounds in the last checkpoint; 0: there is none."""
    return max(Checkpoints(path / "checkpoint").numbers(), default=0)


def process(path: Path) -> int:
    """The process that the run directory's lock names; 0: none yet."""
    try:
        return int(json.loads((path / ".lock").read_text())["pid"])
    except (FileNotFoundError, json.JSONDecodeError):
        return 0
