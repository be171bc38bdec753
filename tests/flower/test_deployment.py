"""The repository's app on a SuperLink and SuperNodes, one process each, as on real devices."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedaccord import engine, simulate
from fedaccord.config import RunConfig
from fedaccord.federation.errors import last_line
from fedaccord.wire.records import pack
from fedaccord.wire.tensor_array import to_tensor
from tests.flower.conftest import REPOSITORY, Flower, assert_same_run, copy_app, running

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]

STATES = Path(__file__).parent / "states"
SCAFFOLD = {
    "algo": "scaffold",
    "relaxed-init.beta": 0.05,
    "fraction-train": 1.0,
    "num-server-rounds": 2,
    "local-epochs": 1,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    """A SuperNode of Flower's, and one of `fedaccord device`, whose clients are forked."""
    with running(tmp_path_factory.mktemp("deployment") / "home", simulation=False) as flower:
        zero, one = (f"partition-id={i} num-partitions=2" for i in range(2))
        flower.start_nodes(flower.node(zero), flower.node(one, "fedaccord", "device"))
        yield flower


def test_same_bits_and_client_states_as_in_process(two: Flower, tmp_path: Path) -> None:
    """A client's state lives in its SuperNode's memory, by run, and dies with it. To read it, the
    app runs with two components around FedAccord's: when the rounds are over, the server asks and
    each client reports.
    """
    config: dict[str, Any] = SCAFFOLD | {"out-dir": str(tmp_path)}
    outcome = two.run(copy_app(STATES, tmp_path / "app", "statesapp"), config | {"name": "there"})
    assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2, "vectorize": "off"}))
    assert_same_run(tmp_path / "there", tmp_path / "here")

    history = simulate("scaffold", rounds=2, **settings(SCAFFOLD), num_clients=2)
    for client, state in enumerate(history.clients):
        tensors = load_file(tmp_path / "there" / f"client-{client}.safetensors")
        expected = pack(state)
        assert tensors.keys() == expected.keys() == {"last", "base.c_i"}
        for name, array in expected.items():
            assert torch.equal(tensors[name], to_tensor(array)), (client, name)
            assert tensors[name].count_nonzero()

    reason = last_line((tmp_path / "there" / "unknown-rule.txt").read_text())
    assert "expected a message with a LocalRule that this client knows, got 'antigravity" in reason


@pytest.mark.slow
def test_without_a_server_on_the_same_supernodes(two: Flower, tmp_path: Path) -> None:
    """Gossip through the relay, masks, and personal models evaluated at their nodes. It is also the
    second run on these SuperNodes, which must begin anew.
    """
    config: dict[str, Any] = SCAFFOLD | {
        "algo": "dispfl",
        "evaluation": "clients",  # the server reads no data
        "relaxed-init.beta": 0.0,
        "eval-every": 2,
    }
    config |= {"out-dir": str(tmp_path)}
    outcome = two.run(REPOSITORY, config | {"name": "there"})
    assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2, "vectorize": "off"}))
    assert_same_run(tmp_path / "there", tmp_path / "here")
    summary = json.loads((tmp_path / "there/summary.json").read_text())
    assert {"personal-accuracy-last", "client-accuracy-last"} <= summary.keys()


def test_a_wrong_setting_fails_with_one_line(two: Flower, tmp_path: Path) -> None:
    outcome = two.run(REPOSITORY, {"algo": "fedinot", "out-dir": str(tmp_path)})
    assert outcome.status == "finished:failed", outcome.output
    (line,) = [line for line in outcome.output.splitlines() if "fedinot" in line]
    assert "Traceback" not in outcome.output
    assert "algo: expected one of" in line
    assert "did you mean 'fedinit'?" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_node_that_does_not_know_its_number_says_so(lab: Flower, tmp_path: Path) -> None:
    lab.start_supernodes("num-partitions=3")
    outcome = lab.run(REPOSITORY, SCAFFOLD | {"out-dir": str(tmp_path), "name": "there"})
    assert outcome.status == "finished:failed", outcome.output
    reason = "no client could start: expected an integer 'partition-id' in this node's config, got "
    (line,) = [line for line in outcome.output.splitlines() if reason in line]
    assert "--node-config" in line
    assert json.loads((tmp_path / "there" / "summary.json").read_text())["status"] == "failed"


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a run config that `simulate` takes as they are."""
    return {k: v for k, v in config.items() if k not in ("algo", "num-server-rounds")}
