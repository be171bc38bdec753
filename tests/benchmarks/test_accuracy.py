"""The report of benchmarks/accuracy.py, from run directories made by hand."""

import tomllib
from pathlib import Path

import accuracy
import pytest

from fedaccord.experiments.sweep import Plan
from fedaccord.runs import RunDirectory
from fedaccord.strategies import METHODS


def write_run(out: Path, method: str, seed: int, accuracies: list[float], **other: object) -> None:
    """A completed run with the accuracy of every fifth round."""
    settings = accuracy.common("fashion-mnist") | {"algo": method, "seed": seed} | other
    run = RunDirectory(str(out), f"{method}-{seed}", settings)
    for k, value in enumerate(accuracies):
        run.record({"round": 5 * k, "test-accuracy": value, "train-loss": 0.5}, [])
    run.summarise("completed")


def test_gains_are_of_the_same_seed_and_missing_ones_are_told(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1, 0.3, 0.3, 0.3])
    write_run(tmp_path, "fedavg", 1, [0.1, 0.5, 0.5, 0.5])
    write_run(tmp_path, "afedpd", 0, [0.1, 0.4, 0.4, 0.4])
    write_run(tmp_path, "afedpd", 1, [0.1, 0.5, 0.7, 0.6])
    write_run(tmp_path, "fedprox", 1, [0.1, 0.5, 0.4, 0.45], **{"fedprox.mu": 0.1})
    accuracy.report(tmp_path, tmp_path)
    page = (tmp_path / "accuracy.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert rows[2] == ["afedpd", "–", "50.0%", "40.0%, 60.0%", "0.50", "+10.0, +10.0"]
    assert rows[3] == ["fedprox", "mu 0.1", "45.0%", "45.0%", "0.50", "-5.0"]
    assert rows[4] == ["fedavg", "–", "40.0%", "30.0%, 50.0%", "0.50", "–"]
    assert "Seeds: 0, 1; 1 of fedprox. Not yet run: afedpdsam, " in page
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_runs_of_different_settings_do_not_share_a_table(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1, 0.3, 0.3, 0.3])
    write_run(tmp_path, "afedpd", 0, [0.1, 0.3, 0.3, 0.3], lr=0.05)
    with pytest.raises(ValueError, match="differ in lr"):
        accuracy.report(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["accuracy", "accuracy-cifar10"])
def test_every_method_runs_with_its_defaults(name: str) -> None:
    """A table that compares tuned methods with others would have to say so."""
    file = Path(accuracy.__file__).with_name(f"{name}.toml")
    plan = Plan.make(tomllib.loads(file.read_text("utf-8")))
    assert not plan.tunes
    known = {method for method in METHODS if accuracy.fits(method)}
    assert {*plan.methods} == known - {"fedtoy"}  # of tests/strategies/test_a_new_method.py
    assert [key for key in plan.run if "." in key] == []
    (line,) = plan.warnings()
    assert line.startswith("feddeper: ranked by the mean model; the clients' own are told of by")
