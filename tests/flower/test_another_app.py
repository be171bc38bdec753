"""The example of another Flower app: its own model and data, each half of a method in one call."""

import logging
import re
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from flwr.app import Context, RecordDict

from tests.flower.conftest import REPOSITORY, Flower
from tests.grid import InProcessGrid

APP = REPOSITORY / "examples" / "another-app"


@pytest.mark.flower
@pytest.mark.timeout(600)
def test_under_flower(simulation: Flower) -> None:
    options = ("--federation-config", "num-supernodes=4 client-resources-num-cpus=1")
    outcome = simulation.run(APP, {}, *options)
    assert outcome.status == "finished:completed", outcome.output
    check(outcome.output)


def test_in_process(app: None, caplog: pytest.LogCaptureFixture) -> None:
    client_app = import_module("anotherapp.client_app").app
    server_app = import_module("anotherapp.server_app").app
    torch.manual_seed(1)  # of the clients' own DataLoaders
    config = {"num-server-rounds": 3}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    with InProcessGrid(client_app, 6) as grid, caplog.at_level(logging.INFO, "flwr"):
        server_app(grid, context)
    check(caplog.text)


def check(output: str) -> None:
    assert "dropped" not in output
    rounds = re.findall(r"round (\d)/3\].* accuracy ([\d.]+)", output)
    assert [number for number, _ in rounds] == ["0", "1", "2", "3"]
    assert float(rounds[0][1]) < 0.3
    (last,) = re.findall(r"accuracy of the trained model: ([\d.]+)", output)
    assert float(last) > 0.7
    assert float(last) == pytest.approx(float(rounds[3][1]), abs=1e-3)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The app's package can be imported, and is forgotten afterwards."""
    monkeypatch.syspath_prepend(APP)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "anotherapp"]:
        del sys.modules[name]
