"""The repository's app in Flower's simulation gives the bits of the in-process run."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedaccord import engine
from fedaccord.config import RunConfig
from tests.flower.conftest import REPOSITORY, Flower, assert_same_run

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]

SMALL = {"num-server-rounds": 3, "threads": 1, "device": "cpu", "local-epochs": 1}


def run_both(simulation: Flower, config: dict[str, Any], folder: Path, num_clients: int) -> str:
    """What Flower streams; its run directory must hold the same as that of `engine.run`."""
    config = SMALL | config | {"out-dir": str(folder)}
    resources = f"num-supernodes={num_clients} client-resources-num-cpus=1"
    options = [] if num_clients == 2 else ["--federation-config", resources]
    outcome = simulation.run(REPOSITORY, config | {"name": "ray"}, *options)
    assert outcome.status == "finished:completed", outcome.output
    here = {"name": "here", "num-clients": num_clients, "vectorize": "off"}
    engine.run(RunConfig.make(config | here))
    assert_same_run(folder / "ray", folder / "here")
    commits = [
        tomllib.loads((folder / x / "config.toml").read_text())["commit"] for x in ("ray", "here")
    ]
    assert commits[0] == commits[1]  # also of the copy that Flower runs
    return outcome.output


def test_same_bits_with_a_server_and_two_supernodes_by_default(
    simulation: Flower, tmp_path: Path
) -> None:
    """A-FedPD tells a client what it missed; the plug-in's state is around its dual."""
    config: dict[str, Any] = {"algo": "afedpd", "relaxed-init.beta": 0.05, "fraction-train": 0.5}
    output = run_both(simulation, config, tmp_path, 2)
    assert "2 clients connected" in output


def test_same_bits_without_a_server(simulation: Flower, tmp_path: Path) -> None:
    config = {"algo": "dfedsam-mgs", "gossip.topology": "random", "relaxed-init.beta": 0.05}
    run_both(simulation, config, tmp_path, 5)
