"""The example of another Flower app: its own model and data, each half of a method in one call."""

import logging
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from fedaccord.strategies import FedAvg, FedProx, Scaffold
from tests.flower.conftest import REPOSITORY, Flower
from tests.grid import InProcessGrid

APP = REPOSITORY / "examples" / "another-app"


CLIENTS = re.compile(r"\[round (\d)\] (\d) clients evaluate: .*eval_acc ([\d.]+)")


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_flowers_simulation(simulation: Flower) -> None:
    options = ("--federation-config", "num-supernodes=4 client-resources-num-cpus=1")
    outcome = simulation.run(APP, {}, *options)
    assert outcome.status == "finished:completed", outcome.output
    check(outcome.output, rounds=3, clients=2)


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_two_supernodes(lab: Flower) -> None:
    lab.start_supernodes(*(f"partition-id={i} num-partitions=2" for i in range(2)))
    outcome = lab.run(
        APP, {"num-server-rounds": 2, "fraction-train": 1.0, "fraction-evaluate": 1.0}
    )
    assert outcome.status == "finished:completed", outcome.output
    check(outcome.output, rounds=2, clients=2)


@pytest.mark.parametrize("kind", [Scaffold, FedAvg, FedProx])
def test_another_strategy_is_another_name(
    app: None, kind: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_app = import_module("anotherapp.client_app").app
    server = import_module("anotherapp.server_app")
    monkeypatch.setattr(server, "Scaffold", kind)
    torch.manual_seed(1)  # of the clients' own DataLoaders
    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    with InProcessGrid(client_app, 6, config) as grid, caplog.at_level(logging.INFO, "flwr"):
        server.app(grid, context)
    check(caplog.text, rounds=3, clients=3)


def check(output: str, rounds: int, clients: int) -> None:
    assert "dropped" not in output
    assert "did not evaluate" not in output
    matches = re.findall(rf"round (\d)/{rounds}\].* accuracy ([\d.]+)", output)
    assert [int(number) for number, _ in matches] == [*range(rounds + 1)]
    assert float(matches[0][1]) < 0.3
    (last,) = re.findall(r"accuracy of the trained model: ([\d.]+)", output)
    assert float(last) > 0.7
    assert float(last) == pytest.approx(float(matches[-1][1]), abs=1e-3)
    evaluated = CLIENTS.findall(output)
    assert [(int(n), int(c)) for n, c, _ in evaluated] == [
        (number, clients) for number in range(1, rounds + 1)
    ]
    assert float(evaluated[-1][2]) == pytest.approx(float(last), abs=0.15)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The app's package can be imported, and is forgotten afterwards."""
    monkeypatch.syspath_prepend(APP)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "anotherapp"]:
        del sys.modules[name]
