"""Ray gives the rows of one process; ASHA, whose choices depend on timing."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pandas as pd
import pytest

from fedaccord.experiments.sweep import Sweep
from fedaccord.experiments.sweep.plan import SweepOptions
from fedaccord.runs import lock
from tests.experiments.sweep.plans import finish, make, table
from tests.experiments.sweep.test_trial import job
from tests.ports import free_port

on_ray = pytest.importorskip("fedaccord.experiments.sweep.on_ray", reason="needs Ray")
pytestmark = pytest.mark.flower  # it starts Ray
SPACE = {"algo": ["fedavg"], "lr": {"low": 0.01, "high": 0.3, "log": True}}


@pytest.mark.slow  # a minute
def test_ray_gives_the_table_of_one_process(tmp_path: Path) -> None:
    own = {"search": "halving", "trials": 3, "eta": 2, "rungs": 2}
    finish(make(SPACE, **own), tmp_path / "one")
    finish(make(SPACE, **own, workers=2, ray_address="local"), tmp_path / "ray")
    for name in ("table.csv", "winners.csv"):
        pd.testing.assert_frame_equal(table(tmp_path / "ray", name), table(tmp_path / "one", name))
    assert not (tmp_path / "ray" / "ray").exists()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that was started from outside, as one with several machines is.

    Its folder is its own: in the usual one it would leave its address, which every other program
    that starts Ray then tries for minutes.
    """
    port = free_port()
    log = tmp_path_factory.mktemp("cluster") / "log"
    words = ("start", "--head", "--block", f"--port={port}", "--num-cpus=2")
    quiet = ("--include-dashboard=false", "--disable-usage-stats")
    folder = mkdtemp()  # a short path: names of sockets follow
    ray = [str(Path(sys.executable).parent / "ray"), *words, *quiet, f"--temp-dir={folder}"]
    with log.open("w") as file:
        process = subprocess.Popen(ray, stdout=file, stderr=file, start_new_session=True)
    try:
        for _ in range(600):
            if "Ray runtime started" in log.read_text():
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # Ray's other processes end with it
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_cluster_gives_the_table_of_one_process(cluster: str, tmp_path: Path) -> None:
    finish(make(SPACE, search="random", trials=2), tmp_path / "one")
    own = {"search": "random", "trials": 2, "ray_address": cluster}
    with pytest.raises(ValueError, match=r"cpus: expected at most 2, the CPUs that Ray has"):
        finish(make(SPACE, **own, cpus=3.0), tmp_path / "ray")
    finish(make(SPACE, **own), tmp_path / "ray")
    for name in ("table.csv", "winners.csv"):
        pd.testing.assert_frame_equal(table(tmp_path / "ray", name), table(tmp_path / "one", name))


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path) -> None:
    """Ray itself would retry for minutes."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match="ray-address: expected local, auto or HOST:PORT"):
            finish(make(SPACE, search="random", trials=1, ray_address=address), tmp_path)


@pytest.mark.slow
def test_asha_completes_some_trials_and_one_of_them_wins(tmp_path: Path) -> None:
    own = {"search": "asha", "trials": 4, "eta": 2, "rungs": 2, "ray_address": "local"}
    finish(make(SPACE, **own), tmp_path)
    trials = table(tmp_path)
    tuned = trials[trials.stage == "tune"]
    assert len(tuned) == 4
    assert set(tuned.rounds) <= {2, 3}
    winner = table(tmp_path, "winners.csv").iloc[0]
    assert winner.trial in set(tuned[tuned.status == "completed"].trial)
    assert winner.configurations == 4


def test_a_trial_of_a_machine_that_was_lost_waits_until_its_lock_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(tmp_path)
    one.path.mkdir(parents=True)
    lost = {"host": "another", "boot": "", "pid": 1, "started": 0, "locked": True}
    (one.path / ".lock").write_text(json.dumps(lost))
    monkeypatch.setattr(lock, "STALE", 1.0)
    assert [row["status"] for row in on_ray._rung([one])] == ["completed"]


def test_asha_continues_the_best_trials_so_far() -> None:
    """One in three of the trials at the rung so far; the first one; no failed one."""
    goes_on = on_ray.best_so_far(
        SweepOptions(search="asha", ray_address="x", metric="accuracy-last")
    )
    key, scores = "validation-accuracy-last", (0.5, 0.4, 0.45, 0.6, None, 0.55, 0.58)
    rows = [{"status": "completed" if x else "failed", key: x} for x in scores]
    assert [goes_on(0, [row]) for row in rows] == [True, False, False, True, False, True, True]
    assert goes_on(1, rows[1:2])  # another rung


def test_a_trial_that_stopped_early_does_not_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its score is that of fewer rounds."""

    def asha(options: SweepOptions, methods: Any, on_row: Any) -> None:
        ((first, second),) = methods
        for (one,), score in ((first[0], 0.5), (first[1], 0.6), (second[0], 0.9)):
            one.file.parent.mkdir(exist_ok=True)
            row = {"status": "completed", "reason": "", "validation-accuracy-last": score}
            one.file.write_text(json.dumps(row))

    monkeypatch.setattr(on_ray, "asha", asha)
    own = {"search": "asha", "trials": 2, "eta": 2, "rungs": 2, "metric": "accuracy-last"}
    plan = make(SPACE, **own, ray_address="local")
    (winner,) = Sweep(plan, tmp_path, lambda _: None)._asha()
    assert winner.configuration.name == plan.configurations("fedavg")[0].name
    assert winner.score == 0.6


def test_asha_without_any_row_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the processes of all trials had been killed."""
    monkeypatch.setattr(on_ray, "asha", lambda *_: None)
    own = {"search": "asha", "trials": 2, "eta": 2, "rungs": 2, "ray_address": "local"}
    with pytest.raises(ValueError, match=r"^fedavg: none of its runs completed"):
        finish(make(SPACE, **own), tmp_path)
