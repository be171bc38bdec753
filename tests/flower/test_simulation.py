"""The repository's app in Flower's simulation gives the bits of the in-process run."""

from pathlib import Path
from typing import Any

import pytest

from fedaccord import engine
from fedaccord.config import RunConfig
from tests.flower.conftest import REPOSITORY, Flower, assert_same_run

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]

SMALL = {"num-server-rounds": 3, "threads": 1, "device": "cpu", "local-epochs": 2}


@pytest.mark.parametrize(
    "config",
    [
        {"algo": "scaffold", "relaxed-init.beta": 0.05},
        {"algo": "afedpd", "fraction-train": 0.5},
        {"algo": "dfedsam-mgs", "gossip.topology": "grid", "relaxed-init.beta": 0.05},
        {"algo": "dispfl", "gossip.topology": "random", "dispfl.regrow": "random"},
    ],
    ids=lambda config: str(config["algo"]),
)
def test_same_bits_as_in_process(
    simulation: Flower, tmp_path: Path, config: dict[str, Any]
) -> None:
    config = SMALL | config | {"out-dir": str(tmp_path)}
    outcome = simulation.run(
        REPOSITORY,
        config | {"name": "ray"},
        "--federation-config",
        "num-supernodes=12 client-resources-num-cpus=1",
    )
    assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 12}))
    assert_same_run(tmp_path / "ray", tmp_path / "here")


def test_two_supernodes_by_default(simulation: Flower, tmp_path: Path) -> None:
    config = SMALL | {"algo": "fedinit", "num-server-rounds": 1, "out-dir": str(tmp_path)}
    outcome = simulation.run(REPOSITORY, config | {"name": "ray"})
    assert outcome.status == "finished:completed", outcome.output
    assert "2 clients connected" in outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2}))
    assert_same_run(tmp_path / "ray", tmp_path / "here")


def test_wrong_setting_fails_with_one_line(simulation: Flower, tmp_path: Path) -> None:
    outcome = simulation.run(REPOSITORY, {"algo": "fedinot", "out-dir": str(tmp_path)})
    assert outcome.status == "finished:failed", outcome.output
    (line,) = [line for line in outcome.output.splitlines() if "fedinot" in line]
    assert "algo: expected one of" in line
    assert "did you mean 'fedinit'?" in line
    assert not list(tmp_path.iterdir())
