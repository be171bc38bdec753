"""`fedaccord run`: what it shows and writes, and one line for whatever is wrong."""

import io
import json
import logging
import os
import signal
import threading
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file

from fedaccord import config
from fedaccord.core.options import meaning
from fedaccord.task import models
from tests.cli.shell import TINY, invoke, refusal, run, success


def test_a_run_shows_its_rounds_and_leaves_its_directory(tmp_path: Path) -> None:
    result = run(tmp_path, "algo=scaffold", "name=first", "lr=0.05")
    assert (result.exit_code, result.stderr) == (0, "")
    directory = tmp_path / "runs" / "first"
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 clients, 359 to 359 samples")
    assert lines[1:3] == ["1 thread: as set", f"run directory: {directory}"]
    assert lines[-2] == lines[2]
    assert [line.split("  ")[0] for line in lines[3:6]] == ["round 0/2", "round 1/2", "round 2/2"]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "completed"
    shown = dict(map(str.strip, line.rstrip().rsplit("  ", 1)) for line in lines[6:-2])
    assert (shown["method"], shown["rounds"]) == ("scaffold", "2")
    for end in ("last", "best"):
        assert shown[f"test accuracy, {end}"] == f"{summary[f'test-accuracy-{end}']:.2%}"
    assert shown["test loss, last"] == f"{summary['test-loss-last']:.4f}"
    written = tomllib.loads((directory / "config.toml").read_text())["run"]
    assert (written["algo"], written["lr"]) == ("scaffold", 0.05)


def test_an_unnamed_run_is_shown_where_it_is_without_control_codes(tmp_path: Path) -> None:
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
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, markup=False)
    monkeypatch.setattr("fedaccord.cli.run.make_console", lambda: console)
    completed = []
    update = Progress.update

    def follow(self: Any, *args: Any, **kwargs: Any) -> None:
        completed.append(kwargs["completed"])
        update(self, *args, **kwargs)

    monkeypatch.setattr(Progress, "update", follow)
    success(run(tmp_path))
    assert completed == [0, 0.5, 1, 1, 1.5, 2, 2]  # two of four clients a round
    assert all(text in shown.getvalue() for text in ("\x1b[", "round 2/2", "seconds"))


def test_flowers_warnings_are_shown_and_its_other_lines_are_not(tmp_path: Path) -> None:
    handlers = list(logging.getLogger("flwr").handlers)
    result = run(tmp_path, "lr=1e30", "clip-norm=0", "max-failed-rounds=2")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert all(line.startswith("warning: round ") for line in lines[:-1])
    assert "dropped client" in lines[0]
    (directory,) = (tmp_path / "runs").iterdir()
    assert lines[-1].startswith("fedaccord: 2 rounds in a row")
    assert lines[-1].endswith(f"{directory} has the finished rounds")
    assert json.loads((directory / "summary.json").read_text())["status"] == "failed"
    assert logging.getLogger("flwr").handlers == handlers


def test_an_interrupted_run_leaves_what_it_has_done(tmp_path: Path) -> None:
    directory, done = tmp_path / "runs" / "x", threading.Event()
    rows_file = directory / "metrics.csv"

    def interrupt() -> None:
        while not done.is_set() and not (
            rows_file.exists() and rows_file.read_text().count("\n") > 6
        ):
            time.sleep(0.01)
        if not done.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    # where the tests run in the background, a shell may have them ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        result = run(tmp_path, "num-server-rounds=1000000", "name=x")
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130, result.output
    assert result.stderr == (
        f"fedaccord: interrupted: {directory} has the finished rounds; "
        f"fedaccord resume {directory} continues it\n"
    )
    assert "\x1b" not in result.stdout

    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    rows = rows_file.read_text().splitlines()
    assert summary["rounds"] >= 5
    # a header and round 0; the interrupt may fall between a row's two places
    assert abs(len(rows) - 2 - summary["rounds"]) <= 1
    assert len({row.count(",") for row in rows}) == 1
    model = models.build("linear", (1, 8, 8), 10)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    assert not [*directory.glob(".*")]


@pytest.mark.parametrize(
    ("where", "error", "code", "line"),
    [
        ("task.load_task", KeyboardInterrupt(), 130, "interrupted: nothing was written\n"),
        ("engine.run", OSError(28, "No space left on device"), 1, "No space left"),
    ],
)
def test_what_ends_a_run_before_it_writes_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Any, code: int, line: str
) -> None:
    monkeypatch.setattr(f"fedaccord.{where}", Mock(side_effect=error))
    assert line in refusal(tmp_path, run(tmp_path), code)


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
        ("batchsize=3", "unknown key 'batchsize' (did you mean 'batch-size', "),
        ("dataset=digit", "did you mean 'digits'?"),
        ("model=lnet", "did you mean 'lenet'?"),
        ("model=lenet", "lenet"),  # takes no 8x8 images
        ("model=tests.own:narrow", "model: expected one that accepts inputs (n, ...) of (1, 8, 8)"),
        ("model=tests.own:few_outputs", "targets of 10 classes: IndexError: Target"),
        ("local-parameters=heed.*", "names of trained parameters, 'heed.*' matches none; the"),
        ("dirichlet-alpha=0", "dirichlet-alpha: expected above 0 and at most 1e+06"),
        ("alpha=0.5", "alpha: this key is now called 'dirichlet-alpha'"),
        ("fraction-train=1.5", "fraction-train: expected at least 1e-06 and at most 1, got 1.5"),
        ("fraction-train=1e-9", "fraction-train: expected at least 1e-06"),
        ("seed=99999999999999999999", "seed: expected an integer below 2^63"),
        ("min-replies=3", "min-replies: expected at most 2, the clients of a round (of 4"),
        ("lr=fast", "lr: expected a number, got 'fast'"),
        ("num-clients=1e6", "num-clients: expected an integer"),
        ("num-clients=2000", "1438 samples for 2000 clients"),
        ("device=cuda:99", "device: expected one of cpu"),
        ("dataset=cifar10", "set download=true"),
        ("threads=100000", "threads: expected at most "),
        ("out-dir=/dev/null/runs", "out-dir: cannot write to"),
        ("name=../x", "name: expected a folder below out-dir"),
        ("lr", "expected key=value, as lr=0.05, got 'lr'"),
        ("--lr=1", "No such option"),
    ],
)
def test_a_bad_setting_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FEDACCORD_CACHE", str(tmp_path / "cache"))
    assert message in refusal(tmp_path, run(tmp_path, word))


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    success(run(tmp_path, "name=x"))
    before, result = contents(), run(tmp_path, "name=x")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "x exists already; choose another name" in result.stderr
    assert contents() == before
