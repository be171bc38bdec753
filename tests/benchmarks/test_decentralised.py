"""The report of benchmarks/decentralised.py, from run directories made by hand."""

from pathlib import Path

import decentralised
import pytest

from fedaccord.experiments.sweep import Plan
from fedaccord.runs import RunDirectory


def write_run(out: Path, method: str, topology: str, accuracy: float, status: str) -> None:
    settings = {"algo": method, "gossip.topology": topology, "seed": 0, "num-server-rounds": 2}
    used = {"device": "cpu", "threads": 1}
    run = RunDirectory(str(out), f"{method}-{topology}", settings, used)
    for number in (1, 2):
        row = {"round": number, "test-accuracy": accuracy, "generalisation-gap": 0.0125}
        row |= {"test-accuracy-nodes": accuracy - 0.1, "test-accuracy-nodes-std": 0.05}
        row |= {"consensus-before": 4.0 / number, "consensus-after": 1.0 / number}
        run.record(row | {"peer-bytes": 10**9, "seconds": 30.0}, [])
    run.summarise(status, gossip={"spectral-gap": 0.25})


def test_the_page_has_what_is_completed(tmp_path: Path) -> None:
    write_run(tmp_path, "dfedavg", "ring", 0.5, "completed")
    write_run(tmp_path, "dfedsam", "full", 0.6, "completed")
    write_run(tmp_path, "dfedsam", "ring", 0.7, "failed")
    decentralised.report(tmp_path, tmp_path)
    page = (tmp_path / "decentralised.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| dfed")]
    assert rows[:2] == [
        "| dfedavg | 50.00% (40.00%, 5.00%) |  |  |  |",
        "| dfedsam |  |  |  | 60.00% (50.00%, 5.00%) |",
    ]
    assert rows[2::2] == [
        f"| dfedavg | {cell} |  |  |  |" for cell in ("1.25", "2 → 0.5", "2.00", "60")
    ]
    assert "| method | ring (gap 0.250) | grid | exp | full (gap 0.250) |" in page
    assert (tmp_path / "decentralised.png").stat().st_size > 10_000


def test_nothing_completed_is_one_line(tmp_path: Path) -> None:
    write_run(tmp_path, "dfedavg", "ring", 0.5, "failed")
    with pytest.raises(FileNotFoundError, match="holds no completed run: sweep first"):
        decentralised.report(tmp_path, tmp_path)


def test_every_method_runs_on_every_graph_with_as_many_gradients() -> None:
    plan = Plan.make(decentralised.SWEEP)
    assert not plan.tunes
    assert not plan.warnings()
    every = [c for method in plan.methods for c in plan.configurations(method)]
    assert len(every) == len(plan.methods) * len(decentralised.LABELS) == 20
    steps = {c.rounds * c.config.strategy.local_steps for c in every}
    assert steps == {400}
