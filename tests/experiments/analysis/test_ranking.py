"""Costs of runs, values of groups with their spread, and which is best."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedaccord.experiments.analysis.costs import Point, smoothed
from fedaccord.experiments.analysis.ranking import (
    Spread,
    costs_of,
    final,
    main_metric,
    ranked,
    to_target,
    tuned,
    up_to,
    usual_target,
)
from fedaccord.experiments.analysis.table import summary, text
from tests.experiments.analysis.made import groups, write


def test_the_sensitivity_of_a_sweep_is_by_its_tuning_metric(tmp_path: Path) -> None:
    for lr in (0.05, 0.1):
        tuning = write(tmp_path, [0.1, 0.5], lr=lr, validation=0.1)
        table = tuning / "metrics.csv"
        table.write_text(table.read_text().replace("test-", "validation-"))
    test_run = write(tmp_path / "tests", [0.1, 0.6], lr=0.1, validation=0.0)
    metric, those = tuned(groups(tmp_path))
    assert metric == "validation-accuracy"
    assert {group.settings["lr"] for group in those} == {0.05, 0.1}
    assert all(run.path != test_run for group in those for run in group.runs)
    assert tuned(groups(test_run))[0] == main_metric(groups(tmp_path)) == "test-accuracy"


def test_a_run_that_failed_has_no_numbers(tmp_path: Path) -> None:
    for seed, accuracy in ((0, 0.7), (1, 0.1)):
        path = write(tmp_path, [0.1, accuracy], seed=seed)
    file = path / "summary.json"
    file.write_text(file.read_text().replace("completed", "failed"))
    (row,) = summary(groups(tmp_path), 0.05).rows
    assert row["test-accuracy-mean-of-last-10"].mean == 0.7  # type: ignore[union-attr]
    assert row["seeds"] == "2 (0, 1), 1 failed"
    assert row["reached"] == "1 of 2"
    (row,) = summary(groups(path), 0.05).rows
    assert math.isnan(row["test-accuracy-mean-of-last-10"].mean)  # type: ignore[union-attr]
    assert row["reached"] == "0 of 1"


@pytest.mark.parametrize("target", [80, -1])
def test_a_target_of_an_accuracy_is_a_share(target: float, tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.5])
    with pytest.raises(
        ValueError, match=r"^--target: expected a share in \[0, 1\], e.g. 0.9, of test"
    ):
        summary(groups(tmp_path), target)


def test_costs_add_up_over_the_rounds(tmp_path: Path) -> None:
    write(tmp_path, [0.1, None, 0.5, 0.7])
    (group,) = groups(tmp_path)
    (table,) = group.tables
    assert [*table["bytes"]] == [0, 15, 30, 45]
    assert [*table["gradients"]] == [0, 14, 20, 34]  # 2 (3 + 4), then one client's 2 x 3
    assert [*table["seconds"]] == [0, 2, 4, 6]
    (group.runs[0].path / "clients.csv").unlink()  # as with privacy: the steps are not known
    (group,) = groups(tmp_path)
    assert group.tables[0]["gradients"].isna().all()


def test_without_a_server_the_bytes_are_those_between_nodes(tmp_path: Path) -> None:
    """The relay of a simulation, 15 bytes a round, is none of the method's."""
    file = write(tmp_path, [0.1, 0.2, 0.5, 0.7], algo="dfedavg") / "metrics.csv"
    pd.read_csv(file).assign(**{"peer-bytes": [math.nan, 100, math.nan, 40]}).to_csv(file)
    (group,) = groups(tmp_path)
    assert [*group.tables[0]["bytes"]] == [0, 100, 100, 140]  # round 2 failed
    (row,) = summary([group], 0.5).rows
    assert row["bytes-to-target"].mean == 100  # type: ignore[union-attr]


