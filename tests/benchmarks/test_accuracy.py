"""The report of benchmarks/accuracy.py, from run directories made by hand."""

from pathlib import Path

import accuracy
import pytest

from fedaccord.config import RunConfig
from fedaccord.experiments.sweep import Plan
from fedaccord.experiments.sweep.space import of_method
from fedaccord.runs import RunDirectory
from fedaccord.strategies import METHODS


def write_run(out: Path, method: str, seed: int, accuracies: list[float], **other: object) -> None:
    """A completed run with the accuracy of every fifth round."""
    settings = (
        of_method(accuracy.common("accuracy"), method) | {"algo": method, "seed": seed} | other
    )
    run = RunDirectory(str(out), f"{method}-{seed}", settings)
    for k, value in enumerate(accuracies):
        run.record({"round": 5 * k, "test-accuracy": value, "train-loss": 0.5}, [])
    run.summarise("completed")


def test_gains_are_of_the_same_seed_and_missing_runs_are_listed(tmp_path: Path) -> None:
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
    assert "Seeds: 0, 1; 1 of fedprox. Not yet run: fedinit, " in page
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_runs_of_different_settings_do_not_share_a_table(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1, 0.3, 0.3, 0.3])
    write_run(tmp_path, "afedpd", 0, [0.1, 0.3, 0.3, 0.3], lr=0.05)
    with pytest.raises(ValueError, match=r"accuracy\.toml differ in lr: a run of afedpd has 0\.05"):
        accuracy.report(tmp_path, tmp_path)


def test_a_methods_own_learning_rate_is_in_its_row(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1, 0.3, 0.3, 0.3])
    write_run(tmp_path, "diloco", 0, [0.1, 0.4, 0.4, 0.4], **{"diloco.mu": 0.9})
    accuracy.report(tmp_path, tmp_path)
    page = (tmp_path / "accuracy.md").read_text()
    assert "| diloco | mu 0.9, lr 0.001 | 40.0% | 40.0% | 0.50 | +10.0 |" in page
    assert "The local rate of diloco, fedmuon, fedpac is a usual one of their local " in page
    write_run(tmp_path, "fedpac", 0, [0.1, 0.4, 0.4, 0.4], lr=0.1)
    with pytest.raises(ValueError, match=r"differ in lr: a run of fedpac has 0\.1; move it"):
        accuracy.report(tmp_path, tmp_path)


def test_all_clients_in_every_round_have_a_page_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1, 0.3, 0.3, 0.3], **{"fraction-train": 1.0})
    write_run(tmp_path, "scaffnew", 0, [0.1, 0.4, 0.4, 0.4], **{"fraction-train": 1.0})
    accuracy.report(tmp_path, tmp_path)
    page = (tmp_path / "accuracy-all-clients.md").read_text()
    assert "100 clients, 100 a round" in page
    assert "Not yet run: scaffold, feddyn, fedpd." in page


@pytest.mark.parametrize("name", accuracy.PAGES)
def test_every_method_runs_with_its_defaults(name: str) -> None:
    """No method is tuned; only the local rates of methods with AdamW are set."""
    plan = Plan.make(accuracy.read_file(name))
    assert not plan.tunes
    text = "".join(plan.warnings())
    if name == "accuracy-all-clients":
        assert {n for n, kind in METHODS.items() if kind.all_clients} < {*plan.methods}
        assert [line.partition("=")[0] for line in plan.warnings()] == [
            "scaffnew: lr-decay",
            "scaffnew: local-steps",
        ]
        return
    assert {*plan.methods} == {method for method in METHODS if fits(method)} - {"fedtoy"}
    assert [key for key in plan.run if "." in key] == ["diloco.lr", "fedmuon.lr", "fedpac.lr"]
    assert text.startswith("feddeper, ditto: ranked by the mean model; personal-accuracy-l")


def fits(method: str) -> bool:
    """Whether a method has a server, supports some clients a round, and is not `local`. (fedtoy: of
    tests/strategies/test_a_new_method.py)"""
    try:
        strategy = RunConfig.make({"algo": method, "fraction-train": 0.1}).strategy
    except ValueError:
        return False
    return not (strategy.topology.is_decentralised or method == "local")
