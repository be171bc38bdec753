"""`fedaccord run`: its output and files, and one line for each error."""

import io
import json
import logging
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.progress import Progress

from fedaccord import config
from fedaccord.core.options import meaning
from fedaccord.runs import RunDirectory
from tests.cli.shell import TINY, invoke, refusal, run, success, summary


def test_a_run_prints_its_rounds_and_writes_its_directory(tmp_path: Path) -> None:
    result = run(tmp_path, "algo=scaffold", "name=first", "lr=0.05")
    assert (result.exit_code, result.stderr) == (0, "")
    directory = tmp_path / "runs" / "first"
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 clients, 359 to 359 samples")
    assert lines[1:3] == ["1 thread: as set", f"run directory: {directory}"]
    assert lines[-2] == lines[2]
    assert [line.split("  ")[0] for line in lines[3:6]] == ["round 0/2", "round 1/2", "round 2/2"]
    values = summary(directory)
    assert values["status"] == "completed"
    table = dict(map(str.strip, line.rstrip().rsplit("  ", 1)) for line in lines[6:-2])
    assert (table["method"], table["rounds"]) == ("scaffold", "2")
    for end in ("last", "best"):
        assert table[f"test accuracy, {end}"] == f"{values[f'test-accuracy-{end}']:.2%}"
    assert table["test loss, last"] == f"{values['test-loss-last']:.4f}"
    content = tomllib.loads((directory / "config.toml").read_text())["run"]
    assert (content["algo"], content["lr"]) == ("scaffold", 0.05)


def test_the_directory_of_an_unnamed_run_is_printed_without_control_codes(tmp_path: Path) -> None:
    words = ("run", *TINY, f"out-dir={tmp_path}")
    result = success(invoke(*words, FORCE_COLOR="1", TERM="xterm-256color"))
    (directory,) = tmp_path.iterdir()
    assert directory.name.startswith("fedinit-digits-seed0-")
    assert result.stdout.splitlines()[-2] == f"run directory: {directory}"
    assert tomllib.loads((directory / "config.toml").read_text())["run"]["name"] == ""
    assert not {"\x1b", "\r"} & {*result.output}


def test_a_terminal_shows_a_bar_that_moves_with_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, markup=False)
    monkeypatch.setattr("fedaccord.cli.run.make_console", lambda: console)
    completed = []
    update = Progress.update

    def follow(self: Any, *args: Any, **kwargs: Any) -> None:
        completed.append(kwargs["completed"])
        update(self, *args, **kwargs)

    monkeypatch.setattr(Progress, "update", follow)
    success(run(tmp_path))
    assert completed == [0, 0.5, 1, 1, 1.5, 2, 2]  # two of four clients a round
    assert all(text in output.getvalue() for text in ("\x1b[", "round 2/2", "seconds"))


def test_flowers_warnings_are_shown_and_its_other_lines_are_not(tmp_path: Path) -> None:
    handlers = list(logging.getLogger("flwr").handlers)
    result = run(tmp_path, "lr=1e30", "clip-norm=0", "max-failed-rounds=2")
    assert result.exit_code == 1
    assert "4 of 4" in " ".join(result.stdout.split())  # replies that were dropped
    lines = result.stderr.splitlines()
    assert all(line.startswith("warning: round ") for line in lines[:-1])
    assert "dropped client" in lines[0]
    (directory,) = (tmp_path / "runs").iterdir()
    assert lines[-1].startswith("fedaccord: 2 rounds in a row")
    assert lines[-1].endswith(f"{directory} has the finished rounds")
    assert summary(directory)["status"] == "failed"
    assert logging.getLogger("flwr").handlers == handlers


@pytest.mark.parametrize(
    ("where", "error", "code", "line"),
    [
        ("task.load_task", KeyboardInterrupt(), 130, "interrupted: nothing was written\n"),
        ("cli.run.keep_freed_memory", KeyboardInterrupt(15), 143, "fedaccord: interrupted\n"),
        ("engine.run", OSError(28, "No space left on device"), 1, "No space left"),
    ],
)
def test_an_error_before_anything_is_written_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Any, code: int, line: str
) -> None:
    monkeypatch.setattr(f"fedaccord.{where}", Mock(side_effect=error))
    assert line in refusal(tmp_path, run(tmp_path), code)


