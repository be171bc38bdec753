"""`fedaccord device`: a run on SuperNodes whose ClientApps are forked from a warm process."""

import os
import signal
from pathlib import Path

import pytest

from fedaccord import engine
from fedaccord.config import RunConfig
from tests.flower.conftest import REPOSITORY, Flower, assert_same_run, wait_until
from tests.flower.test_deployment import SCAFFOLD

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_same_run_and_nothing_stays(lab: Flower, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    lab.env["TMPDIR"] = str(private)
    node_configs = [
        f'partition-id={i} num-partitions=2 state-dir="{tmp_path}/state-{i}" max-local-steps=99'
        for i in range(2)
    ]
    lab.start_nodes(*(lab.node(config, "fedaccord", "device") for config in node_configs))
    config = SCAFFOLD | {"out-dir": str(tmp_path)}
    outcome = lab.run(REPOSITORY, config | {"name": "there"})
    assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2, "vectorize": "off"}))
    assert_same_run(tmp_path / "there", tmp_path / "here")
    assert all([*(tmp_path / f"state-{i}").glob("*/*/*")] for i in range(2))
    assert "the warm process is gone" not in lab.log()

    outcome = lab.run(REPOSITORY, config | {"name": "too many", "local-steps": 100})
    assert outcome.status == "finished:failed"
    assert "max-local-steps: expected at most 99 steps a round" in outcome.output

    *_, first, second = lab.processes
    (warm,) = (pid for pid in children(first.pid) if not is_caller(pid))
    os.kill(warm, signal.SIGKILL)
    outcome = lab.run(REPOSITORY, config | {"name": "once more"})
    assert outcome.status == "finished:completed", outcome.output
    assert_same_run(tmp_path / "once more", tmp_path / "there")
    assert "the warm process is gone" in lab.log()

    first.terminate()  # without its warm process
    second.kill()  # with it
    for process in (first, second):
        process.wait(60)
    wait_until(lambda: not [*private.iterdir()], "the folders to go", lab.log)
    wait_until(lambda: not alive(str(private)), "the processes to end", lab.log)


def children(parent: int) -> list[int]:
    files = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def is_caller(pid: int) -> bool:
    return b"hand_over.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


def alive(folder: str) -> list[str]:
    """Processes that still have the folder as TMPDIR, beside the SuperLink's."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if f"TMPDIR={folder}".encode() in environment and b"device" in command:
            pids.append(path.name)
    return pids
