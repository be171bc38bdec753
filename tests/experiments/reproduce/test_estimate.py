"""The estimated cost equals the cost of the runs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedaccord.config import RunConfig
from fedaccord.experiments.reproduce import Study
from fedaccord.experiments.reproduce.estimate import STEPS, Estimate, gradients
from fedaccord.experiments.reproduce.study import CellRun
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
    monkeypatch.setattr("fedaccord.experiments.sweep.estimate._start_of_process", lambda: 3.0)
    monkeypatch.setattr("fedaccord.process.threads.cores", lambda: 64)
    study = Study(TABLE, TABLE.cells, (0,))
    runs = study.runs(tmp_path)
    estimate = Estimate(study, 1)
    first = hours(estimate, runs)
    work = 1.0 * len(runs)  # to load, to start and to end
    for config in (RunConfig.make(run.job.settings) for run in runs):
        rounds, every = config.num_server_rounds, config.strategy.eval_every
        work += rounds * gradients(config) * 0.2 / STEPS + rounds / every * 0.3
    assert first == pytest.approx(work / 3600)
    assert len(estimate.paces) == 1
    assert estimate.hours(runs) == (first, "1 process")
    many = Estimate(study, 0).hours(runs)  # a process for each run, and no more
    assert many == (pytest.approx(first / len(runs) + 3 / 3600), f"{len(runs)} processes")
    finish(Study(TABLE, TABLE.cells[:1], (0,)), tmp_path)
    rest = [run for run in runs if run.cell is not TABLE.cells[0]]
    assert hours(estimate, runs) == hours(estimate, rest) < first


def hours(estimate: Estimate, runs: Sequence[CellRun]) -> float:
    result = estimate.hours(runs)
    assert result is not None
    return result[0]
