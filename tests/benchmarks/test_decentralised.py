"""The page of benchmarks/decentralised.py, from run directories made by hand; its sweeps."""

import tomllib
from pathlib import Path

import decentralised
import pytest
from scipy.stats import ttest_1samp

from fedaccord.experiments.sweep import Plan
from fedaccord.runs import RunDirectory

SWEEPS = Path(decentralised.__file__).parent
RUN = {
    "num-server-rounds": 2,
    "dataset": "fashion-mnist",
    "model": "mlp",
    "num-clients": 8,
    "dirichlet-alpha": 0.3,
    "local-steps": 10,
    "batch-size": 50,
    "lr": 0.1,
    "lr-decay": 1.0,
    "weight-decay": 0.0,
    "clip-norm": 10.0,
}


def write_run(
    out: Path, method: str, topology: str, accuracy: float, status: str = "completed", seed: int = 0
) -> None:
    settings = RUN | {"algo": method, "gossip.topology": topology, "seed": seed}
    machine = {"device": "cpu", "threads": 1}
    run = RunDirectory(str(out), f"{method}-{topology}-{seed}", settings, machine)
    for number in (1, 2):
        row = {"round": number, "test-accuracy": accuracy, "generalisation-gap": 0.0125}
        row |= {"test-accuracy-nodes": accuracy - 0.1, "test-accuracy-nodes-std": 0.05}
        row |= {"consensus-before": 4.0 / number, "consensus-after": 1.0 / number}
        run.record(row | {"peer-bytes": 10**9, "seconds": 30.0}, [])
    run.summarise(status, gossip={"spectral-gap": 0.25})


def write_page(out: Path) -> list[str]:
    decentralised.report(out, out / "page")
    return (out / "page.md").read_text().splitlines()


def test_the_page_has_the_completed_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "dfedavg", "ring", 0.5)
    write_run(tmp_path, "dfedsam", "full", 0.6)
    write_run(tmp_path, "dfedsam", "ring", 0.7, "failed")
    page = write_page(tmp_path)
    assert page[0] == "# Without a server: Fashion-MNIST"
    cells = [line.split("|")[2] for line in page if line.startswith("| dfedavg |")]
    assert [cell.strip() for cell in cells] == ["50.00%", "40.00%", "1.25%", "0.5", "2.00"]
    assert "| dfedsam |  |  |  | 60.00% |" in page
    assert "| method | ring (gap 0.250) | grid | exp | full (gap 0.250) |" in page
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_a_claim_is_tested_on_differences_between_runs_of_the_same_seed(tmp_path: Path) -> None:
    for seed, gain in enumerate((0.02, 0.03, 0.04)):
        write_run(tmp_path, "dfedavg", "ring", 0.5 + seed / 10, seed=seed)
        write_run(tmp_path, "dfedavgm", "ring", 0.5 + seed / 10 + gain, seed=seed)
        write_run(tmp_path, "dfedsam", "ring", 0.5 + seed / 10 - gain, seed=seed)
    page = write_page(tmp_path)
    assert (
        "| dfedavg < dfedavgm | +3.00 ± 1.00 yes |  open |  open |  open | 1 yes, 3 open |" in page
    )
    assert "| dfedavgm < dfedsam | -6.00 ± 2.00 no |  open |  open |  open | 1 no, 3 open |" in page


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([], "open"),
        ([1.0], "open"),
        ([0.0, 0.0], "equal"),
        ([1.0, 1.1, 0.9], "yes"),
        ([-1.0, -1.1, -0.9], "no"),
        ([1.0, -1.0, 0.5], "open"),
    ],
)
def test_a_verdict_needs_more_than_the_spread(gains: list[float], verdict: str) -> None:
    assert decentralised.verdict(gains) == verdict


def test_the_chance_is_that_of_students_test_of_one_sample() -> None:
    for gains in ([1.0, 2.0], [1.0, -1.0, 0.5], [-3.0, -1.0, -2.5, 0.25]):
        expected = ttest_1samp(gains, 0.0).pvalue
        assert decentralised.chance(gains) == pytest.approx(expected, rel=1e-9)


def test_a_folder_without_completed_runs_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "dfedavg", "ring", 0.5, "failed")
    with pytest.raises(FileNotFoundError, match="holds no completed run: sweep first"):
        decentralised.report(tmp_path, tmp_path / "page")


@pytest.mark.parametrize(
    ("file", "count"), [("decentralised.toml", 600), ("decentralised-cifar10.toml", 400)]
)
def test_every_method_runs_on_every_graph_with_as_many_gradients(file: str, count: int) -> None:
    plan = Plan.make(tomllib.loads((SWEEPS / file).read_text(encoding="utf-8")))
    assert not plan.tunes
    assert not plan.warnings()
    every = [c for method in plan.methods for c in plan.configurations(method)]
    assert len(every) == len(plan.methods) * len(decentralised.LABELS) == 20
    assert {c.rounds * c.config.strategy.local_steps for c in every} == {count}
