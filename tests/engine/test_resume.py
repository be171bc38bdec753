"""A run that was ended resumes as if it had not been: the same bits, the same tables."""

import csv
import importlib
import json
import logging
import os
import re
import shutil
import sys
import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedaccord import engine, recorded_run, simulate
from fedaccord.client.cohort_rounds import local_rounds
from fedaccord.config import RunConfig
from fedaccord.core.request import TrainRequest
from fedaccord.federation.errors import FederationError
from fedaccord.federation.round import Round
from fedaccord.federation.settings import Settings
from fedaccord.runs import RunDirectory, load_model, reader, status
from fedaccord.runs.checkpoint import Checkpoints, DamagedError
from fedaccord.runs.logbook import Logbook
from fedaccord.strategies import METHODS, FedAvg, FedDyn, RelaxedInit, Scaffold
from fedaccord.task import load, load_task

ROUNDS, STOP = 5, 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four clients of a small data set."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    x, y = rng.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
    np.savez(folder / "data.npz", x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])
    return {
        "dataset": "npz",
        "data-dir": str(folder / "data.npz"),
        "model": "linear",
        "num-clients": 4,
        "partition": "iid",
        "fraction-train": 0.5,
        "num-server-rounds": ROUNDS,
        "local-epochs": 1,
        "batch-size": 5,
        "threads": 1,
        "vectorize": "off",
        "out-dir": str(folder / "runs"),
    }


def make(settings: dict[str, Any], **changes: Any) -> RunConfig:
    values = settings | {key.replace("_", "-"): value for key, value in changes.items()}
    if METHODS[values.get("algo", "fedavg")].all_clients:
        values["fraction-train"] = 1.0
    return RunConfig.make(values)


def stop_after(number: int) -> Any:
    def on_round(round: Round) -> None:
        if round.number == number:
            raise KeyboardInterrupt

    return on_round


def interrupted(config: RunConfig, after: int = STOP) -> None:
    with engine.quiet(), pytest.raises(KeyboardInterrupt):
        engine.run(config, on_round=stop_after(after))


def run(config: RunConfig, **more: Any) -> RunDirectory:
    with engine.quiet():
        return engine.run(config, **more)


def written(path: Path) -> dict[str, Any]:
    """What a run has to show, but for seconds, commits and names."""
    content: dict[str, Any] = {}
    for name in ("metrics.csv", "clients.csv"):
        with (path / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        content[name] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    content["model"] = (path / "model.safetensors").read_bytes()
    summary = json.loads((path / "summary.json").read_text())
    content["summary"] = {k: v for k, v in summary.items() if k not in ("seconds", "process")}
    last = Checkpoints(path / "checkpoint").load()
    content["state"] = {name: v.numpy().tobytes() for name, v in last.server.items()}
    content["clients"] = {
        i: (round, {name: v.numpy().tobytes() for name, v in state.items()})
        for i, (round, state) in last.clients.items()
    }
    return content


def resumed(settings: dict[str, Any], name: str, **more: Any) -> dict[str, Any]:
    """What a run shows, and the same after it resumed from an earlier checkpoint of its own."""
    keys = {"name": name, "checkpoint_every": 2, "num_server_rounds": 4, **more}
    content = written(run(make(settings, **keys)).path)
    assert written(run(make(settings, **keys, resume=True), at=2).path) == content
    return content


@pytest.fixture(scope="module")
def scaffold(settings: dict[str, Any]) -> dict[str, Any]:
    """What an uninterrupted run of SCAFFOLD shows."""
    return written(run(make(settings, algo="scaffold", name="uninterrupted")).path)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_as_if_it_had_not_stopped(name: str, settings: dict[str, Any]) -> None:
    resumed(settings, name, algo=name)


def test_a_run_that_stops_before_round_1_has_round_0_once(
    settings: dict[str, Any], scaffold: dict[str, Any]
) -> None:
    config = make(settings, algo="scaffold", name="at-once")
    interrupted(config, after=0)
    again = make(settings, algo="scaffold", name="at-once", resume=True)
    assert written(run(again).path) == scaffold


def narrow(shape: tuple[int, ...], classes: int) -> nn.Module:
    """With a hidden matrix, for Muon."""
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, classes))


