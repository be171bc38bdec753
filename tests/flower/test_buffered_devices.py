"""Buffered rounds on real SuperNodes: one is slow, one is killed, and so is the server."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from safetensors.torch import load_file

from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.storage.disk import DiskStore
from fedaccord.storage.store import version
from tests.flower.conftest import REPOSITORY, Flower, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(1500)]

NODES, ROUNDS, FACTOR = 3, 60, 10
SETTINGS: dict[str, Any] = {
    **{"algo": "scaffold", "schedule": "buffered", "concurrency": NODES, "buffer-size": 1},
    **{"fraction-train": 1.0, "local-epochs": 1, "threads": 1, "device": "cpu", "name": "there"},
    **{"eval-every": ROUNDS, "checkpoint-every": 1, "num-server-rounds": ROUNDS},
    **{"round-timeout": 300.0, "max-failed-rounds": 20},
}


def test_a_slow_device_and_two_kills(lab: Flower, tmp_path: Path) -> None:
    """Nothing is counted twice: the server's c is the mean of the c_i that the devices store."""
    configs = [
        f'partition-id={i} num-partitions={NODES} state-dir="{tmp_path}/{i}"' for i in range(NODES)
    ]
    nodes = [lab.node(config, "fedaccord", "device") for config in configs]
    lab.start_nodes(*nodes)
    config, run = SETTINGS | {"out-dir": str(tmp_path)}, tmp_path / "there"

    def rounds_are(number: int) -> None:
        file = run / "metrics.csv"
        wait_until(
            lambda: file.exists() and len(file.read_text().splitlines()) > number + 1,
            *(f"{number} rounds", lab.log),
        )

    with slowed(psutil.Process(lab.processes[-1].pid)):
        first = lab.submit(REPOSITORY, config)
        rounds_are(3)
        supernode = lab.processes.pop(2)  # the SuperNode of client 1
        for process in (*psutil.Process(supernode.pid).children(recursive=True), supernode):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        supernode.wait()
        lab._start(*nodes[1], "--port", str(free_port()))
        rounds_are(8)
        for pid in lab._descendants():
            with suppress(OSError):
                if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        wait_until(lambda: lab._status(first).startswith("finished"), "the end", lab.log)
        end = len(pd.read_csv(run / "metrics.csv")) - 1
        assert end < ROUNDS
        outcome = lab.run(REPOSITORY, config | {"resume": True})
    assert outcome.status == "finished:completed", outcome.output

    rows = pd.read_csv(run / "clients.csv")
    assert not rows.duplicated(["round", "client"]).any()
    assert not rows["status"].str.contains("lost its state").any()
    ok = rows[rows["status"] == "ok"]
    assert {*ok["client"]} == {*range(NODES)}
    assert len(ok[ok["client"] == 2]) < len(ok[ok["client"] == 0])
    assert ok["staleness"].max() > 1
    assert 1 in {*ok[ok["round"] > end]["client"]}, "the killed SuperNode did not come back"

    last = Checkpoints(run / "checkpoint").load()
    c, c_i = last.server["server.c"], list[torch.Tensor]()
    for i, accepted in enumerate(last.server["accepted"].tolist()):
        match = version(DiskStore(tmp_path / str(i), last.facts["federation"]).load(i), accepted)
        assert match
        c_i.append(load_file(match.state.path)["c_i"])
    assert c.norm() > 0.01
    torch.testing.assert_close(torch.stack(c_i).mean(0), c, rtol=0, atol=1e-6)


@contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """A block in which a process and all that it starts run for a tenth of the time."""
    over = threading.Event()

    def send(which: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(which)

    def throttle() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            time.sleep(0.9)
            send(signal.SIGCONT)
            over.wait(0.9 / (FACTOR - 1))

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        send(signal.SIGCONT)
