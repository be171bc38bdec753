"""Secure sums in Flower's simulation, and on SuperNodes that are killed in each stage in turn."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedaccord import simulate
from fedaccord.secure.client import MASKED, SETUP, SHARE, UNMASK
from tests.faults.test_processes import app as app  # a fixture
from tests.faults.test_processes import running
from tests.flower import conftest
from tests.flower.conftest import Flower
from tests.flower.test_simulation import run_both

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(1800)]

NODES, ROUNDS = 7, 5
FAULTS = {
    "6": f"kill-node {SETUP} 0",
    "5": f"kill-node {SHARE} 1",
    "4": f"kill-node {MASKED} 2",
    "3": f"kill-node {UNMASK} 3",
    "2": f"kill-node {SETUP} 4",
}
SETTINGS: dict[str, Any] = {
    "algo": "scaffold",
    "secure-sum.method": "secagg+",
    "local-epochs": 1,
    "threads": 1,
    "device": "cpu",
    "eval-every": ROUNDS,
}


def test_nodes_that_are_killed_in_each_stage_in_turn_are_absent_and_nothing_else(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of them leaves two, whose sum no one may read."""
    monkeypatch.setattr(conftest, "PATIENCE", 1700.0)
    run, config = (
        tmp_path / "there",
        SETTINGS | {"fraction-train": 1.0, "num-server-rounds": ROUNDS},
    )
    with running(tmp_path / "home", FAULTS, simulation=False) as flower:
        flower.start_supernodes(*(f"partition-id={i} num-partitions={NODES}" for i in range(NODES)))
        more = {"round-timeout": 600.0, "out-dir": str(tmp_path), "name": "there"}
        outcome = flower.run(app, SETTINGS | config | more)
    assert outcome.status == "finished:completed", outcome.output
    lines = [line for line in outcome.output.splitlines() if " failed: " in line]
    assert len(lines) == 1
    assert "round 5 failed: secure-sum: expected at least 3 clients after the stage " in lines[0]

    rows = pd.read_csv(run / "clients.csv")
    good = {(r["round"] - 1, r["client"]) for _, r in rows.iterrows() if r["status"] == "ok"}
    ends = {6: 0, 5: 1, 4: 2, 3: 4}  # the round from which on a client is absent
    present = {(t, i) for t in range(4) for i in range(NODES) if t < ends.get(i, ROUNDS)}
    assert good == present
    assert json.loads((run / "summary.json").read_text())["rounds-counted"] == 4
    expected = simulate(
        **SETTINGS,
        rounds=4,
        num_clients=NODES,
        participation=[[i for i in range(NODES) if (t, i) in present] for t in range(4)],
    )
    for name, value in load_file(run / "model.safetensors").items():
        assert torch.equal(value, expected.model[name]), name


def test_the_simulation_gives_the_bits_of_a_run_in_process(
    simulation: Flower, tmp_path: Path
) -> None:
    config = {"algo": "scaffold", "secure-sum.method": "secagg+", "fraction-train": 1.0}
    run_both(simulation, config, tmp_path, 4)
