"""`fedaccord submit` while its SuperLink is killed and started again."""

import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedaccord import engine
from fedaccord.config import RunConfig
from tests.flower.conftest import REPOSITORY, Flower, assert_same_run, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(1200)]

ROUNDS = 3


def test_a_run_goes_on_after_its_superlink_was_killed(lab: Flower, tmp_path: Path) -> None:
    """The result is that of a run without: the clients' states are those of the checkpoint."""
    run = tmp_path / "there"
    nodes = [f'partition-id={i} num-partitions=2 state-dir="{tmp_path}/node-{i}"' for i in (0, 1)]
    lab.start_supernodes(*nodes)

    def kill_and_restart() -> None:
        wait_until(lambda: rows(run) > 1, "a round", lab.log)
        superlink = lab.processes.pop(0)
        superlink.send_signal(signal.SIGKILL)
        superlink.wait()
        lab.start()
        lab.processes.insert(0, lab.processes.pop())

    thread = threading.Thread(target=kill_and_restart)
    thread.start()
    config: dict[str, Any] = {
        "algo": "scaffold",
        "relaxed-init.beta": 0.05,
        "fraction-train": 1.0,
        "num-server-rounds": ROUNDS,
        "local-epochs": 1,
        "checkpoint-every": 1,
        "threads": 1,
        "device": "cpu",
        "out-dir": str(tmp_path),
    }
    words = [f"{key}={value}" for key, value in (config | {"name": "there"}).items()]
    result = subprocess.run(
        ["fedaccord", "submit", "lab", "--app", REPOSITORY, *words],
        cwd=tmp_path,
        env=lab.env,
        capture_output=True,
        text=True,
        check=False,
    )
    thread.join()
    assert result.returncode == 0, result.stdout + result.stderr + lab.log()
    assert re.search(r"run \d+ stopped: ", result.stderr)
    clients = pd.read_csv(run / "clients.csv")
    assert (clients["status"] == "ok").all()
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2, "vectorize": "off"}))
    assert_same_run(run, tmp_path / "here")


def rows(run: Path) -> int:
    file = run / "metrics.csv"
    return len(file.read_text().splitlines()) - 1 if file.exists() else 0
