"""Groups of runs: who belongs together, what they cost, when they are at the target."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedaccord.analysis.groups import (
    Group,
    Spread,
    final,
    groups_of,
    headline,
    smoothed,
    to_target,
    tuned,
    usual_target,
)
from fedaccord.analysis.table import shown, summary, text
from fedaccord.config import affecting
from fedaccord.runs import reader
from tests.analysis.made import write


def groups(folder: Path) -> list[Group]:
    return groups_of([reader.read(path) for path in reader.find([folder])])


def test_seeds_are_one_group_and_its_label_has_what_differs(tmp_path: Path) -> None:
    for seed in (1, 0):
        how = {"threads": seed + 1, "vectorize": "on" if seed else "off", "workers": seed}
        write(tmp_path, [0.1, 0.5], seed=seed, **how)
    write(tmp_path, [0.1, 0.6], lr=0.05)
    write(tmp_path, [0.1, 0.7], algo="scaffold")
    found = {group.label: group for group in groups(tmp_path)}
    assert {*found} == {"fedavg lr=0.1", "fedavg lr=0.05", "scaffold lr=0.1"}
    both = found["fedavg lr=0.1"]
    assert [run.settings["seed"] for run in both.runs] == [0, 1]
    assert [*both.tables[1]["test-accuracy"]] == [0.1, 0.5]


def test_where_a_run_was_followed_and_what_was_measured_make_no_other_group(tmp_path: Path) -> None:
    free = sorted(affecting("records", "speed", "place") - {"name", "out-dir"})
    for seed, key in enumerate(["none", *free]):
        write(tmp_path, [0.1, 0.5], seed=seed, **({key: "other"} if key != "none" else {}))
    (group,) = groups(tmp_path)
    assert len(group.runs) == 1 + len(free)
    assert any("tracker" in run.settings for run in group.runs)
    write(tmp_path, [0.1, 0.5], seed=len(free) + 1, **{"max-update-norm": 2.0})
    assert len(groups(tmp_path)) == 2


def test_groups_are_in_the_order_of_their_methods_and_of_the_sizes_of_settings(
    tmp_path: Path,
) -> None:
    for algo, lr, model in (("b", 0.2, "x"), ("a", 0.1, "y"), ("b", 0.1, "y"), ("b", 0.1, "x")):
        write(tmp_path, [0.1], algo=algo, lr=lr, model=model)
        (tmp_path / f"{algo}-{lr}-0").rename(tmp_path / f"{algo}{lr == 0.1}{model}")
    found = groups_of([reader.read(tmp_path / name) for name in ("bFalsex", "bTruey", "aTruey")])
    labels = ["b lr=0.1 model=y", "b lr=0.2 model=x", "a lr=0.1 model=y"]
    assert [group.label for group in found] == labels
    assert groups(tmp_path)[0].label == "a lr=0.1 model=y"


def test_a_sweep_is_sensitive_on_what_it_was_tuned_by(tmp_path: Path) -> None:
    for lr in (0.05, 0.1):
        tuning = write(tmp_path, [0.1, 0.5], lr=lr, validation=0.1)
        table = tuning / "metrics.csv"
        table.write_text(table.read_text().replace("test-", "validation-"))
    tested = write(tmp_path / "tests", [0.1, 0.6], lr=0.1, validation=0.0)
    metric, those = tuned(groups(tmp_path))
    assert metric == "validation-accuracy"
    assert {group.settings["lr"] for group in those} == {0.05, 0.1}
    assert all(run.path != tested for group in those for run in group.runs)
    assert tuned(groups(tested))[0] == headline(groups(tmp_path)) == "test-accuracy"


def test_what_only_one_of_two_runs_of_a_method_has_is_in_its_label(tmp_path: Path) -> None:
    write(tmp_path, [0.1], **{"fedavg.server-lr": 1.0})
    write(tmp_path, [0.1], seed=1, **{"fedavg.server-lr": 1.0, "relaxed-init.beta": 0.1})
    write(tmp_path, [0.1], algo="scaffold", **{"scaffold.server-lr": 0.5})
    labels = {group.label for group in groups(tmp_path)}
    assert labels == {"fedavg", "fedavg relaxed-init.beta=0.1", "scaffold"}


def test_costs_add_up_over_the_rounds(tmp_path: Path) -> None:
    write(tmp_path, [0.1, None, 0.5, 0.7])
    (group,) = groups(tmp_path)
    (table,) = group.tables
    assert [*table["bytes"]] == [0, 15, 30, 45]
    assert [*table["gradients"]] == [0, 14, 20, 34]  # 2 (3 + 4), then one client's 2 x 3
    assert [*table["seconds"]] == [0, 2, 4, 6]


def test_the_target_is_counted_at_its_first_evaluation_over_the_runs_that_came(
    tmp_path: Path,
) -> None:
    write(tmp_path, [0.9, None, 0.5, 0.7], seed=0)  # the untrained model does not count
    write(tmp_path, [0.1, 0.6, 0.6, 0.6], seed=1)
    write(tmp_path, [0.1, 0.2, 0.3, 0.4], seed=2)
    (group,) = groups(tmp_path)
    spent = to_target(group, "test-accuracy", 0.5)
    assert spent["round"] == Spread(1.5, math.sqrt(0.5), 2)
    assert spent["bytes"].mean == 22.5
    assert to_target(group, "test-accuracy", 0.99)["round"].number == 0
    assert to_target(group, "test-loss", 0.4)["round"].mean == 2  # rounds 3 and 1
    assert final(group, "test-accuracy").mean == pytest.approx((0.6 + 0.6 + 0.3) / 3)
    assert usual_target([group], "test-accuracy") == pytest.approx(0.45)


@pytest.mark.parametrize(("number", "window"), [(10, 1), (60, 3), (500, 10)])
def test_smoothed_is_the_mean_of_the_last_twentieth_and_at_most_ten(
    number: int, window: int
) -> None:
    values = smoothed(pd.Series(range(number), dtype=float))
    assert values.iloc[-1] == np.mean(range(number - window, number))
    assert values.iloc[0] == 0


def test_the_table_names_failures_and_targets_that_were_not_reached(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.5], seed=0)
    failed = write(tmp_path, [0.1, 0.3], seed=1)
    text_of = (failed / "summary.json").read_text()
    (failed / "summary.json").write_text(text_of.replace("completed", "failed"))
    rows, target = summary(groups(tmp_path), target=0.4)
    assert target == 0.4
    (row,) = rows
    assert row["runs"] == "1 completed, 1 failed"
    assert row["reached"] == "1 of 2"
    assert text(row["last"]) == "0.4000 ± 0.1414"
    assert text(row["batch gradients to 0.4000"]) == "14"
    (row,) = summary(groups(tmp_path), target=0.8)[0]
    assert text(row["rounds to 0.8000"]) == "-"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.93333, "0.9333"),
        (3.0, "3"),
        (4.5, "4.5"),
        (0.9, "0.9000"),
        (12345.0, "12.35k"),
        (2.5e9, "2.5G"),
        (-31.4159, "-31.42"),
    ],
)
def test_numbers_are_short(value: float, expected: str) -> None:
    assert shown(value) == expected