@pytest.mark.parametrize(
    ("optimizer", "state", "client_state"),
    [
        ("momentum", "keep", "memory"),
        ("momentum", "average", "disk"),
        ("adamw", "keep", "disk"),
        ("adamw", "average", "memory"),
        ("muon", "keep", "memory"),
        ("muon", "average", "disk"),
    ],
)
def test_optimisers_go_on_as_if_the_run_had_not_stopped(
    optimizer: str, state: str, client_state: str, settings: dict[str, Any]
) -> None:
    model = {"algo": "scaffold", "model": f"{__name__}:narrow", "client_state": client_state}
    steps = {"optimizer": optimizer, "optimizer_state": state, "lr_schedule": "cosine"}
    more = {**model, **steps, "lr": 0.01}
    content = resumed(settings, f"{optimizer}-{state}-{client_state}", **more)
    vectors = [*content["state"], *(v for _, state in content["clients"].values() for v in state)]
    assert any(v.startswith("moments.") for v in vectors)


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A frozen layer, statistics of the inputs, a shared layer, a head."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(4, classes)
    )
    model[1].requires_grad_(False)
    return model


ROLES = {"algo": "scaffold", "model": f"{__name__}:normed", "local-parameters": "4.*"}


@pytest.mark.parametrize(
    ("algo", "client_state", "buffers"),
    [
        ("scaffold", "disk", "mean"),
        ("scaffold", "memory", "local"),
        ("afedpd", "memory", "mean"),
        ("fedadmm", "disk", "local"),
        ("ditto", "memory", "local"),
        ("fedgamma", "memory", "mean"),
    ],
)
def test_what_is_beside_w_goes_on_as_if_the_run_had_not_stopped(
    algo: str, client_state: str, buffers: str, settings: dict[str, Any]
) -> None:
    more = {**ROLES, "algo": algo, "buffers": buffers, "client_state": client_state}
    content = resumed(settings, f"roles-{algo}-{buffers}-{client_state}", **more)
    assert ("buffers" in content["state"]) == (buffers == "mean")
    assert all("local" in state for _, state in content["clients"].values())


@pytest.mark.parametrize(
    ("name", "vectorize"),
    [
        *(("scaffold", "on"), ("afedpd", "off")),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name, how in (
                *(("scaffold", "off"), ("afedpd", "on"), ("fedpd", "on")),
                *(("fedpd", "off"), ("dispfl", "on"), ("dispfl", "off")),
            )
        ),
    ],
)
def test_states_on_disk_are_those_in_memory(
    name: str, vectorize: str, settings: dict[str, Any]
) -> None:
    """Also in the checkpoint, and where a run resumes from it with its states elsewhere."""
    more = {"algo": name, "vectorize": vectorize}
    memory = make(settings, name=f"{name}-{vectorize}-memory", client_state="memory", **more)
    named = {"name": f"{name}-{vectorize}-disk", **more}
    disk = make(settings, client_state="disk", **named)
    whole = written(run(memory).path)
    interrupted(disk)
    assert not list(Path(settings["out-dir"], named["name"]).glob(".fedaccord*"))
    again = make(settings, client_state="memory", resume=True, **named)
    assert written(run(again).path) == whole
    named["name"] += "-whole"
    assert written(run(make(settings, client_state="disk", **named)).path) == whole


@pytest.mark.parametrize(
    "more",
    [
        {"sam.rho": 0.05, "relaxed-init.beta": 0.1, "algo": "feddyn", "precision": "float64"},
        {"gossip.topology": "ring", "algo": "scaffold"},
        {"relaxed-init.beta": 0.1, "fedinit.server": "updates", "algo": "fedinit"},
        {"algo": "fedavg", "compress.method": "topk", "client-state": "disk"},  # error memories
        {"algo": "fedcm", "compress.method": "sign", "vectorize": "on"},
        {"algo": "fedavg", "vectorize": "on"},  # clients without a state
        {"algo": "scaffold", "compress.method": "qsgd", "local-steps": 2},
        {"algo": "afedpd", "compress.method": "topk", "broadcast.dtype": "int8"},
    ],
    ids=["sam+ri", "gossip", "updates", "topk", "sign", "stateless", "qsgd", "topk+int8"],
)
def test_with_plugins(more: dict[str, Any], settings: dict[str, Any]) -> None:
    resumed(settings, "-".join(map(str, more.values())).replace(".", ""), **more)


