"""The estimated budget equals the budget of the sweep."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedaccord.experiments.sweep import workers
from fedaccord.experiments.sweep.estimate import _words, estimate, parts, timed
from tests.experiments.sweep.plans import finish, make

LR = {"lr": {"low": 0.05, "high": 0.1}}


@pytest.mark.parametrize(
    ("space", "own"),
    [
        ({"algo": ["fedavg", "fedprox"], "lr": [0.05, 0.1]}, {"seeds": [0, 1]}),
        ({"algo": ["fedavg", "fedprox"]}, {"test_seeds": [0, 1]}),
        (LR, {"search": "random", "trials": 2}),
        (LR, {"search": "halving", "trials": 5, "eta": 2, "rungs": 2}),
    ],
)
def test_runs_and_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: dict[str, Any], own: dict[str, Any]
) -> None:
    """Of the steps of a sweep, whose runs are not made."""
    scores = {f"{split}-accuracy-mean-of-last-10": 0.5 for split in ("validation", "test")}
    row = {"status": "completed", "seconds": 1.0, **scores}
    monkeypatch.setattr(workers, "execute", lambda job: row | {"rounds": job.rounds})
    plan = make(space, **own)
    steps, plan_parts = finish(plan, tmp_path), parts(plan)
    assert len(steps) == sum(part.runs for part in plan_parts)
    assert sum(step.rounds for step in steps) == sum(part.rounds for part in plan_parts)


def test_optuna_and_costs() -> None:
    tune, test = parts(make(LR | {"algo": ["fedsam"]}, search="optuna", trials=6, seeds=[0, 1]))
    assert (tune.configurations, tune.runs, tune.rounds) == (6, 12, 36)
    assert (test.configurations, test.runs, test.rounds) == (1, 2, 6)
    assert (tune.local, tune.gradients_a_step) == ("2 epochs", 2)
    few = {"algo": ["fedavg", "fedexp"], "lr": [0.1, 0.2, 0.4]}
    few["fedexp"] = {"lr": [0.1]}
    counts = [part.configurations for part in parts(make(few, search="optuna", trials=6))]
    assert counts == [3, 1, 1, 1]


def test_the_length_of_a_local_round_is_the_methods_own() -> None:
    algos = ["fedavg", "scaffnew", "dpsgd", "fedmuon"]
    plan_parts = parts(make({"algo": algos}, {"fraction-train": 1.0}, tune=False))
    lengths = ["2 epochs", "10 steps on average", "1 step", "2 epochs"]
    assert [part.local for part in plan_parts] == lengths


@pytest.mark.parametrize(("processes", "expected"), [(1, 6 * 2 + 18 * 0.7), (2, 24.6 / 2 + 3)])
def test_an_estimate_counts_the_start_of_runs_and_every_second_rounds_evaluation(
    processes: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedaccord.experiments.sweep.estimate.timed", lambda *_: [0.7, 0.5, 0.9, 2.0]
    )
    monkeypatch.setattr("fedaccord.experiments.sweep.estimate._start_of_process", lambda: 3.0)
    space = {"algo": ["fedavg", "fedprox"], "lr": [0.05, 0.1]}
    plan = make(space, {"eval-every": 2}, workers=processes)
    assert f"about {_words(expected)} with" in estimate(plan, parts(plan))


def test_the_overhead_of_a_run_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 4.0, 9.0])  # the start, rounds 0 to 2, the end

    def run(config: Any, on_round: Any) -> None:
        for number in range(3):
            on_round(number)

    monkeypatch.setattr("fedaccord.experiments.sweep.estimate.engine.run", run)
    monkeypatch.setattr("fedaccord.experiments.sweep.estimate.time.perf_counter", now.__next__)
    assert timed({}) == [1.0, 2.0, 6.0]


def test_an_estimate_finds_a_metric_that_is_not_measured() -> None:
    for own in ({}, {"tune": False}):
        plan = make({"algo": ["fedavg"]}, metric="f1-last", **own)
        with pytest.raises(ValueError, match=r"metric: expected one .* measure, .*, got f1-last;"):
            estimate(plan, parts(plan))


def test_a_sweep_has_at_most_a_process_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedaccord.process.threads.cores", lambda: 64)
    monkeypatch.setattr("fedaccord.experiments.sweep.estimate._start_of_process", lambda: 0.0)
    plan = make({"algo": ["fedavg"], "lr": [0.1, 0.2]}, tune=False, workers=0)
    assert "with 2 processes, " in estimate(plan, parts(plan))


def test_an_estimate_is_in_fitting_units() -> None:
    plan = make({"algo": ["fedavg"]})
    assert re.match(r"about [\d.e-]+ (seconds|minutes) with 1 process", estimate(plan, parts(plan)))
    assert [*map(_words, (90, 2700, 43200))] == ["90 seconds", "45 minutes", "12 hours"]
