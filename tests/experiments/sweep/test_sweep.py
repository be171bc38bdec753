"""Complete sweeps: tables and winners; they resume, also after they were killed."""

import json
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from fedaccord import config, engine
from fedaccord.config import RunConfig
from fedaccord.experiments.analysis.costs import with_costs
from fedaccord.experiments.analysis.groups import DEFAULTS, groups_of
from fedaccord.experiments.analysis.table import summary
from fedaccord.experiments.sweep import Plan, Step, Sweep, trial
from fedaccord.experiments.sweep.estimate import parts
from fedaccord.runs.lock import Lock
from fedaccord.runs.reader import read, read_all
from tests.experiments.sweep.plans import finish, make, table

KILLS = 10


def halving(*lr: float) -> Plan:
    space = {"algo": ["fedavg", "fedprox"], "lr": [*lr]}
    return make(space, search="halving", eta=2, rungs=2)


def test_a_grid_tunes_on_validation_samples_and_tests_the_winners(tmp_path: Path) -> None:
    plan = make(
        {"algo": ["fedprox", "fedavg"], "lr": [1e-6, 0.1]}, seeds=[0, 1], test_seeds=[2, 3, 4]
    )
    steps = finish(plan, tmp_path)
    trials = table(tmp_path)
    tuned, tested = trials[trials.stage == "tune"], trials[trials.stage == "test"]
    assert [*zip(tuned.algo, tuned.lr, tuned.seed, strict=True)] == [
        (algo, lr, seed) for algo in ("fedprox", "fedavg") for lr in (1e-6, 0.1) for seed in (0, 1)
    ]
    assert set(trials.status) == {"completed"}
    assert tuned["test-accuracy-last"].isna().all()
    assert tested["validation-accuracy-last"].isna().all()
    assert set(tested.lr) == {0.1}
    assert [*tested.seed] == [2, 3, 4, 2, 3, 4]
    assert len(steps) == len(trials) == 14
    winners = table(tmp_path, "winners.csv").set_index("algo")
    for algo in ("fedavg", "fedprox"):
        values = tested[tested.algo == algo]["test-accuracy-mean-of-last-10"]
        row = winners.loc[algo]
        assert row["test-accuracy-mean-of-last-10"] == pytest.approx(values.mean())
        assert row["test-accuracy-mean-of-last-10-std"] == pytest.approx(values.std())
        assert (row.settings, row.seeds, row.configurations) == ("lr=0.1", 3, 2)
        score = "validation-accuracy-mean-of-last-10"  # over both seeds
        each = tuned[(tuned.algo == algo) & (tuned.lr == 0.1)][score]
        assert each.nunique() == 2
        assert row[score] == pytest.approx(each.mean())
    assert_only_winners_resume(tmp_path)


def assert_only_winners_resume(folder: Path) -> None:
    """The rest needs no states of clients."""
    for path in (folder / "runs").iterdir():
        assert (path / "checkpoint").exists() == (read(path).settings["validation"] == 0)


