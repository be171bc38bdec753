"""The progress of runs that other processes write."""

import time
from pathlib import Path

import pytest
from rich.console import Console

from fedaccord.cli import watch
from fedaccord.cli.sweep import rounds_of
from fedaccord.federation.eta import Eta
from tests.cli.shell import invoke
from tests.cli.test_reproduce import reproduce
from tests.cli.test_sweep import write
from tests.experiments.sweep.plans import content, make


def test_the_number_of_rounds_is_that_of_the_last_row(tmp_path: Path) -> None:
    assert watch.rounds(tmp_path) == 0
    table = tmp_path / "metrics.csv"
    for text, rounds in (
        ("", 0),
        ("round,te", 0),
        ("round,test-accuracy\n", 0),
        ("round,test-accuracy\n0,0.1\n", 0),
        ("round,test-accuracy\n0,0.1\n12,0.5\n", 12),
    ):
        table.write_text(text)
        assert watch.rounds(tmp_path) == rounds
    rows = "".join(f"{t}," + "0.123456789" * 20 + "\n" for t in range(500))
    table.write_text("round,x\n" + rows)  # a long table is read at its end
    assert watch.rounds(tmp_path) == 499


def test_a_sweep_counts_the_rounds_of_its_own_methods(tmp_path: Path) -> None:
    """The folder may have runs of other methods and configurations; of those that optuna proposes
    all count, as they are not known before."""
    plan = make({"algo": ["fedavg", "dfedsam-mgs"]})
    (own,) = [name for name in plan.run_names if name.startswith("dfedsam-mgs")]
    for name, last in ((own, 7), ("fedavg-0a1b-seed0", 5), ("fedcm-0-seed0", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"round,loss\n{last},0.5\n")
    assert rounds_of(plan, tmp_path) == 7
    lr = {"low": 0.01, "high": 0.1}
    adaptive = make({"algo": ["fedavg", "dfedsam-mgs"], "lr": lr}, search="optuna")
    assert rounds_of(adaptive, tmp_path) == 12


def test_the_watching_thread_ends_with_its_block() -> None:
    rounds: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "ELSEWHERE", 0.01)
        with watch.watched(Console(force_terminal=False), lambda: 7, rounds.append):
            while not rounds:
                time.sleep(0.01)
    number = len(rounds)
    time.sleep(0.05)
    assert rounds == [7] * number


def test_the_progress_line() -> None:
    now = [0.0]
    eta = Eta(20, 120, lambda: now[0])
    assert watch.progress(20, eta) == "20 of 120 rounds"
    now[0] = 80
    assert watch.progress(60, eta) == "60 of 120 rounds  0:02:00 left"
    assert watch.progress(120, eta) == "120 of 120 rounds"


@pytest.mark.parametrize("command", ["reproduce", "sweep"])
def test_a_long_command_reports_its_rounds(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "ELSEWHERE", 0.05)
    if command == "reproduce":
        words = ("--seeds", 1, "--rounds", 40, "--cells", "fedavg/dir-0.1")
        code, stdout, _ = reproduce(tmp_path / "out", *words)
    else:
        file = write(tmp_path, content({"algo": ["fedavg"]}, {"num-server-rounds": 40}))
        result = invoke("sweep", file, "--out", tmp_path / "out")
        code, stdout = result.exit_code, result.stdout
    assert code == 0
    lines = [line.split() for line in stdout.splitlines() if " of " in line and "rounds" in line]
    numbers = [int(line[0]) for line in lines if line[1] == "of"]
    assert numbers, stdout
    assert numbers == sorted(numbers)
    assert numbers[-1] > 0
