"""The files of a run besides its tables, from which it resumes."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from flwr.app import Context, RecordDict

from fedaccord import client_app, engine, recorded_run, server_app, simulate
from fedaccord.config import RunConfig
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.runs import RunDirectory, load_model
from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.runs.logbook import Logbook, _next_attempt
from fedaccord.task import load_task
from tests.cli.shell import invoke, success
from tests.grid import InProcessGrid
from tests.own import save

SETTINGS: dict[str, Any] = {
    **{"algo": "fedavg", "dataset": "npz", "model": "linear", "name": "x", "num-clients": 3},
    **{"fraction-train": 1.0, "local-epochs": 1, "threads": 1, "wait-timeout": 8.0},
}


def sites(folder: Path, sizes: list[int]) -> list[Path]:
    """A file of training samples for each site."""
    return [save(folder / f"site-{i}.npz", size) for i, size in enumerate(sizes)]


def three(folder: Path) -> dict[int, Path]:
    """Three sites by the ids of their nodes."""
    return dict(zip((20, 30, 50), sites(folder, [10, 14, 18]), strict=True))


def federate(folder: Path, nodes: dict[int, Path], **settings: Any) -> Path:
    """A run over nodes, by node id, that have a data-path and no partition-id; its directory."""
    run = SETTINGS | {"out-dir": str(folder), "data-dir": str(next(iter(nodes.values())))}
    config = RunConfig.make(run | settings)
    with InProcessGrid(client_app.app, 0) as grid, engine.quiet():
        for node, path in nodes.items():
            grid.contexts[node] = Context(
                run_id=1,
                node_id=node,
                node_config={"data-path": str(path)},
                state=RecordDict(),
                run_config=config.flat,
            )
        task = load_task(config.task, num_clients=1, whole=True)

        def fleet(book: Logbook) -> MessageFleet:
            return MessageFleet(grid, partition_ids=book.partition_ids())

        return recorded_run.run(fleet, config, task, in_process=False).path


def test_nodes_keep_their_partition_ids_when_a_run_resumes(tmp_path: Path) -> None:
    nodes = dict(reversed(three(tmp_path).items()))
    path = federate(tmp_path, nodes, **{"num-server-rounds": 1})
    assert json.loads((path / "nodes.json").read_text()) == {"20": 0, "30": 1, "50": 2}
    (path / "nodes.json").write_text('{"20": 2, "30": 0, "50": 1}')  # in no order of the nodes
    federate(tmp_path, nodes, **{"num-server-rounds": 2, "resume": True})
    sizes = pd.read_csv(path / "clients.csv").pivot(index="round", columns="client")["num-examples"]
    assert sizes.to_numpy().tolist() == [[10, 14, 18], [14, 18, 10]]
    (path / "nodes.json").write_text('{"20": ')
    with pytest.raises(ValueError, match=r"nodes\.json: expected client numbers by node id, got"):
        federate(tmp_path, nodes, **{"num-server-rounds": 3, "resume": True})


def test_a_resumed_run_has_the_same_federation_and_a_larger_attempt(tmp_path: Path) -> None:
    nodes = three(tmp_path)
    names, attempts = set(), []
    for rounds, resume in ((1, False), (2, True), (3, True)):
        path = federate(tmp_path, nodes, **{"num-server-rounds": rounds, "resume": resume})
        names.add(Checkpoints(path / "checkpoint").load().facts["federation"])
        attempts.append(json.loads((path / "attempt.json").read_text())["attempt"])
    assert attempts == sorted({*attempts})
    (name,) = names
    assert name.startswith("x-")


def test_clients_in_process_keep_no_third_version_because_checkpoints_hold_their_states(
    tmp_path: Path,
) -> None:
    files = sites(tmp_path, [10, 14, 18])
    config = RunConfig.make(
        {**SETTINGS, "out-dir": str(tmp_path), "data-dir": str(files[0]), "checkpoint-every": 2}
        | {"num-server-rounds": 3, "algo": "scaffold"}
    )
    task = load_task(config.task, num_clients=3)
    fleet = LocalFleet(task)
    path = recorded_run.run(lambda _: fleet, config, task).path
    assert all(fleet.store.load(i).durable is None for i in fleet.store.clients())
    assert len(Checkpoints(path / "checkpoint").load().clients) == 3


def test_devices_keep_their_states_of_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable, requests = Logbook.durable, list[int]()

    def of_request(book: Logbook, client: int) -> int:
        requests.append(durable(book, client))
        return requests[-1]

    monkeypatch.setattr(Logbook, "durable", of_request)
    federate(tmp_path, three(tmp_path), **{"num-server-rounds": 5, "checkpoint-every": 2})
    assert requests == [-1] * 6 + [1] * 6 + [3] * 3


@pytest.mark.parametrize("clock", [0, 10**19])
def test_every_start_has_a_larger_number_than_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: int
) -> None:
    """Also if the clock was set back, or far ahead."""
    starts = [_next_attempt(tmp_path)]
    monkeypatch.setattr("time.time_ns", lambda: clock)
    starts += [_next_attempt(tmp_path) for _ in range(3)]
    monkeypatch.undo()
    starts.append(_next_attempt(tmp_path))
    assert starts == sorted({*starts})


@pytest.mark.parametrize("text", ["", "[]", '{"attempt": null}', "[" * 10**5])
def test_a_damaged_number_of_a_start_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "attempt.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"^\S*attempt\.json: expected the number of .* remove it$"
    ):
        _next_attempt(tmp_path)


def test_a_checkpoint_is_of_the_round_that_the_tables_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the row of round 2 cannot be written, its state gets no checkpoint."""
    nodes, record = three(tmp_path), RunDirectory.record

    def full(self: RunDirectory, metrics: Any, clients: Any) -> None:
        if metrics["round"] == 2:
            raise OSError(28, "No space left on device")
        record(self, metrics, clients)

    monkeypatch.setattr(RunDirectory, "record", full)
    with pytest.raises(OSError, match="No space left"):
        federate(tmp_path, nodes, **{"num-server-rounds": 3})
    assert Checkpoints(tmp_path / "x" / "checkpoint").numbers() == [1]