def test_the_same_sweep_again_runs_nothing(tmp_path: Path) -> None:
    plan = make(seeds=[0])
    finish(plan, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*")}
    first = (tmp_path / "table.csv").read_bytes()
    assert all(step.is_earlier for step in finish(plan, tmp_path))
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*")} == before
    assert (tmp_path / "table.csv").read_bytes() == first


def test_winners_have_their_costs_to_a_target_which_may_change(tmp_path: Path) -> None:
    def costs(**own: float) -> dict[str, dict[str, Any]]:
        space = {"algo": ["fedavg", "fedprox"], "fedprox": {"lr": [1e-9]}}
        steps.extend(finish(make(space, seeds=[0, 1], **own), tmp_path))
        return pd.read_csv(tmp_path / "winners.csv").set_index("algo").to_dict("index")

    steps: list[Step] = []
    usual = costs()
    curves = [
        with_costs(read(path)).set_index("round")
        for path in sorted((tmp_path / "runs").glob("fedavg-*"))
    ]
    best = sum(curve["test-accuracy"][1:].mean() for curve in curves) / 2
    assert usual["fedavg"]["target"] == pytest.approx(0.9 * best)
    assert usual["fedavg"]["reached"] == "2 of 2"
    assert usual["fedprox"]["reached"] == "0 of 2"
    assert math.isnan(usual["fedprox"]["bytes-to-target"])
    high = float(curves[0]["test-accuracy"][2:].mean())  # between those of rounds 2 and 3
    assert curves[0]["test-accuracy"][2] < high
    row = costs(target=high)["fedavg"]
    firsts = [
        curve[curve["test-accuracy"] >= high].iloc[0]
        for curve in curves
        if (curve["test-accuracy"] >= high).any()
    ]
    assert row["reached"] == f"{len(firsts)} of 2"
    for cost in ("bytes", "gradients", "seconds"):
        each = [first[cost] for first in firsts]
        assert row[f"{cost}-to-target"] == pytest.approx(sum(each) / len(each))
    assert row["round-to-target"] == pytest.approx(sum(f.name for f in firsts) / len(firsts))
    assert [step.is_earlier for step in steps] == [False] * 4 + [True] * 4
    shutil.rmtree(tmp_path / "runs")
    assert costs(target=high)["fedavg"]["reached"] == "0 of 0"
    sweep = Sweep(make({"algo": ["fedavg"]}, seeds=[0]), tmp_path, lambda _: None)
    sweep.run()
    assert re.fullmatch(r".*/runs/fedavg-.*; its costs are not in winners.csv", sweep.warnings[0])


def test_a_larger_space_runs_only_new_trials(tmp_path: Path) -> None:
    finish(make({"algo": ["fedavg"], "lr": [0.05, 0.1]}), tmp_path)
    steps = finish(make({"algo": ["fedavg", "fedprox"], "lr": [0.05, 0.1]}), tmp_path)
    assert {step.job.name.partition("-")[0] for step in steps if step.is_earlier} == {"fedavg"}
    assert {step.job.name.partition("-")[0] for step in steps if not step.is_earlier} == {"fedprox"}


def test_one_configuration_a_method_goes_to_the_test_samples_at_once(tmp_path: Path) -> None:
    finish(make({"algo": ["fedavg", "fedprox"]}, seeds=[0, 1]), tmp_path)
    assert [*table(tmp_path).stage] == ["test"] * 4
    assert table(tmp_path, "winners.csv")["validation-accuracy-mean-of-last-10"].isna().all()


def test_without_tuning_every_configuration_is_tested(tmp_path: Path) -> None:
    plan = make({"algo": ["fedavg", "fedprox"], "num-clients": [3, 4]}, seeds=[0, 1], tune=False)
    assert sum(part.runs for part in parts(plan)) == len(finish(plan, tmp_path)) == 8
    trials, winners = table(tmp_path), table(tmp_path, "winners.csv")
    assert set(trials.stage) == {"test"}
    assert trials["test-accuracy-last"].notna().all()
    assert sorted(winners.settings) == ["num-clients=3", "num-clients=3"] + 2 * ["num-clients=4"]
    assert {*winners.trial} == {*trials.trial}
    assert all((tmp_path / "runs" / f"{name}-seed0").is_dir() for name in winners.trial)


@pytest.mark.parametrize(
    ("name", "algo"),
    [("personal-accuracy-last", "local"), ("client-accuracy-worst-tenth-last", "fedavg")],
)
def test_a_metric_of_clients_ranks_if_chosen(name: str, algo: str, tmp_path: Path) -> None:
    """By its value on held-out samples."""
    run = {"evaluation": "clients"} if algo == "fedavg" else None
    finish(make({"algo": [algo], "lr": [1e-9, 0.1]}, run, metric=name), tmp_path)
    trials, (winner,) = table(tmp_path), table(tmp_path, "winners.csv").to_dict("records")
    tuned = trials[trials.stage == "tune"].set_index("lr")[name]
    assert tuned[0.1] > tuned[1e-9]
    assert winner["settings"] == "lr=0.1"
    assert winner[f"validation-{name}"] == tuned[0.1]
    (value,) = trials[trials.stage == "test"][name]
    assert winner[f"test-{name}"] == value


def test_a_metric_at_simulated_seconds_ranks_if_chosen(tmp_path: Path) -> None:
    """By the last evaluation before them. Another number of seconds ranks the same runs again."""
    space, run = {"algo": ["fedavg"], "local-epochs": [1, 8]}, {"device-profile": "lognormal"}
    for seconds, epochs, number in ((200, 8, 3), (30, 1, 1)):
        name = f"accuracy-at-{seconds}"
        steps = finish(make(space, run, metric=name), tmp_path)
        assert sum(not step.is_earlier for step in steps) == number
        trials, (winner,) = table(tmp_path), table(tmp_path, "winners.csv").to_dict("records")
        tuned = trials[trials.stage == "tune"].set_index("local-epochs")
        assert winner["settings"] == f"local-epochs={epochs}"
        path = tmp_path / "runs" / f"{tuned.trial[epochs]}-seed0"
        rounds = read(path).metrics.query("clock <= @seconds")
        expected = rounds["validation-accuracy"].iloc[-1]
        assert tuned[f"validation-{name}"][epochs] == winner[f"validation-{name}"] == expected
    assert math.isnan(tuned[f"validation-{name}"][8])  # its first round takes longer
    with pytest.raises(ValueError, match=r"^\[sweep\] metric: no trial has accuracy-at-0\.5: see"):
        finish(make(space, run, metric="accuracy-at-0.5"), tmp_path)


def test_halving_resumes_from_rungs_and_marks_stopped_trials(tmp_path: Path) -> None:
    steps = finish(halving(1e-5, 0.05, 0.1, 1e30), tmp_path)
    trials = table(tmp_path)
    tuned = trials[(trials.stage == "tune") & (trials.algo == "fedavg")].set_index("lr")
    assert [*tuned.status] == ["stopped", "completed", "completed", "failed"]
    assert [*tuned.rounds] == [2, 3, 3, 2]
    assert tuned.loc[1e30].reason
    assert sum(step.rounds for step in steps) == 2 * (4 * 2 + 2 * 1) + 2 * 3
    assert_only_winners_resume(tmp_path)
    # what came by a rung is what a grid's trial gives
    finish(make({"algo": ["fedavg"], "lr": [0.05, 0.1]}), tmp_path / "grid")
    grid = table(tmp_path / "grid").set_index("lr")
    key = "validation-loss-last"
    assert [*grid[grid.stage == "tune"][key]] == [*tuned.loc[[0.05, 0.1]][key]]


def test_a_method_whose_every_trial_fails_ends_nothing(tmp_path: Path) -> None:
    space = {
        "algo": ["fedavg", "fedprox"],
        "fedavg": {"lr": [1e30, 1e29]},
        "fedprox": {"lr": [0.1]},
    }
    sweep = Sweep(make(space), tmp_path, lambda _: None)
    sweep.run()
    assert sweep.warnings[0].startswith("fedavg: no trial has accuracy-mean-of-last-10: see status")
    winners = table(tmp_path, "winners.csv").set_index("algo")
    assert winners.loc["fedavg"].seeds == 0
    assert winners.loc["fedprox"].seeds == 1
    assert [*winners.index] == ["fedprox", "fedavg"]


def test_a_new_start_runs_failed_trials_again_but_not_those_that_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make({"algo": ["fedavg"], "lr": [0.05, 0.1, 1e30]})
    with monkeypatch.context() as patch:

        def run(config: RunConfig, **more: Any) -> Any:
            if config.flat["lr"] == 0.1:
                raise ImportError("No module named 'mine'")
            return engine.run(config, **more)

        patch.setattr(trial, "engine", Mock(run=run))
        finish(plan, tmp_path)
    assert sorted(table(tmp_path).status) == ["completed", "completed", "failed", "failed"]
    again = {
        step.job.settings["lr"]: step for step in finish(plan, tmp_path) if not step.is_earlier
    }
    assert again[0.1].row["status"] == "completed"
    assert 1e30 not in again
    assert "model diverged" in table(tmp_path).set_index("lr").loc[1e30].reason


def test_files_of_something_else_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("mine")
    with pytest.raises(ValueError, match=r"got one whose table.csv is not a sweep's .* --out$"):
        finish(make(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]
    assert (tmp_path / "table.csv").read_text() == "mine"


def test_a_damaged_file_of_a_sweep_is_named(tmp_path: Path) -> None:
    plan = make({"algo": ["fedavg"]})
    finish(plan, tmp_path)
    [row] = (tmp_path / "rows").iterdir()
    for file in (row, tmp_path / "run.json", tmp_path / DEFAULTS):
        before = file.read_text()
        for damage in ("", "[]", before[:-9]):
            file.write_text(damage)
            with pytest.raises(ValueError, match=rf"^{file}: expected .* got a damaged "):
                finish(plan, tmp_path)
        file.write_text(before)
    row.unlink()
    [step] = finish(plan, tmp_path)
    assert step.row["status"] == "completed"


def test_tests_of_an_earlier_choice_are_not_compared(tmp_path: Path) -> None:
    finish(make({"algo": ["fedavg", "fedprox"], "lr": [1e-6, 1e-5]}), tmp_path)
    finish(make({"algo": ["fedavg"], "lr": [1e-6, 1e-5, 0.1]}), tmp_path)
    groups = groups_of(read_all([tmp_path])[0])
    ranking = [(group.settings["algo"], group.settings["lr"]) for group in summary(groups).groups]
    assert ranking == [("fedavg", 0.1), ("fedprox", 1e-5)]
    finish(make({"algo": ["scaffold"], "lr": [0.05, 0.1]}, tune=False), tmp_path / "every")
    finish(make({"algo": ["scaffold"], "lr": [0.2]}, tune=False), tmp_path / "every")
    assert len(summary(groups_of(read_all([tmp_path / "every"])[0])).groups) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_ten_kills_change_no_number(tmp_path: Path) -> None:
    """At random times; earlier ones, in a new folder, if the sweep ends before half of them."""
    plan, began = halving(0.1, 1e30), time.monotonic()
    finish(plan, tmp_path / "whole")
    wait, rng, counts = (time.monotonic() - began) / 5, random.Random(0), list[int]()
    while max(counts, default=0) < KILLS // 2:
        assert len(counts) < 8, f"expected {KILLS // 2} kills of {KILLS} in a sweep, got {counts}"
        folder = tmp_path / f"killed-{len(counts)}"
        counts.append(0)
        for _ in range(KILLS):
            if not (pid := os.fork()):
                try:
                    finish(plan, folder)
                finally:
                    os._exit(0)
            time.sleep(rng.uniform(0.0, wait))
            os.kill(pid, signal.SIGKILL)
            _, how = os.waitpid(pid, 0)
            if not os.WIFSIGNALED(how):
                break
            counts[-1] += 1
        wait /= 2
    finish(plan, folder)
    for name in ("table.csv", "winners.csv"):
        pd.testing.assert_frame_equal(table(folder, name), table(tmp_path / "whole", name))


def test_two_processes_do_not_work_on_one_sweep(tmp_path: Path) -> None:
    with (
        Lock(tmp_path),
        pytest.raises(ValueError, match=f"process {os.getpid()} on .* writes here"),
    ):
        Sweep(make(), tmp_path, lambda _: None).run()
    finish(make({"algo": ["fedavg"]}), tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_a_sweep_of_an_earlier_version_is_refused_in_one_line(tmp_path: Path) -> None:
    """Its trials have other names: they would be run again beside the old ones."""
    plan, defaults = make({"algo": ["fedavg"]}), tmp_path / DEFAULTS
    finish(plan, tmp_path)
    before = json.loads(defaults.read_text())
    assert before["lr"] == 0.1
    for later in ({k: v for k, v in before.items() if k != "lr"}, before | {"gone": 1}):
        defaults.write_text(json.dumps(later))  # a key that was added, one that was removed
        assert all(step.is_earlier for step in finish(plan, tmp_path))
        assert json.loads(defaults.read_text()) == before
    defaults.write_text(json.dumps(before | {"lr": 0.2}))
    with pytest.raises(ValueError, match=r"with the default lr=0.2, which is now 0.1; set"):
        finish(plan, tmp_path)
    same = make({"algo": ["fedavg"]}, {"lr": 0.2})
    assert all(step.is_earlier for step in finish(same, tmp_path))
    defaults.unlink()
    with pytest.raises(ValueError, match=r"of an earlier version, .*; choose another --out$"):
        finish(plan, tmp_path)


def test_a_new_method_or_value_with_another_default_is_refused_before_its_first_trial(
    tmp_path: Path,
) -> None:
    """Else its trials had names that the next start would not find."""
    finish(make({"algo": ["fedavg"]}), tmp_path)
    defaults = tmp_path / DEFAULTS
    before = json.loads(defaults.read_text())
    defaults.write_text(json.dumps(before | {"fedprox.mu": 0.5, "adamw.beta1": 0.8}))
    both, line = {"algo": ["fedavg", "fedprox"]}, r"fedprox.mu=0.5, which is now 0.1; set"
    with pytest.raises(ValueError, match=line):
        finish(make(both), tmp_path)
    assert not [*(tmp_path / "rows").glob("fedprox-*")]
    with pytest.raises(ValueError, match=r"adamw.beta1=0.8, which is now 0.9; set"):
        finish(make({"algo": ["fedavg"], "optimizer": ["sgd", "adamw"]}), tmp_path)
    finish(make(both, {"fedprox.mu": 0.1}), tmp_path)
    assert all(step.is_earlier for step in finish(make(both, {"fedprox.mu": 0.1}), tmp_path))


def test_a_sweep_resumes_if_defaults_have_changed_that_it_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials have the names that they began with: a name leaves out the defaults of then."""
    plan = make({"algo": ["fedavg"], "lr": [0.1, 0.2]})
    finish(plan, tmp_path)
    names, files = plan.run_names, sorted((tmp_path / "rows").iterdir())
    before = json.loads((tmp_path / DEFAULTS).read_text())
    today = config.defaults() | {"lr": 0.2, "feddeper.rho": 0.002}
    monkeypatch.setattr(config, "defaults", lambda: today)
    again = make({"algo": ["fedavg"], "lr": [0.1, 0.2]})
    assert again.run_names != again.at(tmp_path).run_names == names
    assert all(step.is_earlier for step in finish(again, tmp_path))
    assert sorted((tmp_path / "rows").iterdir()) == files
    assert json.loads((tmp_path / DEFAULTS).read_text()) == before


def test_a_sweep_of_other_settings_is_refused(tmp_path: Path) -> None:
    finish(make({"algo": ["fedavg"]}, {"lr": 0.05}), tmp_path)
    before = table(tmp_path)
    for run, line in (
        ({"lr": 0.05, "num-clients": 5}, "num-clients=4, as in its earlier trials, got 5"),
        ({}, "lr=0.05, as in its earlier trials, got 0.1"),
    ):
        with pytest.raises(ValueError, match=f"expected {line}; choose another --out$"):
            finish(make({"algo": ["fedavg"]}, run), tmp_path)
    pd.testing.assert_frame_equal(table(tmp_path), before)
    finish(make({"algo": ["fedavg"], "lr": [0.05, 0.1]}, {"checkpoint-every": 1}), tmp_path)
    finish(make({"algo": ["fedavg", "fedprox"]}, {"lr": 0.05, "fedprox.mu": 0.3}), tmp_path)


def test_a_winner_at_an_edge_is_a_warning(tmp_path: Path) -> None:
    sweep = Sweep(make({"algo": ["fedavg"], "lr": [0.05, 0.1]}), tmp_path, lambda _: None)
    sweep.run()
    [line] = sweep.warnings
    assert line.startswith("fedavg: the winner's lr=0.")


def test_a_sweep_in_which_nothing_has_a_score_is_refused(tmp_path: Path) -> None:
    diverging = make({"algo": ["fedavg", "fedprox"], "lr": [1e29, 1e30]})
    line = r"^none of 4 runs was completed: 3 rounds in a row "
    with pytest.raises(ValueError, match=line):
        finish(diverging, tmp_path)
    untuned = make({"algo": ["fedavg"], "lr": [1e29, 1e30]}, tune=False)
    with pytest.raises(ValueError, match=r"^none of 2 runs was completed: 3 rounds in a row"):
        finish(untuned, tmp_path / "untuned")
    assert {*table(tmp_path).status} == {"failed"}
    assert not (tmp_path / "winners.csv").exists()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_metric_that_runs_do_not_measure_ends_the_sweep_with_its_first_run(
    workers: int, tmp_path: Path
) -> None:
    plan = make({"lr": [0.05, 0.1, 0.2, 0.3]}, metric="f1-last", workers=workers)
    line = r"^\[sweep\] metric: expected one .*, validation-accuracy, validation-loss, got f1-l"
    with pytest.raises(ValueError, match=line):
        finish(plan, tmp_path)
    assert len([*(tmp_path / "rows").iterdir()]) <= workers + 1  # one may end meanwhile
    with pytest.raises(ValueError, match=r"measure, test-accuracy, test-loss, got f1-last; choose"):
        finish(make({"lr": [0.1]}, metric="f1-last", tune=False), tmp_path / "untuned")


def test_the_table_of_trials_has_metrics_of_ones_own(tmp_path: Path) -> None:
    plan = make({"algo": ["fedavg"], "lr": [0.05, 0.1]}, {"metrics": "accuracy, tests.own:brier"})
    finish(plan, tmp_path)
    trials = table(tmp_path)
    for stage, split in (("tune", "validation"), ("test", "test")):
        values = trials[trials.stage == stage][f"{split}-brier-last"]
        assert ((values > 0) & (values < 2)).all()


@pytest.mark.parametrize(
    ("run", "line"),
    [
        ({"num-clients": 5000}, "^num-clients: expected at least one sample per client, got 1"),
        ({"partition": "pathological", "classes-per-client": 11}, "^classes-per-client: expected"),
        ({"max-examples": 1}, "^max-examples: expected at least"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused_before_the_first_trial(
    run: dict[str, Any], line: str, tmp_path: Path
) -> None:
    plan = make({"algo": ["fedavg"], "lr": [0.1]}, run=run)
    with pytest.raises(ValueError, match=line):
        finish(plan, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("own", [{}, {"search": "optuna", "trials": 3, "batch": 1}])
def test_a_point_that_does_not_fit_the_data_ends_no_sweep(
    own: dict[str, Any], tmp_path: Path
) -> None:
    """Nor does the first one, whichever it is."""
    plan = make({"algo": ["fedavg"], "num-clients": [5000, 4]}, seeds=[0], test_seeds=[1], **own)
    finish(plan, tmp_path)
    assert (table(tmp_path).status == "completed").any()
