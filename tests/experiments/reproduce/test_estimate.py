"""The estimated cost equals the cost of the runs."""

from pathlib import Path

import pytest

from fedaccord.config import RunConfig
from fedaccord.experiments.reproduce import Study
from fedaccord.experiments.reproduce.estimate import STEPS, Estimate, gradients
from fedaccord.experiments.sweep.plan import SweepOptions
from tests.experiments.reproduce.studies import TABLE, cell, finish


def test_gradients_are_those_of_the_runs(tmp_path: Path) -> None:
    cells = [*TABLE.cells, cell("fedprox", local_steps=3), cell("dfedavg")]
    study = Study(TABLE, cells, (0,))
    results = finish(study, tmp_path).set_index("cell")
    for run in study.runs(tmp_path):
        config = RunConfig.make(run.job.settings)
        assert 4 * gradients(config) == results.gradients[run.cell.name]


def test_a_model_is_timed_once_and_completed_runs_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [9.0, 0.2, 0.5, 1.0]  # of a first round, one without and one with an evaluation, more
    monkeypatch.setattr("fedaccord.experiments.reproduce.estimate.timed", lambda *_: seconds)
    study, options = Study(TABLE, TABLE.cells, (0,)), SweepOptions(workers=1)
    runs = study.runs(tmp_path)
    estimate = Estimate(study, options)
    first = estimate.hours(runs)
    work = 0.0
    for config in (RunConfig.make(run.job.settings) for run in runs):
        rounds, every = config.num_server_rounds, config.strategy.eval_every
        work += rounds * gradients(config) * 0.2 / STEPS + rounds / every * 0.3
    assert first == pytest.approx(work / 3600)
    assert len(estimate.paces) == 1
    assert estimate.hours(runs) == first
    assert Estimate(study, SweepOptions(workers=2)).hours(runs) == pytest.approx(first / 2)
    finish(Study(TABLE, TABLE.cells[:1], (0,)), tmp_path)
    rest = [run for run in runs if run.cell is not TABLE.cells[0]]
    assert estimate.hours(runs) == estimate.hours(rest) < first
