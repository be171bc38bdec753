"""Processes of Flower that hang or die during a run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedaccord import simulate
from tests.flower.conftest import Flower, copy_app

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(600)]

APP = Path(__file__).parent / "app"
SMALL: dict[str, Any] = {
    "algo": "fedavg",
    "model": "linear",
    "fraction-train": 1.0,
    "local-epochs": 1,
    "threads": 1,
    "device": "cpu",
}
TOPK = {"compress.method": "topk", "compress.share": 0.05}


@contextmanager
def running(home: Path, faults: dict[str, str], *, simulation: bool) -> Iterator[Flower]:
    flower = Flower(home, simulation=simulation)
    flower.env["FEDACCORD_FAULTS"] = json.dumps(faults)
    try:
        flower.start()
        yield flower
    finally:
        flower.stop()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The app with the faults."""
    return copy_app(APP, tmp_path / "app", "faultyapp")


@pytest.mark.parametrize("method", [{}, TOPK, TOPK | {"algo": "scaffold"}])
def test_a_hanging_client_and_a_killed_supernode_are_absent(
    app: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    """The round continues without them at its deadline; the model is that of a run without them."""
    faults, settings = {"1": "hang", "2": "kill-node"}, SMALL | method
    config = settings | {"num-server-rounds": 2, "round-timeout": 100.0, "name": "there"}
    with running(tmp_path / "home", faults, simulation=False) as flower:
        flower.start_supernodes(*(f"partition-id={i} num-partitions=3" for i in range(3)))
        outcome = flower.run(app, config | {"out-dir": str(tmp_path)})
    assert outcome.status == "finished:completed", outcome.output
    rows = pd.read_csv(tmp_path / "there" / "clients.csv")
    first, second = (rows[rows["round"] == t].set_index("client")["status"] for t in (1, 2))
    assert [*first] == ["ok"] * 3
    assert (second[0], second[1]) == ("ok", "no reply in time")
    assert second[2] != "ok"  # Flower reports a node that is gone after a minute at most

    expected = simulate(
        rounds=2,
        participation=[[0, 1, 2], [0]],
        num_clients=3,
        **{k: v for k, v in settings.items() if k != "fraction-train"},
    ).model
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_a_superlink_that_fails_after_it_stored_messages_delivers_each_once(
    app: Path, tmp_path: Path
) -> None:
    config = SMALL | {"algo": "scaffold", "num-server-rounds": 2, "name": "there"}
    with running(tmp_path / "home", {"superlink": "fails"}, simulation=False) as flower:
        flower.start_supernodes(*(f"partition-id={i} num-partitions=2" for i in range(2)))
        outcome = flower.run(app, config | {"out-dir": str(tmp_path)})
    assert outcome.status == "finished:completed", outcome.output
    rows = pd.read_csv(tmp_path / "there" / "clients.csv")
    assert [*rows["status"]] == ["ok"] * 4
    expected = simulate(rounds=2, num_clients=2, **SMALL | {"algo": "scaffold"}).model
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_a_killed_worker_of_the_simulation_ends_the_run_with_one_line(
    app: Path, tmp_path: Path
) -> None:
    """Flower would continue with the clients that its other workers reach."""
    config = SMALL | {"num-server-rounds": 30, "name": "there", "out-dir": str(tmp_path)}
    clients = "num-supernodes=8 client-resources-num-cpus=1 init-args-num-cpus=2"
    with running(tmp_path / "home", {"0": "kill-process"}, simulation=True) as flower:
        outcome = flower.run(app, config, "--federation-config", clients)
    assert outcome.status == "finished:failed", outcome.output
    summary = json.loads((tmp_path / "there" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["reason"].startswith("a worker process of Flower's simulation died")
    assert len(pd.read_csv(tmp_path / "there" / "metrics.csv")) < 10