def test_the_cost_of_a_target_is_that_of_its_first_evaluation_over_the_runs_that_reached_it(
    tmp_path: Path,
) -> None:
    write(tmp_path, [0.9, None, 0.5, 0.7], seed=0)  # the untrained model does not count
    write(tmp_path, [0.1, 0.6, 0.6, 0.6], seed=1)
    write(tmp_path, [0.1, 0.2, 0.3, 0.4], seed=2)
    (group,) = groups(tmp_path)
    costs = to_target(group, "test-accuracy", 0.5)
    assert costs["round"] == Spread(1.5, math.sqrt(0.5), 2)
    assert costs["bytes"].mean == 22.5
    assert to_target(group, "test-accuracy", 0.99)["round"].number == 0
    assert to_target(group, "test-loss", 0.4)["round"].mean == 2  # rounds 3 and 1
    assert final(group, "test-accuracy").mean == pytest.approx((0.6 + 0.6 + 0.3) / 3)
    assert usual_target([group], "test-accuracy") == pytest.approx(0.9 * 0.5)
    assert usual_target([group], "test-loss") == pytest.approx(1.1 * 0.5)


def test_the_usual_target_of_a_loss_below_0_can_be_reached(tmp_path: Path) -> None:
    write(tmp_path, [0.0, 11.0])  # a loss of -10
    (group,) = groups(tmp_path)
    assert usual_target([group], "test-loss") == pytest.approx(-9)


def test_runs_are_ranked_at_a_number_of_simulated_seconds(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6, 0.9], lr=0.1, clock=10.0)
    write(tmp_path, [0.1, 0.5, 0.7], lr=0.2, clock=4.0)
    write(tmp_path, [0.1, 0.2, 0.3], lr=0.3)  # without devices
    every = groups(tmp_path)
    points = (None, Point(9.0), Point(10.0))
    first = [ranked(every, "test-accuracy", at)[0].settings["lr"] for at in points]
    assert first == [0.1, 0.2, 0.2]
    assert up_to(every[0], "test-accuracy", Point(19.0)).mean == 0.6
    assert up_to(every[0], "test-accuracy", Point(20.0)).mean == 0.9  # that second included
    assert math.isnan(up_to(every[2], "test-accuracy", Point(19.0)).mean)
    assert to_target(every[0], "test-accuracy", 0.7)["clock"].mean == 20
    row = summary(every, 0.7, at=9.0).rows[0]
    assert [*row][:2] == ["method", "test-accuracy-at-clock"]
    assert row["clock-to-target"] == Spread(8.0, math.nan, 1)


def test_without_a_clock_there_is_no_column_and_no_ranking_by_it(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6])
    assert "clock-to-target" not in summary(groups(tmp_path)).rows[0]
    with pytest.raises(ValueError, match="--at: expected runs with simulated seconds, which devi"):
        summary(groups(tmp_path), at=9.0)
    for at in ("soon", "nan", "metres=3", "dp-epsilon="):
        with pytest.raises(
            ValueError, match=r"--at: expected simulated seconds, e.g. 3600, or COST="
        ):
            summary(groups(tmp_path), at=at)
    for at in ("round=0", "-5"):
        with pytest.raises(ValueError, match=f"^--at: expected a cost above 0, got '{at}'$"):
            summary(groups(tmp_path), at=at)


def test_a_run_without_rounds_beside_private_ones_ends_nothing(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6], lr=0.1, epsilon=3.0)
    write(tmp_path, [], lr=0.2)
    rows = {row["rounds"]: row for row in summary(groups(tmp_path), 0.7).rows}
    assert rows[1]["dp-epsilon"].mean == 3.0
    assert rows[0]["dp-epsilon"].number == 0


def test_the_epsilon_of_a_row_is_of_the_runs_that_are_counted(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6, 0.7], epsilon=3.0)
    stopped = write(tmp_path, [0.1, 0.6], epsilon=3.0, seed=1) / "summary.json"
    stopped.write_text(stopped.read_text().replace("completed", "interrupted"))
    (row,) = summary(groups(tmp_path), 0.7).rows
    assert row["dp-epsilon"] == Spread.of([6.0])


