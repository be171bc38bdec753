"""The repository's app in Flower's simulation gives the bits of the in-process run."""

import json
import os
import signal
import threading
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedaccord import engine, runs
from fedaccord.config import RunConfig
from fedaccord.runs.checkpoint import Checkpoints
from tests.cli.shell import invoke
from tests.flower.conftest import REPOSITORY, Flower, assert_same_run, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]

SMALL = {"num-server-rounds": 3, "threads": 1, "device": "cpu", "local-epochs": 1}


def run_both(simulation: Flower, config: dict[str, Any], folder: Path, num_clients: int) -> str:
    """What Flower streams; its run directory must hold the same as that of `engine.run`."""
    config = SMALL | config | {"out-dir": str(folder)}
    resources = f"num-supernodes={num_clients} client-resources-num-cpus=1"
    options = [] if num_clients == 2 else ["--federation-config", resources]
    outcome = simulation.run(REPOSITORY, config | {"name": "ray"}, *options)
    assert outcome.status == "finished:completed", outcome.output
    own = {"name": "here", "num-clients": num_clients, "vectorize": "off"}
    engine.run(RunConfig.make(config | own))
    assert_same_run(folder / "ray", folder / "here")
    commits = [
        tomllib.loads((folder / x / "config.toml").read_text())["commit"] for x in ("ray", "here")
    ]
    assert commits[0] == commits[1]  # also of the copy that Flower runs
    return outcome.output


def test_same_bits_with_a_server_and_two_supernodes_by_default(
    simulation: Flower, tmp_path: Path
) -> None:
    """A-FedPD sends a client what it missed; the plug-in's state is around its dual."""
    config: dict[str, Any] = {"algo": "afedpd", "relaxed-init.beta": 0.05, "fraction-train": 0.5}
    config |= {"evaluation": "both", "fraction-evaluate": 0.5}
    output = run_both(simulation, config, tmp_path, 2)
    assert "2 clients connected" in output


def test_same_bits_without_a_server(simulation: Flower, tmp_path: Path) -> None:
    config = {"algo": "dfedsam-mgs", "gossip.topology": "random", "relaxed-init.beta": 0.05}
    run_both(simulation, config, tmp_path, 5)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["server", "client"])
def test_same_bits_of_a_private_run(simulation: Flower, tmp_path: Path, where: str) -> None:
    """Noise and cohorts are drawn from the seed."""
    config: dict[str, Any] = {"algo": "scaffold", "sampling": "bernoulli", "fraction-train": 0.5}
    config |= {"dp.where": where, "local-steps": 2}
    output = run_both(simulation, config | {"dp.epsilon": 4.0, "dp.delta": 0.01}, tmp_path, 5)
    assert "noise from the seed" in output


def test_a_run_that_was_stopped_is_evaluated_and_resumed_in_process(
    simulation: Flower, tmp_path: Path
) -> None:
    """`flwr stop` kills a simulation: its model is that of its last checkpoint."""
    run = tmp_path / "stopped"
    config = SMALL | {"algo": "fedavg", "out-dir": str(tmp_path), "num-server-rounds": 2000}
    run_id = simulation.submit(REPOSITORY, config | {"name": "stopped", "checkpoint-every": 1})
    wait_until(lambda: any((run / "checkpoint").glob("[2-9]*.json")), "a round", simulation.log)
    simulation.stop_run(run_id)
    wait_until(lambda: runs.status(run) != "running", "the end of the run", simulation.log)
    result = invoke("evaluate", run)
    assert result.exit_code == 0, result.output
    rounds = Checkpoints(run / "checkpoint").numbers()[-1] + 1
    resumed = invoke("resume", run, f"num-server-rounds={rounds}")
    assert resumed.exit_code == 0, resumed.output
    own = {"name": "here", "num-clients": 2, "num-server-rounds": rounds}
    engine.run(RunConfig.make(config | own))
    assert_same_run(run, tmp_path / "here")


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(simulation: Flower, tmp_path: Path) -> None:
    """SIGKILL of the process that holds ServerApp and clients; what they knew is on disk."""
    run = tmp_path / "there"
    config: dict[str, Any] = SMALL | {
        "algo": "scaffold",
        "relaxed-init.beta": 0.05,
        "fraction-train": 0.5,
        "num-server-rounds": 40,  # seconds: time to look in between
        "checkpoint-every": 1,
        "state-dir": str(tmp_path / "states"),
        "out-dir": str(tmp_path),
    }

    def kill() -> None:
        wait_until(lambda: any((run / "checkpoint").glob("[2-9]*.json")), "a round", simulation.log)
        process = json.loads((run / ".lock").read_text())
        os.kill(process["pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    outcome = simulation.run(REPOSITORY, config | {"name": "there"})
    thread.join()
    assert outcome.status != "finished:completed", outcome.output
    assert runs.status(run) == "dead"
    number = Checkpoints(run / "checkpoint").numbers()[-1]
    assert 2 <= number < 40

    outcome = simulation.run(REPOSITORY, config | {"name": "there", "resume": True})
    assert outcome.status == "finished:completed", outcome.output
    engine.run(RunConfig.make(config | {"name": "here", "num-clients": 2, "vectorize": "off"}))
    assert_same_run(run, tmp_path / "here")
    rows = pd.read_csv(run / "clients.csv")
    assert (rows["status"] == "ok").all()
