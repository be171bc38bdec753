"""Run directories: written files can be read back, and invalid places are refused."""

import csv
import json
import os
import subprocess
import sys
import time
import tomllib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fedaccord import runs
from fedaccord.config import RunConfig, in_use, resolved
from fedaccord.runs import RunDirectory, flatten, naming, tables
from fedaccord.runs.lock import Lock, LockedError

SETTINGS = RunConfig.make({}).flat


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summary(run: RunDirectory) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (run.path / "summary.json").read_text()
    return json.loads(text, parse_constant=no_constant)  # type: ignore[no-any-return]


ODD = {"algo": "scaffold", "lr": 1e-5, "relaxed-init.beta": 0.1, "data-dir": 'a "b"\\c é'}


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ({"algo": "fedinit"}, {"fedinit", "relaxed-init"}),
        ({"algo": "fedinit", "relaxed-init.beta": 0.0}, {"fedinit", "relaxed-init"}),
        ({"algo": "dpsgd", "gossip.steps": 2}, {"dpsgd", "gossip"}),
        ({"algo": "fedavg", "gossip.file": "/unread"}, {"fedavg", "gossip"}),
        (ODD, {"scaffold", "relaxed-init"}),
    ],
)
def test_config_toml_has_the_tables_in_use_and_reproduces_the_run(
    tmp_path: Path, values: dict[str, Any], groups: set[str]
) -> None:
    config = RunConfig.make(values)
    used = {"device": "cpu"} | resolved(config.strategy)
    run = RunDirectory(str(tmp_path), "x", in_use(config), used)
    content = tomllib.loads((run.path / "config.toml").read_text(encoding="utf-8"))
    keys = flatten(content["run"])
    assert {key.partition(".")[0] for key in keys if "." in key} == groups
    assert RunConfig.make(keys).flat == config.flat
    assert {"python", "fedaccord", "flwr", "torch"} <= content["versions"].keys()
    assert content["used"]["device"] == "cpu"


def test_nested_tables_and_dotted_keys_are_each_others_inverse() -> None:
    flat = {"a": 1, "b.c": 2, "b.d.e": 3, "b.d.f": 4}
    assert tables(flat) == {"a": 1, "b": {"c": 2, "d": {"e": 3, "f": 4}}}
    assert flatten(tables(flat)) == flat