def test_a_run_of_devices_resumes_on_devices(tmp_path: Path) -> None:
    nodes = three(tmp_path)
    path = federate(tmp_path, nodes, **{"num-server-rounds": 1})
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    result = invoke("resume", path, "num-server-rounds=2")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "its clients are devices with their own data; resume it by `flwr" in result.stderr
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    federate(tmp_path, nodes, **{"num-server-rounds": 2, "resume": True})


def simulated(folder: Path, rounds: int, **settings: Any) -> Path:
    """A run whose clients Flower simulates, two of them; its directory."""
    folder.mkdir(exist_ok=True)
    run = SETTINGS | {"out-dir": str(folder), "dataset": "digits", "num-server-rounds": rounds}
    config = RunConfig.make(run | {"num-clients": 20} | settings)  # Flower's clients count
    with InProcessGrid(client_app.app, 2, run_config=config.flat) as grid, engine.quiet():
        vars(grid)["pull_interval"] = 0.1
        server_app.main(grid, Context(1, 0, {}, RecordDict(), config.flat))
    return folder / "x"


def test_a_run_of_simulated_clients_resumes_in_process(tmp_path: Path) -> None:
    path, whole = simulated(tmp_path / "parts", 2), simulated(tmp_path / "whole", 3)
    success(invoke("resume", path, "num-server-rounds=3"))
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    one, other = (pd.read_csv(p / "clients.csv").drop(columns="seconds") for p in (path, whole))
    pd.testing.assert_frame_equal(one, other)
    simulated(tmp_path / "parts", 4, resume=True)  # and by Flower again


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_of_simulated_clients_are_elsewhere(on_disk: bool, tmp_path: Path) -> None:
    state_dir = str(tmp_path / "states") if on_disk else ""
    more = {"algo": "scaffold", "state-dir": state_dir}
    path = simulated(tmp_path / "runs", 1, **more)
    result = invoke("resume", path, "num-server-rounds=2")
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    place = f"in state-dir={state_dir}" if on_disk else "in the memory of Flower's clients"
    assert f"scaffold has clients with states, which are {place}" in result.stderr
    assert "resume=true name='x'" in result.stderr
    keys = {k: v for k, v in SETTINGS.items() if k not in ("algo", "name", "wait-timeout")}
    with pytest.raises(ValueError, match="scaffold has clients with states"):
        simulate("scaffold", resume=path, **{**keys, "dataset": "digits", "num-clients": 2})
    simulated(tmp_path / "runs", 2, resume=True, **more)


def test_a_run_that_is_killed_has_the_model_of_its_last_checkpoint(tmp_path: Path) -> None:
    """`flwr stop` kills a simulation."""
    pid = os.fork()
    if not pid:
        try:
            data = sites(tmp_path, [40])[0]
            run = SETTINGS | {"out-dir": str(tmp_path), "data-dir": str(data)}
            config = RunConfig.make(run | {"num-server-rounds": 9, "checkpoint-every": 1})

            def stop(round: Any) -> None:
                if round.number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            with engine.quiet():
                engine.run(config, on_round=stop)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    model = load_model(tmp_path / "x")
    w = Checkpoints(tmp_path / "x" / "checkpoint").load().server["w"]
    assert torch.equal(torch.cat([model[name].flatten() for name in model]).sort()[0], w.sort()[0])
    success(invoke("evaluate", tmp_path / "x"))