def test_a_cohort_that_cannot_be_stacked_changes_no_later_round(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def rounds_of(requests: Sequence[TrainRequest], *rest: Any) -> Any:
        calls.append(requests[0].instruction.round == 0)
        if calls[-1]:
            raise NotImplementedError("expected another cohort")
        return local_rounds(requests, *rest)

    monkeypatch.setattr("fedaccord.engine.fleet.local_rounds", rounds_of)
    resumed(settings, "cohorts", algo="fedavg", vectorize="on", fraction_train=1.0)
    assert 0 < sum(calls) < len(calls)


def test_a_finished_run_goes_on_for_more_rounds(
    settings: dict[str, Any], scaffold: dict[str, Any]
) -> None:
    run(make(settings, algo="scaffold", name="more", num_server_rounds=2))
    again = run(make(settings, algo="scaffold", name="more", resume=True))
    assert written(again.path) == scaffold
    config = tomllib.loads((again.path / "config.toml").read_text())["run"]
    assert config["num-server-rounds"] == ROUNDS


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(settings: dict[str, Any]) -> None:
    """It has rows that came after it, and a file that was not moved into its place."""
    whole = run(make(settings, algo="feddyn", name="killed-whole", checkpoint_every=1))
    path = whole.path.with_name("killed")
    shutil.copytree(whole.path, path)
    checkpoints = Checkpoints(path / "checkpoint")
    assert checkpoints.numbers() == [ROUNDS - 1, ROUNDS]
    (path / "checkpoint" / f"{ROUNDS}.json").unlink()
    (path / "checkpoint" / ".9.json.77").write_text("{")
    again = run(make(settings, algo="feddyn", name="killed", resume=True, checkpoint_every=1))
    assert written(again.path) == written(whole.path)
    assert not list((path / "checkpoint").rglob(".*"))


def test_a_run_goes_on_from_an_earlier_checkpoint(settings: dict[str, Any]) -> None:
    whole = run(make(settings, algo="fedinit", name="earlier", checkpoint_every=2))
    before = written(whole.path)
    config = make(settings, algo="fedinit", name="earlier", checkpoint_every=2, resume=True)
    checkpoints, numbers = Checkpoints(whole.path / "checkpoint"), []
    assert checkpoints.numbers() == [4, ROUNDS]
    again = run(config, at=4, on_round=lambda _: numbers.append(checkpoints.numbers()))
    assert numbers == [[4]]  # what came after is gone, also for a run that is killed now
    assert written(again.path) == before


def test_a_run_that_is_killed_as_its_later_rows_are_cut_goes_on(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkpoint to which they were cut, and not from a later one."""
    whole = run(make(settings, name="cut", checkpoint_every=2))
    before = written(whole.path)
    config = make(settings, name="cut", checkpoint_every=2, resume=True)
    killed = Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "summarise", killed)  # after the tables were cut
        with pytest.raises(KeyboardInterrupt):
            run(config, at=4)
    assert killed.call_count
    assert written(run(config).path) == before


def test_clients_files_are_written_once_and_kept_while_they_are_named(
    settings: dict[str, Any],
) -> None:
    directory = run(make(settings, algo="scaffold", name="files", checkpoint_every=1))
    folder = directory.path / "checkpoint"
    named = set()
    for number in (ROUNDS - 1, ROUNDS):
        named |= set(json.loads((folder / f"{number}.json").read_text())["content"]["files"])
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*.safetensors")}
    assert files == named
    assert load_file(folder / f"{ROUNDS}.safetensors").keys() == {"w", "accepted", "server.c"}


def killed_before_its_model(settings: dict[str, Any], name: str) -> Path:
    """A run that was killed after its last checkpoint and before its model was written."""
    path = run(make(settings, algo="scaffold", name=name)).path
    for file in ("model.safetensors", "model.json"):
        (path / file).unlink()
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"status": "running"}))
    for file in (".summary.json.77", "checkpoint/.9.json.77", "checkpoint/clients/.1-4.json.77"):
        (path / file).write_text("{")
    (path / ".notes.json").write_text("mine")
    return path


def test_a_run_that_was_killed_before_its_model_is_completed(
    settings: dict[str, Any], scaffold: dict[str, Any]
) -> None:
    path = killed_before_its_model(settings, "model")
    assert status(path) == "dead"
    again = run(make(settings, algo="scaffold", name="model", resume=True))
    assert written(again.path) == scaffold
    assert status(path) == "completed"
    assert [p.name for p in path.rglob(".*")] == [".notes.json"]  # nothing unfinished


def test_a_run_is_completed_with_the_rounds_that_it_has(settings: dict[str, Any]) -> None:
    whole = run(make(settings, algo="feddyn", name="fewer-whole", num_server_rounds=STOP))
    interrupted(make(settings, algo="feddyn", name="fewer"))
    again = run(make(settings, algo="feddyn", name="fewer", num_server_rounds=STOP, resume=True))
    assert written(again.path) == written(whole.path)


def test_a_key_without_effect_may_be_left_out_when_a_run_resumes(
    settings: dict[str, Any],
) -> None:
    own = {"algo": "diloco", "name": "unread", "num_server_rounds": 1}
    path = run(make(settings, **own, optimizer="momentum")).path
    again = run(make(settings, **own | {"num_server_rounds": 2}, resume=True))
    assert again.path == path
    assert len(written(path)["metrics.csv"]) == 3
    other = make(settings, **own | {"num_server_rounds": 3, "diloco.mu": 0.8}, resume=True)
    with pytest.raises(ValueError, match=r"^resume: expected diloco\.mu=0\.9, as at the run's st"):
        run(other)


@pytest.mark.parametrize(("lr", "reason"), [(0.1, "the model diverged: "), (5e5, "rounds failed")])
@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_run_that_failed_in_its_last_round_is_not_completed_by_a_resume(
    lr: float,
    reason: str,
    killed: bool,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded_run, "MAX_LOSS", 0.1)  # each test loss is above it
    name = f"failed-{lr}-{killed}"
    bad = {"lr": lr, "clip_norm": 0.0, "max_failed_rounds": 2, "checkpoint_every": 1, "name": name}
    bad |= {"num_server_rounds": 3, "eval_every": 3}
    with pytest.raises(FederationError):
        run(make(settings, **bad))
    path = Path(settings["out-dir"]) / name
    tables = [(path / f"{table}.csv").read_bytes() for table in ("metrics", "clients")]
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 3)
    if killed:  # between its last checkpoint and its end
        (path / "summary.json").write_text(json.dumps(summary | {"status": "running"}))
    with pytest.raises(FederationError, match=reason):
        run(make(settings, **bad, resume=True))
    assert status(path) == "failed"
    assert reason in json.loads((path / "summary.json").read_text())["reason"]
    assert [(path / f"{table}.csv").read_bytes() for table in ("metrics", "clients")] == tables


def test_a_resume_that_fails_at_its_start_keeps_the_model(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(make(settings, algo="fedavg", name="keeps")).path
    before = (path / "model.safetensors").read_bytes()

    def fail(self: Logbook, fleet: Any) -> None:
        raise ValueError("no clients")

    monkeypatch.setattr(Logbook, "restore", fail)
    more = make(settings, algo="fedavg", name="keeps", num_server_rounds=ROUNDS + 1, resume=True)
    with engine.quiet(), pytest.raises(ValueError, match="no clients"):
        engine.run(more)
    assert (path / "model.safetensors").read_bytes() == before


# --- what is refused ------------------------------------------------------------------------------


def copy_of(settings: dict[str, Any], name: str) -> Path:
    folder = Path(settings["out-dir"])
    if not (folder / "base").exists():
        run(make(settings, algo="scaffold", name="base", num_server_rounds=2, checkpoint_every=1))
    shutil.copytree(folder / "base", folder / name)
    return folder / name / "checkpoint"


def refused(settings: dict[str, Any], name: str, **changes: Any) -> str:
    config = make(settings, algo="scaffold", name=name, resume=True, **changes)
    path = Path(settings["out-dir"]) / name
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with engine.quiet(), pytest.raises((ValueError, FileNotFoundError)) as error:
        engine.run(config)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lr": 0.3}, "resume: expected lr=0.1, as at the run's start, got 0.3"),
        ({"scaffold.server-lr": 0.5}, "resume: expected scaffold.server-lr=1.0"),
        ({"sam.rho": 0.1}, 'resume: expected sam.rho="auto"'),
        ({"num_server_rounds": 2}, "all 2 rounds are done; for more set num-server-rounds"),
    ],
)
def test_other_mathematics_is_refused(
    changes: dict[str, Any], line: str, settings: dict[str, Any], request: Any
) -> None:
    name = f"other-{abs(hash(line))}"
    copy_of(settings, name)
    assert line in refused(settings, name, **changes)


def test_a_run_resumes_where_its_data_and_its_clients_states_have_moved(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    copy_of(settings, "moved")
    data = shutil.copy(settings["data-dir"], tmp_path / "elsewhere.npz")
    places = {"data_dir": str(data), "state_dir": str(tmp_path), "tracker": "none"}
    again = run(make(settings, algo="scaffold", name="moved", resume=True, **places))
    assert json.loads((again.path / "summary.json").read_text())["rounds"] == ROUNDS


def test_a_checkpoint_of_a_run_that_begins_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^at: expected None without resume=true .*, got 2$"):
        engine.run(make(settings, name="new"), at=2)
    assert not (Path(settings["out-dir"]) / "new").exists()


def test_another_method_is_refused(settings: dict[str, Any]) -> None:
    copy_of(settings, "method")
    config = make(settings, algo="fedavg", name="method", resume=True)
    with engine.quiet(), pytest.raises(ValueError, match='expected algo="scaffold", as at the run'):
        engine.run(config)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def older(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"format": 0}))


JSON, SERVER, CLIENT = "2.json", "2.safetensors", "clients/*-1.safetensors"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in (JSON, SERVER, CLIENT) for damage in (cut, flip)),
        *((JSON, damage) for damage in (older, deep)),
        (SERVER, Path.unlink),
        (CLIENT, Path.unlink),
    ],
)
def test_a_damaged_checkpoint_offers_the_one_before(
    file: str, damage: Any, settings: dict[str, Any], scaffold: dict[str, Any]
) -> None:
    name = f"damaged-{damage.__name__}-{file.replace('/', '-').replace('*', 'i')}"
    folder = copy_of(settings, name)
    (path, *_) = sorted(folder.glob(file))
    damage(path)
    line = refused(settings, name)
    assert "expected a checkpoint, got a damaged one" in line
    assert "the previous one is of round 1" in line
    again = run(make(settings, algo="scaffold", name=name, resume=True), at=1)
    assert written(again.path) == scaffold


def edited(path: Path) -> None:
    """As a spreadsheet saves it."""
    path.write_bytes(path.read_bytes().replace(b",", b";"))


def shorter(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def nuls(path: Path) -> None:
    """As a file system leaves what was not synced."""
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("file", ["metrics.csv", "clients.csv"])
@pytest.mark.parametrize("damage", [edited, shorter, emptied, nuls, a_pipe, Path.unlink])
def test_a_table_that_is_not_what_was_written_is_refused(
    file: str, damage: Any, settings: dict[str, Any]
) -> None:
    name = f"table-{damage.__name__}-{file}"
    path = copy_of(settings, name).parent / file
    damage(path)
    line = refused(settings, name)
    assert line.startswith(
        f"{path}: expected the rows that the run wrote until round 2, got others"
    )


@pytest.mark.parametrize("tail", [b"3,0.1", bytes(4096), b"3,0.1\n\xff\xfe", b'"'])
def test_what_follows_a_checkpoint_in_a_table_is_cut_off(
    tail: bytes, settings: dict[str, Any], scaffold: dict[str, Any]
) -> None:
    name = f"tail-{zlib.crc32(tail)}"
    folder = copy_of(settings, name).parent
    for file in ("metrics.csv", "clients.csv"):
        with (folder / file).open("ab") as table:
            table.write(tail)
    again = run(make(settings, algo="scaffold", name=name, resume=True))
    assert written(again.path) == scaffold


def test_other_samples_and_another_partition_are_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with np.load(settings["data-dir"]) as file:
        arrays = dict(file)
    data, parts = tmp_path / "data.npz", tmp_path / "parts.json"
    striped = [[*range(i, 48, 4)] for i in range(4)]
    blocks = [[*range(i, i + 12)] for i in (0, 12, 24, 36)]
    keys = settings | {"data-dir": str(data), "partition-file": str(parts), "partition": "file"}
    keys |= {"algo": "fedavg", "name": "data", "num-server-rounds": 2}

    def resume(arrays: dict[str, Any], indices: list[list[int]]) -> None:
        np.savez(data, **arrays)
        parts.write_text(json.dumps(indices))
        load._load_task.cache_clear()
        run(RunConfig.make({**keys, "resume": True, "num-server-rounds": 3}))

    np.savez(data, **arrays)
    parts.write_text(json.dumps(striped))
    run(RunConfig.make(keys))
    other = arrays | {"x_train": arrays["x_train"] + 1}
    more = arrays | {name: np.tile(arrays[name], (2, 1)) for name in ("x_train",)}
    more["y_train"] = np.tile(arrays["y_train"], 2)
    for samples in (other, more):
        with pytest.raises(ValueError, match=r"^resume: expected the samples of the run.*$"):
            resume(samples, striped)
    with pytest.raises(ValueError, match=r"^resume: expected the partition of the run.*$"):
        resume(arrays, blocks)
    resume(arrays, striped)


def test_a_run_resumes_with_changed_code_with_a_warning(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "net_of_a_run.py"
    file.write_text("from torch import nn\ndef net():\n    return nn.Linear(6, 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = settings | {"model": "net_of_a_run:net", "name": "code", "num-server-rounds": 2}
    first = run(RunConfig.make(own)).path
    contents = reader.read(first).contents
    assert {*contents} == {"samples", "model"}
    again = own | {"resume": True}
    run(RunConfig.make(again | {"num-server-rounds": 3}))
    assert "the code of" not in caplog.text
    file.write_text(file.read_text() + "# changed\n")
    monkeypatch.delitem(sys.modules, "net_of_a_run")
    run(RunConfig.make(again | {"num-server-rounds": 4}))
    assert "resume: the code of model=net_of_a_run:net has changed since the run" in caplog.text
    now = reader.read(first).contents
    assert now["samples"] == contents["samples"]
    assert re.fullmatch(rf"{contents['model']}\+[0-9a-f]{{8}}", now["model"])
    caplog.clear()
    run(RunConfig.make(again | {"num-server-rounds": 5}))
    assert "the code of" not in caplog.text
    assert reader.read(first).contents == now


def test_a_run_resumes_with_other_metrics_without_a_warning(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("one", "two"):
        text = f"def {name}(predictions, targets):\n    return predictions[:, 0]\n"
        (tmp_path / f"metric_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    own = settings | {"metrics": "accuracy,metric_one:one", "name": "metrics"}
    path = run(RunConfig.make(own | {"num-server-rounds": 2})).path
    before = reader.read(path).contents["metrics"]
    again = own | {"metrics": "metric_two:two", "num-server-rounds": 3, "resume": True}
    run(RunConfig.make(again))
    assert "the code of" not in caplog.text
    assert reader.read(path).contents["metrics"] not in (before, "")
    assert "+" not in reader.read(path).contents["metrics"]


def test_the_same_settings_after_a_reload_have_the_new_code(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "net_of_a_notebook.py"
    code = "from torch import nn\ndef net():\n    return nn.Linear(6, 3, bias={})\n"
    file.write_text(code.format(True))
    monkeypatch.syspath_prepend(tmp_path)
    own = settings | {"model": "net_of_a_notebook:net", "num-server-rounds": 1}
    sizes = []
    for bias in (True, False):
        file.write_text(code.format(bias))
        if "net_of_a_notebook" in sys.modules:
            importlib.reload(sys.modules["net_of_a_notebook"])
        directory = run(RunConfig.make(own | {"name": f"bias-{bias}"}))
        sizes.append(len(load_model(directory.path)))
    assert sizes == [2, 1]


def test_other_files_in_a_checkpoint_are_left_alone(settings: dict[str, Any]) -> None:
    folder = copy_of(settings, "notebook")
    others = [
        *("clients/backup.safetensors", "clients/.DS_Store", "notes.json", "\u00b2.json"),
        *(".ipynb_checkpoints/5.json", "clients/.ipynb_checkpoints/1-1.safetensors"),
        *("9.json/inside", "9.safetensors/inside", "rounds/mine.safetensors"),
    ]
    for other in others:
        (folder / other).parent.mkdir(parents=True, exist_ok=True)
        (folder / other).write_text("mine")
    run(make(settings, algo="scaffold", name="notebook", resume=True, checkpoint_every=1))
    assert all((folder / other).read_text() == "mine" for other in others)


def test_a_pipe_is_no_checkpoint(settings: dict[str, Any], scaffold: dict[str, Any]) -> None:
    folder = copy_of(settings, "pipe")
    a_pipe(folder / "2.json")
    again = run(make(settings, algo="scaffold", name="pipe", resume=True), at=1)
    assert written(again.path) == scaffold


def test_more_rounds_of_a_method_that_anneals_are_another_run(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    for name in ("dispfl", "dpsgd"):
        config = make(settings, algo=name, name=f"anneal-{name}", num_server_rounds=2)
        run(config)
        caplog.clear()
        run(RunConfig.make(config.flat | {"num-server-rounds": 3, "resume": True}))
        lines = [line for line in caplog.text.splitlines() if "num-server-rounds=2" in line]
        assert len(lines) == (name == "dispfl")


def test_no_checkpoint_is_one_line(settings: dict[str, Any]) -> None:
    folder = copy_of(settings, "none")
    shutil.rmtree(folder)
    assert "expected a checkpoint, found none" in refused(settings, "none")
    assert "found none" in refused(settings, "never-was")
    copy_of(settings, "some")
    config = make(settings, algo="scaffold", name="some", resume=True)
    with engine.quiet(), pytest.raises(FileNotFoundError, match=r"those of rounds 1, 2$"):
        engine.run(config, at=9)


def test_resume_without_a_name_is_one_line(settings: dict[str, Any]) -> None:
    with engine.quiet(), pytest.raises(ValueError, match=r"^resume: expected name="):
        engine.run(make(settings, resume=True))


# --- simulate -------------------------------------------------------------------------------------


def test_simulate_goes_on_from_a_run_directory(settings: dict[str, Any]) -> None:
    directory = run(make(settings, algo="afedpd", name="simulated", num_server_rounds=STOP))
    free = ("num-server-rounds", "name", "out-dir", "data-dir")
    keys = {key: value for key, value in settings.items() if key not in free}
    keys |= {"data-dir": settings["data-dir"], "rounds": ROUNDS, "record": "weights"}
    whole, rest = simulate("afedpd", **keys), simulate("afedpd", resume=directory.path, **keys)
    assert torch.equal(rest.weights, whole.weights[STOP + 1 :])
    assert list(rest.metrics["round"]) == [STOP + 1, ROUNDS]
    with pytest.raises(ValueError, match=r"^resume: all 3 rounds are done; for more set rounds ab"):
        simulate("afedpd", resume=directory.path, **{**keys, "rounds": STOP})
    with pytest.raises(ValueError, match=r"^resume: expected lr=0\.1"):
        simulate("afedpd", resume=directory.path, lr=0.2, **keys)


def test_simulate_resumes_from_a_directory_alone() -> None:
    with pytest.raises(ValueError, match=r"^resume: expected a run directory, .* got True$"):
        simulate("fedavg", dataset="digits", resume=True)  # type: ignore[arg-type]


def test_simulate_resumes_no_other_method(settings: dict[str, Any]) -> None:
    """Also if it is given as a strategy, which has its own settings."""
    directory = run(make(settings, algo="scaffold", name="strategy", num_server_rounds=STOP))
    keys = {k: settings[k] for k in ("dataset", "data-dir", "model", "num-clients", "partition")}
    own: dict[str, Any] = {"fraction_train": 0.5, "local_epochs": 1, "batch_size": 5}
    whole = simulate(Scaffold(**own), rounds=ROUNDS, **keys)
    rest = simulate(Scaffold(**own), resume=directory.path, rounds=ROUNDS, **keys)
    for name, value in whole.model.items():
        assert torch.equal(rest.model[name], value)
    for other, line in ((FedDyn(**own), 'algo="scaffold"'), (Scaffold(**own, lr=0.2), r"lr=0\.1")):
        with pytest.raises(ValueError, match=f"^resume: expected {line}, as at the run's start"):
            simulate(other, resume=directory.path, rounds=ROUNDS, **keys)


@pytest.mark.parametrize(("name", "own_clients"), [*zip(METHODS, cycle([True, False]))])
def test_a_strategy_resumes_the_run_of_its_defaults(
    name: str, own_clients: bool, settings: dict[str, Any]
) -> None:
    """The run's settings have "auto" for its plug-ins; cohorts replace the share of clients."""
    config = make(settings | {"fraction-train": 1.0}, algo=name, name=f"{name}-{own_clients}")
    directory = run(config.having("num-server-rounds", 1))
    arguments: dict[str, Any] = {"rounds": 2, "resume": directory.path}
    keys = ("dataset", "data-dir", "model", "num-clients", "partition")
    arguments |= {key: settings[key] for key in keys}
    if own_clients:
        task = load_task(config.task, num_clients=4)
        samples = [task.clients.samples(i) for i in range(4)]
        clients = [(task.prepare(x, torch.float32), y) for x, y in samples]
        arguments = {k: v for k, v in arguments.items() if k not in keys}
        arguments |= {"clients": clients, "model": task.module}
    strategy = config.strategy
    kind: Any = type(strategy)
    own = kind(**{f.name: getattr(strategy, f.name) for f in fields(Settings)})
    assert simulate(own, **arguments).metrics["round"].tolist() == [2]
    if own_clients and not (own.all_clients or own.topology.is_decentralised):
        few = replace(own, fraction_train=0.5)
        simulate(few, participation=[[0, 1, 2, 3]] * 2, **arguments)
    if name == "fedinit":
        with pytest.raises(ValueError, match=r"^resume: expected relaxed-init\.beta=0\.1, as at"):
            simulate(replace(own, plugins=(RelaxedInit(beta=0.02),)), **arguments)


def test_functions_of_batches_resume_a_run_of_any_batch_size(settings: dict[str, Any]) -> None:
    """Their batches are used as they are: a strategy has the default beside them."""
    config = make(settings, algo="fedavg", name="functions", num_server_rounds=1)
    task = load_task(config.task, num_clients=4)

    def one_batch(i: int) -> Any:
        x, y = task.clients.samples(i)
        return lambda _: [(task.prepare(x, torch.float32), y)]

    own = FedAvg(fraction_train=0.5, local_epochs=1)
    assert own.batch_size != config.strategy.batch_size
    more: dict[str, Any] = {"clients": [*map(one_batch, range(4))], "model": task.module}
    history = simulate(own, rounds=2, resume=run(config).path, **more)
    assert history.metrics["round"].tolist() == [2]


def test_checkpoints_refuse_nothing_that_they_wrote(tmp_path: Path) -> None:
    """Vectors that share memory, and none at all."""
    w = torch.arange(3.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, {"t": 7}, {"w": w, "again": w}, {4: (2, {"c": w[1:]})})
    checkpoint = checkpoints.load()
    assert checkpoint.number == 7
    assert torch.equal(checkpoint.server["again"], w)
    assert torch.equal(checkpoint.clients[4][1]["c"], w[1:])
    assert checkpoint.clients[4][0] == 2
    (tmp_path / "7.json").write_text("[]")
    with pytest.raises(DamagedError, match="it has none before"):
        checkpoints.load()