def test_runs_are_ranked_at_an_epsilon(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6, 0.9], lr=0.1, epsilon=3.0)
    write(tmp_path, [0.1, 0.5, 0.7], lr=0.2, epsilon=1.0)
    write(tmp_path, [0.1, 0.2, 0.95], lr=0.3)  # without privacy
    table = summary(groups(tmp_path), 0.7, at="dp-epsilon=4")
    assert [group.settings["lr"] for group in table.groups] == [0.2, 0.1, 0.3]
    assert [row["test-accuracy-at-dp-epsilon"].mean for row in table.rows[:2]] == [0.7, 0.6]  # type: ignore[union-attr]
    assert [row["dp-epsilon-to-target"].mean for row in table.rows[:2]] == [2, 6]  # type: ignore[union-attr]
    assert [row["dp-epsilon"].mean for row in table.rows[:2]] == [2, 6]  # type: ignore[union-attr]
    assert {"test-accuracy at 4 epsilon", "epsilon to 70.00%"} <= {*table.texts()}
    by_bytes = summary(groups(tmp_path), at="bytes=15").groups
    assert [group.settings["lr"] for group in by_bytes] == [0.1, 0.2, 0.3]
    assert "dp-epsilon" in costs_of(table.groups)
    assert "dp-epsilon" not in costs_of(table.groups[2:])


def test_a_metric_of_ones_own_is_a_column_and_ranks_nothing(tmp_path: Path) -> None:
    for algo, accuracy, brier in (("fedavg", 0.5, 0.9), ("scaffold", 0.7, 0.4)):
        write(tmp_path, [0.1, accuracy, accuracy], algo=algo, brier=brier)
    write(tmp_path, [0.1, 0.6], algo="fedprox")
    table = summary(groups(tmp_path))
    assert table.metric == "test-accuracy"
    values = [row["test-brier-mean-of-last-10"] for row in table.rows]
    assert [value.mean for value in values[::2]] == [0.4, 0.9]  # type: ignore[union-attr]
    texts = table.texts()
    assert [*texts["method"]] == ["scaffold", "fedprox", "fedavg"]
    assert [*texts["test-brier, last 10"]] == ["0.4000", "-", "0.9000"]


@pytest.mark.parametrize(("number", "window"), [(10, 1), (60, 3), (500, 10)])
def test_smoothed_is_the_mean_of_the_last_twentieth_and_at_most_ten(
    number: int, window: int
) -> None:
    values = smoothed(pd.Series(range(number), dtype=float))
    assert values.iloc[-1] == np.mean(range(number - window, number))
    assert values.iloc[0] == 0


def test_without_evaluations_there_is_no_number_to_reach(tmp_path: Path) -> None:
    write(tmp_path, [0.1])
    table = summary(groups(tmp_path))
    assert [*table.texts()][6:8] == ["rounds to the target", "bytes sent to the target"]
    assert {text(cell) for key, cell in table.rows[0].items() if key.endswith("-target")} == {"-"}


def test_equal_numbers_of_several_seeds_have_no_spread() -> None:
    for value in (0.1, 0.7, 1 / 3, 0.9621):
        assert Spread.of([value] * 3, is_share=True).std == 0.0
    assert text(Spread.of([0.1] * 3, is_share=True)) == "10.00 ± 0.00%"
    assert Spread.of([0.1, 0.1 + 1e-6]).std > 0
    assert text(Spread.of([0.1, math.inf])) == "inf"  # without a warning of NumPy


def test_the_best_row_is_first_and_rows_without_an_evaluation_last(tmp_path: Path) -> None:
    for algo, values in (("a", [0.1, 0.3]), ("b", [None]), ("c", [0.1, 0.8]), ("d", [0.1, 0.5])):
        write(tmp_path, values, algo=algo)
    assert [row["method"] for row in summary(groups(tmp_path)).rows] == ["c", "d", "a", "b"]
    losses = [group.label for group in ranked(groups(tmp_path), "test-loss")]
    assert losses == ["c", "d", "a", "b"]
