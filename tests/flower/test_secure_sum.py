"""Secure sums on SuperNodes, one of which is killed in the middle of a run."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedaccord import simulate
from tests.flower.conftest import REPOSITORY, Flower, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(900)]

NODES, ROUNDS = 5, 4
SETTINGS: dict[str, Any] = {
    "algo": "scaffold",
    "secure-sum.method": "secagg+",
    "fraction-train": 1.0,
    "local-epochs": 1,
    "threads": 1,
    "device": "cpu",
    "eval-every": ROUNDS,
}


def test_a_node_that_is_killed_is_absent_and_nothing_else(lab: Flower, tmp_path: Path) -> None:
    """The weights are those of a run in process in which the client was absent from then on."""
    run = tmp_path / "there"
    lab.start_supernodes(*(f"partition-id={i} num-partitions={NODES}" for i in range(NODES)))

    def one_round() -> bool:
        file = run / "metrics.csv"
        return file.exists() and len(file.read_text().splitlines()) > 2

    def kill() -> None:
        wait_until(one_round, "a round", lab.log)
        process = lab.processes.pop()
        process.send_signal(signal.SIGKILL)
        process.wait()

    thread = threading.Thread(target=kill)
    thread.start()
    config = SETTINGS | {"num-server-rounds": ROUNDS, "round-timeout": 120.0}
    outcome = lab.run(REPOSITORY, config | {"out-dir": str(tmp_path), "name": "there"})
    thread.join()
    assert outcome.status == "finished:completed", outcome.output

    rows = pd.read_csv(run / "clients.csv")
    good = {(r["round"] - 1, r["client"]) for _, r in rows.iterrows() if r["status"] == "ok"}
    away = {(t, i) for t in range(ROUNDS) for i in range(NODES)} - good
    assert away
    assert {i for _, i in away} == {NODES - 1}
    assert json.loads((run / "summary.json").read_text())["rounds-counted"] == ROUNDS
    expected = simulate(
        **SETTINGS,
        rounds=ROUNDS,
        num_clients=NODES,
        faults=lambda t, i: "lost-message" if (t, i) in away else None,
    )
    for name, value in load_file(run / "model.safetensors").items():
        assert torch.equal(value, expected.model[name]), name