def test_a_new_column_keeps_the_rows_of_a_table(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    run.record({"round": 0}, [])
    assert not (run.path / "clients.csv").exists()
    ok = {"client": 3, "status": "ok", "steps": 5}
    run.record({"round": 1, "loss": 0.1}, [{"client": 2, "status": 'lost, "why"\nunknown'}, ok])
    run.record({"round": 2}, [{"client": 2, "status": "late"}])
    run.record({"round": 3, "loss": 0.5, "extra": 1}, [])
    assert rows(run.path / "metrics.csv") == [
        {"round": "0", "loss": "", "extra": ""},
        {"round": "1", "loss": "0.1", "extra": ""},
        {"round": "2", "loss": "", "extra": ""},
        {"round": "3", "loss": "0.5", "extra": "1"},
    ]
    assert rows(run.path / "clients.csv") == [
        {"client": "2", "status": 'lost, "why"\nunknown', "steps": ""},
        {"client": "3", "status": "ok", "steps": "5"},
        {"client": "2", "status": "late", "steps": ""},
    ]


def test_a_run_leaves_its_files_and_no_others(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    assert summary(run)["status"] == "running"
    run.record({"round": 0}, [{"client": 0}])
    run.record({"round": 1, "new": 1}, [{"client": 0, "new": 1}])
    run.save_model({"w": torch.zeros(2)}, {"architecture": "mlp"})
    with safe_open(run.path / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["model"]) == {"architecture": "mlp"}
    run.summarise("completed")
    run.close()
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        *("config.toml", "metrics.csv", "clients.csv", "summary.json"),
        *("model.safetensors", "model.json"),
    }


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that fills the disk: half of the next write still succeeds."""

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, content: Any) -> None:
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            raise OSError(28, "No space left on device")

    usual = Path.open

    def open_full(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        file = usual(path, mode, *args, **more)
        return file if mode.startswith("r") else Full(file)

    return lambda: monkeypatch.setattr(Path, "open", open_full)


def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    before = sorted(run.path.iterdir())
    full_disk()
    with pytest.raises(OSError, match=r"No space left on device: '.*/x/summary.json'$"):
        run.summarise("completed")
    assert summary(run)["status"] == "running"
    assert sorted(run.path.iterdir()) == before
    with pytest.raises(ValueError, match=r"out-dir: cannot write .* \(No space left"):
        RunDirectory(str(tmp_path), "y", SETTINGS)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("writes", range(3))
def test_a_run_that_cannot_begin_leaves_its_name_free(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the lock, config.toml or summary.json."""
    budget = writes
    lock, sync = os.pwrite, os.fsync

    def filling(write: Callable[..., Any]) -> Callable[..., Any]:
        def full(*args: Any) -> Any:
            nonlocal budget
            budget -= 1
            if budget < 0:
                raise OSError(28, "No space left on device")
            return write(*args)

        return full

    monkeypatch.setattr(os, "pwrite", filling(lock))
    monkeypatch.setattr(os, "fsync", filling(sync))
    with pytest.raises(ValueError, match=r"out-dir: cannot write .* \(No space left"):
        RunDirectory(str(tmp_path), "x", SETTINGS)
    assert [*tmp_path.iterdir()] == []
    monkeypatch.undo()
    RunDirectory(str(tmp_path), "x", SETTINGS).close()


def test_a_run_that_is_interrupted_as_it_begins_leaves_its_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "summarise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        RunDirectory(str(tmp_path), "x", SETTINGS)
    assert [*tmp_path.iterdir()] == []


def test_a_clock_that_jumps_changes_no_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    run.summarise("completed")
    assert 0 <= summary(run)["seconds"] < 60


def test_a_full_disk_tears_no_row(tmp_path: Path, full_disk: Callable[[], None]) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    run.record({"round": 0, "loss": 0.5}, [])
    full_disk()
    with pytest.raises(OSError, match=r"No space left on device: '.*/x/metrics.csv'$"):
        run.record({"round": 1, "loss": 0.25}, [])
    assert rows(run.path / "metrics.csv") == [{"round": "0", "loss": "0.5"}]


def test_a_column_that_a_full_disk_left_out_is_not_in_the_table(
    tmp_path: Path, full_disk: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run writes rows of the columns that its files have."""
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    run.record({"round": 0, "loss": 0.5}, [{"round": 0, "client": 1}])
    full_disk()
    with pytest.raises(OSError, match="No space left"):
        run.record({"round": 1, "loss": 0.25, "repair": 1}, [])
    monkeypatch.undo()
    position = run.position
    run.close()
    lock = Lock(run.path)
    again = RunDirectory.reopen(run.path, SETTINGS, {}, number=0, position=position, lock=lock)
    again.record({"round": 1, "loss": 0.3}, [])
    again.close()
    assert rows(run.path / "metrics.csv") == [
        {"round": "0", "loss": "0.5"},
        {"round": "1", "loss": "0.3"},
    ]


def test_rows_are_read_one_by_one(tmp_path: Path) -> None:
    """There may be millions: a list of them takes eighteen times the file's size."""
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    clients = [{"round": 0, "client": i, "status": "ok"} for i in range(20_000)]
    run.record({"round": 0}, clients)
    position = run.position
    size = (run.path / "clients.csv").stat().st_size
    tracemalloc.start()
    assert run._clients.until(0, ["round", "client", "status"], position["marks"]["clients"])
    run._clients.append([{"round": 1, "repair": "lost"}])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 15 * size
    assert len(rows(run.path / "clients.csv")) == 20_001
    run.close()


def test_a_round_that_a_full_disk_cut_off_is_not_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row of metrics was written, those of its clients were not."""
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    run.record({"round": 0, "loss": 0.5}, [{"round": 0, "client": 1}])

    def full(rows: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run._clients, "append", full)
    with pytest.raises(OSError, match="No space left"):
        run.record({"round": 1, "loss": 0.25}, [{"round": 1, "client": 2}])
    position = run.position  # of a checkpoint of round 0, made as the run ends
    run.close()
    lock = Lock(run.path)
    again = RunDirectory.reopen(run.path, SETTINGS, {}, number=0, position=position, lock=lock)
    assert rows(again.path / "metrics.csv") == [{"round": "0", "loss": "0.5"}]
    again.record({"round": 1, "loss": 0.3}, [{"round": 1, "client": 2}])
    assert [row["round"] for row in rows(again.path / "metrics.csv")] == ["0", "1"]
    assert [row["client"] for row in rows(again.path / "clients.csv")] == ["1", "2"]
    again.close()


def test_the_seconds_of_a_run_that_resumes_are_those_of_all_its_parts(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    run.record({"round": 1, "loss": 0.5}, [])
    position = run.position | {"seconds": 1000.0}
    run.close()
    lock = Lock(run.path)
    again = RunDirectory.reopen(run.path, SETTINGS, {}, number=1, position=position, lock=lock)
    assert 1000 <= summary(again)["seconds"] < 1060


def test_files_are_synced_before_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        steps.append("sync")
        sync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        steps.append(f"replace {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    RunDirectory(str(tmp_path), "x", SETTINGS).save_model({"w": torch.zeros(2)}, {})
    names = ("config.toml", "summary.json", "model.safetensors", "model.json")
    assert steps == [step for name in names for step in ("sync", f"replace {name}")]


def test_texts_are_quoted_against_formulas_and_negative_numbers_are_not(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    run.record({"round": 1, "gap": -0.5}, [{"client": 0, "status": '=HYPERLINK("a")'}])
    run.record({"round": 2, "gap": -0.25, "new": 1}, [{"client": 0, "status": "+1", "new": -1}])
    assert [row["gap"] for row in rows(run.path / "metrics.csv")] == ["-0.5", "-0.25"]
    texts = [row["status"] for row in rows(run.path / "clients.csv")]
    assert texts == ['\'=HYPERLINK("a")', "'+1"]


def test_the_summary_counts_sums_and_ranks_without_the_untrained_model(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    run.record({"round": 0, "test-accuracy": 0.9, "test-loss": 0.1}, [])
    for t in range(1, 12):
        accuracy = {"test-accuracy": t / 20 if t < 11 else 0.0, "test-loss": 12.0 - t}
        sums = {"replies": 3, "dropped": 2, "counted": int(t != 4), "down-bytes": 10, "up-bytes": 1}
        run.record({"round": t, **sums, **accuracy}, [])
        if t == 2:  # few evaluations
            run.summarise("running")
            assert summary(run)["test-accuracy-mean-of-last-10"] == pytest.approx(0.075)
    run.summarise("completed", unused=3)
    values = summary(run)
    assert (values["status"], values["rounds"], values["unused"]) == ("completed", 11, 3)
    assert (values["rounds-counted"], values["replies"], values["dropped"]) == (10, 33, 22)
    assert (values["down-bytes"], values["up-bytes"]) == (110, 11)
    assert values["test-accuracy-last"] == 0.0
    assert values["test-accuracy-mean-of-last-10"] == pytest.approx(sum(range(2, 11)) / 20 / 10)
    assert (values["test-accuracy-best"], values["test-loss-best"]) == (0.5, 1.0)


def test_a_run_that_says_running_and_has_no_process_is_dead(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    assert runs.status(run.path) == "running"
    with pytest.raises(LockedError, match=f"{run.path}: process {os.getpid()} on .* writes here"):
        Lock(run.path)
    code = (
        "import sys; from fedaccord.runs import RunDirectory\n"
        "RunDirectory(sys.argv[1], 'y', {'algo': 'fedavg', 'dataset': 'digits', 'seed': 0})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert summary(run)["status"] == "running"
    assert runs.status(tmp_path / "y") == "dead"
    run.close()
    assert runs.status(run.path) == "dead"
    run.summarise("interrupted")
    assert runs.status(run.path) == "interrupted"


def test_a_diverged_loss_is_null_in_the_summary(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "x", SETTINGS)
    run.record({"round": 1, "test-loss": float("nan")}, [])
    run.record({"round": 2, "test-loss": 3.0}, [])
    run.record({"round": 3, "test-loss": float("inf")}, [])
    run.summarise("failed")
    assert summary(run)["test-loss-last"] is None
    assert summary(run)["test-loss-mean-of-last-10"] is None
    assert summary(run)["test-loss-best"] == 3.0


def test_unnamed_runs_of_one_second_get_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    names = [RunDirectory(str(tmp_path), "", SETTINGS).path.name for _ in range(3)]
    first = "fedinit-digits-seed0-20260101-000000"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_unnamed_runs_that_begin_at_once_get_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes the folder between the check and the creation."""
    place, paths = naming.place, []

    def late(*args: Any) -> Path:
        path = place(*args)
        if not paths:
            paths.append(path)
            path.mkdir()
        return path

    monkeypatch.setattr(naming, "place", late)
    assert RunDirectory(str(tmp_path), "", SETTINGS).path.name == f"{paths[0].name}-2"


def test_a_folder_that_is_taken_or_locked_is_refused(tmp_path: Path) -> None:
    line = r"^name: .* exists already; choose another name"
    (tmp_path / "x").mkdir()
    with Lock(tmp_path / "x"), pytest.raises(ValueError, match=line):
        RunDirectory(str(tmp_path), "x", SETTINGS)  # another process has found it empty, too
    first = RunDirectory(str(tmp_path), "x", SETTINGS)
    before = {path: path.read_bytes() for path in first.path.iterdir()}
    with pytest.raises(ValueError, match=line):
        RunDirectory(str(tmp_path), "x", SETTINGS)
    assert {path: path.read_bytes() for path in first.path.iterdir()} == before


def test_the_default_place_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runs.place("", "x", SETTINGS) == tmp_path / "fedaccord-runs" / "x"
    of_function = runs.place("", "", SETTINGS | {"dataset": "mine:data"})
    assert "-mine.data-seed" in of_function.name


@pytest.mark.parametrize(
    ("out_dir", "name", "line"),
    [
        *[("{}", name, "name: expected a folder below out-dir") for name in ("../x", "a/../../x")],
        ("{}", "/tmp/x", "name: expected a folder below out-dir"),
        ("runs", "x", "out-dir: expected an absolute path, got 'runs'"),
        ("{}/jos\udce9", "", r"out-dir: expected a path in UTF-8, got '.*/jos\\udce9'; "),
        *[(f"{{}}/file{end}", "x", "out-dir: cannot write to ") for end in ("", "/deeper")],
        ("{}", "x" * 300, f"name: .*{'x' * 300} is too long; shorten it, or out-dir$"),
        *[
            ("{}", name, "name: expected no control")
            for name in (" ", "x ", "a/ x", "a\nb", "\x1b")
        ],
        ("{}", "run/x", "name: .*/run/x is inside the run .*/run, where `fedaccord compare`"),
        ("{}", "run/deeper/x", "name: .* is inside the run .*/run, "),
        *[("{}/run", name, "name: .* is inside the run .*/run, ") for name in ("", "x")],
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out_dir: str, name: str, line: str
) -> None:
    (tmp_path / "file").touch()
    run = RunDirectory(str(tmp_path), "run", SETTINGS).path
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{line}"):
        RunDirectory(out_dir.format(tmp_path), name, SETTINGS)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "run"}
    assert not [path for path in run.iterdir() if path.is_dir()]
