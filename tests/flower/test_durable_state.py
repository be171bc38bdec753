"""A SuperNode that is killed and started again still has its client's state: ``state-dir``."""

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

ROUNDS = 6
SETTINGS: dict[str, Any] = {
    "fraction-train": 1.0,
    "threads": 1,
    "device": "cpu",
    "eval-every": ROUNDS,
}


@pytest.mark.parametrize(
    "method",
    [
        {"algo": "scaffold", "relaxed-init.beta": 0.05, "local-epochs": 1},
        {"algo": "afedpd", "local-epochs": 1},
        {
            **{"algo": "scaffold", "local-steps": 3, "broadcast.dtype": "int8"},
            **{"compress.method": "topk", "compress.share": 0.05},
        },
    ],
)
def test_a_killed_supernode_comes_back_with_its_state(
    lab: Flower, tmp_path: Path, method: dict[str, Any]
) -> None:
    """The weights are those of a run in which the client was absent while it was away."""
    nodes = [f'partition-id={i} num-partitions=2 state-dir="{tmp_path}/node-{i}"' for i in (0, 1)]
    lab.start_supernodes(*nodes)
    run = tmp_path / "there"

    def rounds_are(number: int) -> bool:
        file = run / "metrics.csv"
        return file.exists() and len(file.read_text().splitlines()) > number + 1

    def kill_and_restart() -> None:
        wait_until(lambda: rounds_are(2), "two rounds", lab.log)
        process = lab.processes.pop()
        process.send_signal(signal.SIGKILL)
        process.wait()
        lab.start_more_supernodes(nodes[1])

    thread = threading.Thread(target=kill_and_restart)
    thread.start()
    config = SETTINGS | method | {"num-server-rounds": ROUNDS, "round-timeout": 120.0}
    outcome = lab.run(REPOSITORY, config | {"out-dir": str(tmp_path), "name": "there"})
    thread.join()
    assert outcome.status == "finished:completed", outcome.output

    rows = pd.read_csv(run / "clients.csv")
    away = {
        (row["round"] - 1, row["client"]) for _, row in rows.iterrows() if row["status"] != "ok"
    }
    visits = {(row["round"] - 1, row["client"]) for _, row in rows.iterrows()}
    away |= {(t, i) for t in range(ROUNDS) for i in (0, 1)} - visits  # offline when it was drawn
    assert away
    assert (ROUNDS - 1, 1) not in away, "it did not come back in time"
    assert not rows["status"].str.contains("lost its state").any()
    assert json.loads((run / "summary.json").read_text())["rounds-counted"] == ROUNDS

    expected = simulate(
        **SETTINGS | method,
        rounds=ROUNDS,
        num_clients=2,
        faults=lambda t, i: "lost-message" if (t, i) in away else None,
    )
    for name, tensor in load_file(run / "model.safetensors").items():
        assert torch.equal(tensor, expected.model[name]), name