def test_an_interrupt_before_the_first_checkpoint_advises_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaccord.recorded_run.run_of", Mock(side_effect=KeyboardInterrupt()))
    result, path = run(tmp_path, "name=x"), tmp_path / "runs" / "x"
    assert (result.exit_code, summary(path)["status"]) == (130, "interrupted")
    assert result.stderr == (
        f"fedaccord: interrupted before its first checkpoint; remove {path} or choose another "
        "name, and start again\n"
    )


def test_a_full_disk_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, full = RunDirectory.record, OSError(28, "No space left on device")

    def cut(own: RunDirectory, row: Any, clients: Any) -> None:
        if row["round"] == 2:
            raise full
        record(own, row, clients)

    monkeypatch.setattr(RunDirectory, "record", cut)
    result = run(tmp_path, "name=x", "checkpoint-every=1", "num-server-rounds=3")
    path = tmp_path / "runs" / "x"
    assert result.exit_code == 1
    assert result.stderr.endswith(
        f"No space left on device: {path} has the finished rounds; fedaccord resume {path} "
        "continues it\n"
    )


def test_every_key_is_listed() -> None:
    result = success(invoke("run", "--list-keys"))
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for key, field in config.keys().items():
        (line,) = (line for line in lines if line.startswith(f"{key} = "))
        assert line == f"{key} = {json.dumps(config.default(field))}"
        below = " ".join(" ".join(lines[lines.index(line) + 1 :]).split())
        assert below.startswith(meaning(field, config.allowed(key, field)))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("algo=fedint", "did you mean 'fedinit'?"),
        ("model=lenet", "lenet"),  # does not support 8x8 images
        ("model=tests.own:narrow", "model: expected one that accepts inputs (n, ...) of (1, 8, 8)"),
        (
            "model=tests.own:few_outputs",
            "targets of 10 classes, with loss=cross-entropy: IndexError: Target",
        ),
        ("local-parameters=heed.*", "names of trained parameters, 'heed.*' matches none; the"),
        ("min-replies=3", "min-replies: expected at most 2, the clients of a round (of 4"),
        ("max-examples=358", "max-examples: expected at least 359, the samples of the smallest"),
        ("num-clients=2000", "1438 samples for 2000 clients"),
        ("device=cuda:99", "device: expected one of cpu"),
        (
            "partition-file=/none partition=file",
            "partition-file: cannot read '/none' (No such file or directory); check the path",
        ),
        ("dataset=cifar10", "set download=true"),
        ("dataset=mine.data", "got 'mine.data' (did you mean 'mine:data'?)"),
        ("model=mine.net", "got 'mine.net' (did you mean 'mine:net'?)"),
        ("dataset=my.npz", "got 'my.npz' (did you mean 'npz'?)"),
        ("metrics=my.own.f1", "got 'my.own.f1' (did you mean 'my.own:f1'?)"),
        ("threads=100000", "threads: expected at most "),
        ("out-dir=/dev/null/runs", "out-dir: cannot write to"),
        ("out-dir=/jos\udce9", "out-dir: expected a path in UTF-8, got '/jos\\udce9'; choose"),
        ("--preset=", "--preset: unknown preset ''; `fedaccord presets` lists them"),
        ("lr", "expected key=value, e.g. lr=0.05, got 'lr'"),
        ("--lr=1", "No such option"),
    ],
)
def test_a_bad_setting_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FEDACCORD_CACHE", str(tmp_path / "cache"))
    assert message in refusal(tmp_path, run(tmp_path, *word.split()))


def test_an_interrupt_does_not_name_a_folder_that_is_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With workers Ray starts before the run's directory is made."""
    monkeypatch.setattr("fedaccord.engine.run", Mock(side_effect=KeyboardInterrupt()))
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "thesis.tex").touch()
    result = run(tmp_path, "name=x")
    assert result.exit_code == 2
    assert "x exists already; choose another name" in result.stderr


def test_an_absent_run_is_not_resumed_before_the_data_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaccord.task.load_task", Mock(side_effect=KeyboardInterrupt()))
    line = refusal(tmp_path, run(tmp_path, "name=x", "resume=true"))
    assert f"{tmp_path}/runs/x: expected the directory of a run, found none" in line


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    success(run(tmp_path, "name=x"))
    before, result = contents(), run(tmp_path, "name=x")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "x exists already; choose another name" in result.stderr
    assert contents() == before
