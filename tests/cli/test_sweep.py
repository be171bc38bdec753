"""`fedaccord sweep`: its output, one line for each error, and its interruption."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import tomli_w
from rich.console import Console

from fedaccord.cli.sweep import Display
from fedaccord.experiments.sweep import Step
from fedaccord.experiments.sweep.trial import Job, execute
from fedaccord.runs import trackers
from tests.cli.shell import invoke, refusal, run, success
from tests.experiments.sweep.plans import content, finish, make, table


def write(folder: Path, file: dict[str, Any]) -> Path:
    path = folder / "sweep.toml"
    path.write_text(tomli_w.dumps(file))
    return path


def test_a_sweep_shows_its_trials_and_its_winners(tmp_path: Path) -> None:
    space = {"algo": ["fedavg"], "lr": [0.1, 1e30]}
    result = success(invoke("sweep", write(tmp_path, content(space)), "--out", tmp_path / "out"))
    assert result.stderr.startswith("warning: fedavg: the winner's lr=0.1 is the least of 2 values")
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["run 1/3", "run 2/3", "run 3/3"]
    assert lines[0].split("  ")[1] == "fedavg lr=0.1 seed=0"
    assert "best" in lines[0]
    assert re.fullmatch(r"\d:\d\d:\d\d left", lines[0].split("  ")[-1])
    assert "left" not in lines[2]
    assert "rounds in a row failed" in lines[1]
    assert any("lr=0.1" in line for line in lines[3:])
    assert lines[-1] == f"tables and runs: {tmp_path / 'out'}"
    assert len(table(tmp_path / "out")) == 3
    again = invoke("sweep", write(tmp_path, content(space)), "--out", tmp_path / "out")
    assert "run 1/3" not in again.stdout
    assert again.stdout.splitlines()[-1] == lines[-1]


def test_a_terminal_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, markup=False)
    monkeypatch.setattr("fedaccord.cli.sweep.make_console", lambda: console)
    file = write(tmp_path, content({"algo": ["fedavg"], "lr": [0.05, 0.1]}))
    success(invoke("sweep", file, "--out", tmp_path / "out"))
    assert "run 3/3" in output.getvalue()
    assert re.search(r"best \d+\.\d\d% ", output.getvalue())


def test_a_dry_run_prints_the_budget_and_writes_nothing(tmp_path: Path) -> None:
    space = {"algo": ["fedavg", "fedsam"], "lr": [0.05, 0.1]}
    file = write(tmp_path, content(space, {"stem": "cifar"}))
    result = success(invoke("sweep", file, "--dry-run"))
    assert 'warning: fedavg: stem="cifar" has no effect' in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["fedavg", "tune", "2", "2", "6", "2", "epochs", "1"] in rows
    assert ["fedsam", "tune", "2", "2", "6", "1", "epoch", "2"] in rows
    assert "6 runs, 18 rounds; about " in result.stdout
    assert [*tmp_path.iterdir()] == [file]
    runs = sorted(make(space, {"stem": "cifar"}).run_names)
    assert [name.partition("-")[0] for name in runs] == ["fedavg"] * 4 + ["fedsam"] * 4
    others = (("other-1-seed0", 2), ("fedavg-1-seed0", 2), (f"{runs[0]}9", 2))
    for name, rounds in ((runs[0], 2), (runs[-1], 3), *others):
        path = tmp_path / "out" / "runs" / name
        path.mkdir(parents=True)
        (path / "metrics.csv").write_text(
            "round,loss\n" + "".join(f"{t},0.5\n" for t in range(rounds + 1))
        )
    result = success(invoke("sweep", file, "--dry-run", "--out", tmp_path / "out"))
    assert f"6 runs, 18 rounds, 5 of them in {tmp_path / 'out'}; about " in result.stdout


def test_a_dry_run_is_not_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, start = [], trackers.start

    def follow(name: str, *more: Any) -> trackers.Tracker:
        names.append(name)
        return start(trackers.NONE, *more)

    monkeypatch.setattr(trackers, "check", lambda _: None)
    monkeypatch.setattr(trackers, "start", follow)
    file = write(tmp_path, content({"lr": [0.05, 0.1]}, {"tracker": "mlflow"}))
    success(invoke("sweep", file, "--dry-run"))
    assert names == ["none"]


def test_files_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, content({"lr": [0.05, 0.1]}))
    (tmp_path / "fast.toml").write_text("lr = 'fast'")
    success(invoke("sweep", "~/sweep.toml", "--dry-run"))
    assert "lr: expected a number" in refusal(tmp_path, run(tmp_path, "--config=~/fast.toml"))


def test_settings_after_the_file_replace_those_of_run(tmp_path: Path) -> None:
    file = write(tmp_path, content({"algo": ["fedavg"], "lr": [0.05, 0.1]}))
    result = success(invoke("sweep", file, "num-server-rounds=5", "local-steps=1", "--dry-run"))
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["fedavg", "tune", "2", "2", "10", "1", "step", "1"] in rows
    for word, message in (
        ("lr=0.3", f"lr: expected keys that [space] of {file} does not vary, got lr=0.3"),
        ("rounds=3", "unknown key 'rounds'"),
        ("seed=3", "seed: a sweep sets it for each of its runs"),
    ):
        result = invoke("sweep", file, word, "--dry-run")
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("[sweep", "is not valid TOML"),
        ("[sweep]\nserach = 1", "unknown key 'serach' (did you mean 'search'?)"),
        ("run = 3", "expected a table [run], got 3"),
        ("[sweep]\nworkers = 9999", "[sweep] workers: expected at most "),
        ("", "--out: expected a folder"),
    ],
)
def test_a_bad_file_gives_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "sweep.toml"
    if text is not None:
        file.write_text(text)
    out = ("--out", tmp_path / "out") if text != "" else ()
    assert message in refusal(tmp_path, invoke("sweep", file, *out))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["/proc/x", "{}/file"])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    folder = out.format(tmp_path)
    result = invoke("sweep", write(tmp_path, content({"algo": ["fedavg"]})), "--out", folder)
    line = refusal(tmp_path, result)
    assert f"--out: cannot write to {folder} (" in line
    assert line.endswith("; name another folder\n")


def test_missing_data_give_one_line_and_no_row(tmp_path: Path) -> None:
    run = {"dataset": "cifar10", "data-dir": str(tmp_path)}
    result = invoke("sweep", write(tmp_path, content(run=run)), "--out", tmp_path / "out")
    assert "set download=true" in refusal(tmp_path, result)
    assert not (tmp_path / "out" / "rows").exists()


def test_paths_are_relative_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = {"partition": "file", "partition-file": "parts.json"}
    Path("parts.json").write_text(str([[i for i in range(1438) if i % 4 == k] for k in range(4)]))
    file = write(tmp_path, content({"algo": ["fedavg"]}, run=run))
    success(invoke("sweep", file, "--out", "out"))
    assert [*table(tmp_path / "out").status] == ["completed"]


def test_a_sweep_resumes_after_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = write(tmp_path, content()), tmp_path / "out"
    jobs: list[Any] = []

    def interrupted(job: Any) -> Any:
        if len(jobs) == 2:
            raise KeyboardInterrupt
        jobs.append(job)
        return execute(job)

    with monkeypatch.context() as patch:
        patch.setattr("fedaccord.experiments.sweep.workers.execute", interrupted)
        result = invoke("sweep", file, "--out", out)
    rest = f"{out} has the finished part: the same command resumes"
    assert (result.exit_code, result.stderr) == (130, f"fedaccord: interrupted; {rest}\n")
    assert len(table(out)) == 2
    success(invoke("sweep", file, "--out", out))
    finish(make(), tmp_path / "whole")
    pd.testing.assert_frame_equal(table(out), table(tmp_path / "whole"))


@pytest.mark.flower  # processes that load PyTorch
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_signal_also_ends_the_workers(tmp_path: Path, number: signal.Signals) -> None:
    long = {"num-server-rounds": 4000, "checkpoint-every": 50}
    file = write(tmp_path, content({"algo": ["fedavg"], "lr": [0.05, 0.1]}, run=long, workers=2))
    code = "from fedaccord.cli import app; app()"
    words = ["sweep", str(file), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    until(lambda: len([*tmp_path.glob("out/runs/*/checkpoint/*.json")]) >= 2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    until(lambda: not any(child.is_running() for child in children))
    if number == signal.SIGTERM:
        assert err.count("\n") == 1, err
        assert "the same command resumes" in err
        statuses = [path.read_text() for path in tmp_path.glob("out/runs/*/summary.json")]
        assert all('"interrupted"' in text for text in statuses)


def until(condition: Any) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_best_trial_has_the_best_mean_over_all_seeds() -> None:
    """One good seed does not make the best trial, and scores of two rungs are not compared."""
    plan = make({"algo": ["fedavg"], "lr": [0.05, 0.1]}, seeds=[0, 1, 2], test_seeds=[0, 1])
    display = Display(Console(file=io.StringIO()), plan)

    def step(lr: float, seed: int, value: float, validation: float = 0.1) -> str:
        settings = {"algo": "fedavg", "lr": lr, "seed": seed, "num-server-rounds": 3}
        job = Job("", f"fedavg-{lr}-seed{seed}", settings | {"validation": validation})
        split = "validation" if validation else "test"
        row = {"status": "completed", f"{split}-accuracy-mean-of-last-10": value}
        display.on_step(Step(job, row, 3, is_earlier=False))
        return display.best

    assert step(0.05, 0, 0.9) == step(0.05, 1, 0.9) == ""
    assert step(0.1, 0, 0.8) == step(0.1, 1, 0.8) == ""
    assert step(0.1, 2, 0.8) == "best 80.00% (fedavg lr=0.1, mean of 3 seeds)"
    assert step(0.05, 2, 0.2) == "best 80.00% (fedavg lr=0.1, mean of 3 seeds)"  # not the median
    assert step(0.05, 0, 0.1, validation=0.0) == ""  # not the validation score beside test scores
    assert step(0.05, 1, 0.3, validation=0.0) == "best 20.00% (fedavg lr=0.05, mean of 2 seeds)"


def test_the_remaining_time_counts_rounds_of_this_start_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither those that the folder had before, nor those that a failed trial never ran."""
    plan = make({"algo": ["fedavg"], "lr": [0.05, 0.1]}, seeds=[0, 1])
    display = Display(Console(file=io.StringIO()), plan, begun=2)
    settings = {"algo": "fedavg", "lr": 0.05, "num-server-rounds": 3, "validation": 0.1}

    def said(rounds: int) -> str:
        display.look(rounds)
        return capsys.readouterr().out.splitlines()[-1]

    total = f"of {display.left.rounds} rounds"
    assert said(2) == f"2 {total}"
    job = Job(str(tmp_path), "fedavg-seed0", settings | {"seed": 0})
    display.on_step(Step(job, {"status": "failed"}, 3, is_earlier=True))
    job = Job(str(tmp_path), "fedavg-seed1", settings | {"seed": 1})
    display.on_step(Step(job, {"status": "failed"}, 2, is_earlier=True))
    assert said(4) == f"5 {total}"
    assert "left" in said(9)


def test_asha_counts_its_runs_without_a_total() -> None:
    """The number of trials that pass a rung depends on their scores."""
    more = {"search": "asha", "ray_address": "local", "trials": 4}
    lr = {"algo": ["fedavg"], "lr": {"low": 0.05, "high": 0.1}}
    assert Display(Console(file=io.StringIO()), make(lr, **more)).of == ""
    assert Display(Console(file=io.StringIO()), make(lr, search="random", trials=4)).of == "/5"
