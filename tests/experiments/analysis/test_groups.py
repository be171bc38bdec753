"""Groups of runs: their members, their costs, and when they reach a target."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedaccord.config import affecting
from fedaccord.experiments.analysis.groups import (
    DEFAULTS,
    Group,
    Point,
    Spread,
    costs_of,
    final,
    groups_of,
    main_metric,
    ranked,
    several_samples,
    smoothed,
    to_target,
    tuned,
    up_to,
    usual_target,
)
from fedaccord.experiments.analysis.table import shown, summary, text
from fedaccord.runs import reader
from tests.cli.shell import invoke, success
from tests.experiments.analysis.made import write


def groups(folder: Path) -> list[Group]:
    return groups_of([reader.read(path) for path in reader.find([folder])])


def test_seeds_are_one_group_and_its_label_has_what_differs(tmp_path: Path) -> None:
    for seed in (1, 0):
        write(tmp_path, [0.1, 0.5], seed=seed, threads=seed + 1, workers=seed)
    write(tmp_path, [0.1, 0.6], lr=0.05)
    write(tmp_path, [0.1, 0.7], algo="scaffold")
    found = {group.label: group for group in groups(tmp_path)}
    assert {*found} == {"fedavg lr=0.1", "fedavg lr=0.05", "scaffold lr=0.1"}
    both = found["fedavg lr=0.1"]
    assert [run.settings["seed"] for run in both.runs] == [0, 1]
    assert [*both.tables[1]["test-accuracy"]] == [0.1, 0.5]


def test_settings_that_affect_no_number_do_not_split_a_group(tmp_path: Path) -> None:
    free = sorted(affecting("records", "speed", "place") - {"name", "out-dir"})
    used = {"gossip.topology": "ring", "dp.epsilon": 1.0}  # the tables are in use
    for seed, key in enumerate(["none", *free]):
        write(tmp_path, [0.1, 0.5], seed=seed, **used, **({key: "other"} if key != "none" else {}))
    (group,) = groups(tmp_path)
    assert len(group.runs) == 1 + len(free)
    assert any("tracker" in run.settings for run in group.runs)
    write(tmp_path, [0.1, 0.5], seed=len(free) + 1, **used, **{"max-update-norm": 2.0})
    assert len(groups(tmp_path)) == 2


def test_other_data_or_code_behind_equal_settings_is_another_group(tmp_path: Path) -> None:
    for folder, model in (("a", "1"), ("b", "2"), ("c", "1")):
        write(tmp_path / folder, [0.1, 0.5], contents={"samples": "3", "model": model})
    write(tmp_path / "d", [0.1, 0.7], seed=1)  # of an earlier version
    write(tmp_path / "e", [0.1, 0.7], lr=0.05, contents={"samples": "4"})
    found = {group.label: len(group.runs + group.repeats) for group in groups(tmp_path)}
    equal = "fedavg lr=0.1 contents.model="
    assert found == {"fedavg lr=0.05": 1, f"{equal}1": 2, f"{equal}2": 1, f"{equal}unknown": 1}
    assert several_samples(groups(tmp_path))
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "e")
    (group,) = groups(tmp_path)  # what is unknown is the one that is known
    assert ([run.settings["seed"] for run in group.runs], group.label) == ([0, 1], "fedavg")
    write(tmp_path / "f", [0.1, 0.7], image_size=8, contents={"samples": "4"})
    assert not several_samples(groups(tmp_path))


def test_pytorch_is_loaded_for_the_options_of_other_packages_alone(tmp_path: Path) -> None:
    code = """import sys; from pathlib import Path; from fedaccord.runs import reader
from fedaccord.experiments.analysis.groups import groups_of
groups_of([reader.read(Path(sys.argv[1]))]); print('torch' in sys.modules)"""
    found = []
    for keys in ({}, {"of-another-package.beta": 1.0}):
        path = write(tmp_path / str(len(keys)), [0.1, 0.5], contents={"samples": "3"}, **keys)
        command = [sys.executable, "-c", code, str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(result.stdout.strip())
    assert found == ["False", "True"]


def test_a_key_that_an_older_version_did_not_have_counts_as_its_default(tmp_path: Path) -> None:
    new = {"max-client-norm": 0.0, "gossip.topology": "ring"}
    for table in ({}, {"gossip.eval-nodes": True}):
        write(tmp_path, [0.1, 0.5], seed=len(table), **new, **table)
    write(tmp_path, [0.1, 0.5], seed=2, **{"gossip.topology": "ring"})
    (group,) = groups(tmp_path)
    assert (group.label, len(group.runs)) == ("fedavg", 3)
    write(tmp_path, [0.1, 0.5], lr=0.2, **{"max-client-norm": 3.0})
    write(tmp_path, [0.1, 0.5], algo="scaffold", **{"scaffold.server-lr": 1.0})
    write(tmp_path, [0.1, 0.5], algo="scaffold", seed=1)
    assert sorted(group.label for group in groups(tmp_path)) == [
        "fedavg gossip.topology=ring lr=0.1 max-client-norm=0",
        "fedavg lr=0.2 max-client-norm=3",
        "scaffold lr=0.1 max-client-norm=0",
    ]


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


def test_the_sensitivity_of_a_sweep_is_by_its_tuning_metric(tmp_path: Path) -> None:
    for lr in (0.05, 0.1):
        tuning = write(tmp_path, [0.1, 0.5], lr=lr, validation=0.1)
        table = tuning / "metrics.csv"
        table.write_text(table.read_text().replace("test-", "validation-"))
    tested = write(tmp_path / "tests", [0.1, 0.6], lr=0.1, validation=0.0)
    metric, those = tuned(groups(tmp_path))
    assert metric == "validation-accuracy"
    assert {group.settings["lr"] for group in those} == {0.05, 0.1}
    assert all(run.path != tested for group in those for run in group.runs)
    assert tuned(groups(tested))[0] == main_metric(groups(tmp_path)) == "test-accuracy"


def test_trials_of_a_sweep_are_not_compared_with_the_tested_runs(tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "runs"
    for lr in (0.05, 0.1):
        tuning = write(folder, [0.1, 0.5], lr=lr, validation=0.1, **{"num-server-rounds": 1})
        table = tuning / "metrics.csv"
        table.write_text(table.read_text().replace("test-", "validation-"))
    only_trials = summary(groups(tmp_path))
    assert only_trials.metric == "validation-accuracy"
    assert [*only_trials.texts()["method"]] == ["fedavg lr=0.05", "fedavg lr=0.1"]
    write(tmp_path / "tests", [0.1, 0.6], lr=0.1, validation=0.0)
    assert len(summary(groups(tmp_path)).rows) == 3  # these are no sweep's
    (folder.parent / DEFAULTS).write_text("{}")
    rows = summary(groups(tmp_path))
    assert [*rows.texts()["method"]] == ["fedavg"]
    assert rows.rows[0]["rounds"] == 1
    line = "left out: 2 of a sweep's runs: trials on validation samples, which chose the"
    for command in (["compare"], ["report", "--out", tmp_path / "r.html"]):
        assert line in " ".join(success(invoke(*command, tmp_path)).output.split())
    page = (tmp_path / "r.html").read_text()
    assert page.count("no, a trial") == 2
    only = summary(groups(folder))
    assert [*only.texts()["method"]] == ["fedavg lr=0.05", "fedavg lr=0.1"]


def test_a_run_that_failed_has_no_numbers(tmp_path: Path) -> None:
    for seed, accuracy in ((0, 0.7), (1, 0.1)):
        path = write(tmp_path, [0.1, accuracy], seed=seed)
    failed = path / "summary.json"
    failed.write_text(failed.read_text().replace("completed", "failed"))
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
        ValueError, match=r"^--target: expected a share in \[0, 1\], as 0.9, of test"
    ):
        summary(groups(tmp_path), target)


def test_labels_are_short_and_differ(tmp_path: Path) -> None:
    for lr in (0.123456789, 0.3):
        write(tmp_path, [0.1], lr=lr)
    assert [group.label for group in groups(tmp_path)] == ["fedavg lr=0.1235", "fedavg lr=0.3"]
    write(tmp_path, [0.1], lr=0.12345678)
    labels = [group.label for group in groups(tmp_path)]
    assert labels == ["fedavg lr=0.12345678", "fedavg lr=0.123456789", "fedavg lr=0.3"]


def test_a_key_that_only_one_run_of_a_method_has_is_in_its_label(tmp_path: Path) -> None:
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


def test_the_cost_of_a_target_is_that_of_its_first_evaluation_over_the_runs_that_reached_it(
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


def test_runs_are_ranked_at_a_number_of_simulated_seconds(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6, 0.9], lr=0.1, clock=10.0)
    write(tmp_path, [0.1, 0.5, 0.7], lr=0.2, clock=4.0)
    write(tmp_path, [0.1, 0.2, 0.3], lr=0.3)  # without devices
    found = groups(tmp_path)
    points = (None, Point(9.0), Point(10.0))
    first = [ranked(found, "test-accuracy", at)[0].settings["lr"] for at in points]
    assert first == [0.1, 0.2, 0.2]
    assert up_to(found[0], "test-accuracy", Point(19.0)).mean == 0.6
    assert math.isnan(up_to(found[2], "test-accuracy", Point(19.0)).mean)
    assert to_target(found[0], "test-accuracy", 0.7)["clock"].mean == 20
    row = summary(found, 0.7, at=9.0).rows[0]
    assert [*row][:2] == ["method", "test-accuracy-at-clock"]
    assert row["clock-to-target"] == Spread(8.0, math.nan, 1)


def test_without_a_clock_there_is_no_column_and_no_ranking_by_it(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6])
    assert "clock-to-target" not in summary(groups(tmp_path)).rows[0]
    with pytest.raises(ValueError, match="--at: expected runs with simulated seconds, which devi"):
        summary(groups(tmp_path), at=9.0)
    for at in ("soon", "nan", "metres=3", "dp-epsilon="):
        with pytest.raises(ValueError, match="--at: expected simulated seconds, as 3600, or COST="):
            summary(groups(tmp_path), at=at)


def test_a_run_without_rounds_beside_private_ones_ends_nothing(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6], lr=0.1, epsilon=3.0)
    write(tmp_path, [], lr=0.2)
    found = {row["rounds"]: row for row in summary(groups(tmp_path), 0.7).rows}
    assert found[1]["dp-epsilon"].mean == 3.0
    assert found[0]["dp-epsilon"].number == 0


def test_runs_are_ranked_at_an_epsilon(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.6, 0.9], lr=0.1, epsilon=3.0)
    write(tmp_path, [0.1, 0.5, 0.7], lr=0.2, epsilon=1.0)
    write(tmp_path, [0.1, 0.2, 0.95], lr=0.3)  # without privacy
    found = summary(groups(tmp_path), 0.7, at="dp-epsilon=4")
    assert [group.settings["lr"] for group in found.groups] == [0.2, 0.1, 0.3]
    assert [row["test-accuracy-at-dp-epsilon"].mean for row in found.rows[:2]] == [0.7, 0.6]  # type: ignore[union-attr]
    assert [row["dp-epsilon-to-target"].mean for row in found.rows[:2]] == [2, 6]  # type: ignore[union-attr]
    assert [row["dp-epsilon"].mean for row in found.rows[:2]] == [2, 6]  # type: ignore[union-attr]
    assert {"test-accuracy at 4 epsilon", "epsilon to 70.00%"} <= {*found.texts()}
    by_bytes = summary(groups(tmp_path), at="bytes=15").groups
    assert [group.settings["lr"] for group in by_bytes] == [0.1, 0.2, 0.3]
    assert "dp-epsilon" in costs_of(found.groups)
    assert "dp-epsilon" not in costs_of(found.groups[2:])


def test_a_metric_of_ones_own_is_a_column_and_ranks_nothing(tmp_path: Path) -> None:
    for algo, accuracy, brier in (("fedavg", 0.5, 0.9), ("scaffold", 0.7, 0.4)):
        write(tmp_path, [0.1, accuracy, accuracy], algo=algo, brier=brier)
    write(tmp_path, [0.1, 0.6], algo="fedprox")
    found = summary(groups(tmp_path))
    assert found.metric == "test-accuracy"
    values = [row["test-brier-mean-of-last-10"] for row in found.rows]
    assert [value.mean for value in values[::2]] == [0.4, 0.9]  # type: ignore[union-attr]
    texts = found.texts()
    assert [*texts["method"]] == ["scaffold", "fedprox", "fedavg"]
    assert [*texts["test-brier, last 10"]] == ["0.4000", "-", "0.9000"]


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
    found = summary(groups(tmp_path), target=0.4)
    assert found.target == 0.4
    (row,) = found.rows
    assert row["seeds"] == "2 (0, 1), 1 failed"
    assert row["reached"] == "1 of 2"
    assert text(row["test-accuracy-last"]) == "50.00%"  # of the completed run
    assert text(row["gradients-to-target"]) == "14"
    assert [*found.texts()][6:8] == ["rounds to 40.00%", "bytes sent to 40.00%"]
    (row,) = summary(groups(tmp_path), target=0.8).rows
    assert text(row["round-to-target"]) == "-"


def test_without_evaluations_there_is_no_number_to_reach(tmp_path: Path) -> None:
    write(tmp_path, [0.1])
    found = summary(groups(tmp_path))
    assert [*found.texts()][6:8] == ["rounds to the target", "bytes sent to the target"]
    assert {text(cell) for key, cell in found.rows[0].items() if key.endswith("-target")} == {"-"}


def test_a_seed_that_was_run_again_is_marked_and_counts_once(tmp_path: Path) -> None:
    first = write(tmp_path, [0.1, 0.5, 0.7])
    for copy in ("b", "c", "d"):
        shutil.copytree(first, tmp_path / copy)
    (group,) = groups(tmp_path)
    assert (len(group.runs), len(group.tables), len(group.repeats)) == (1, 1, 3)
    found = summary([group])
    assert found.rows[0]["seeds"] == "1 (0), 3 repeats"
    assert text(found.rows[0]["test-accuracy-last"]) == "70.00%"
    assert not any("±" in cell for cell in found.texts().to_numpy().ravel())
    numbers = found.numbers().to_dict("records")[0]
    assert (numbers["seeds"], numbers["runs"], numbers["repeats"]) == ([0], 1, 3)
    assert np.isnan(numbers["test-accuracy-last-std"])
    write(tmp_path, [0.1, 0.5, 0.9], seed=1)
    (group,) = groups(tmp_path)
    assert summary([group]).rows[0]["seeds"] == "2 (0, 1), 3 repeats"
    assert final(group, "test-accuracy").mean == pytest.approx((0.6 + 0.7) / 2)


def test_of_several_runs_of_a_seed_the_one_with_the_most_progress_counts(tmp_path: Path) -> None:
    short = write(tmp_path / "a", [0.1, 0.5, 0.7, 0.7])
    summary_file = short / "summary.json"
    summary_file.write_text(summary_file.read_text().replace("completed", "interrupted"))
    whole = write(tmp_path / "b", [0.1, 0.5, 0.6])
    (group,) = groups(tmp_path)
    assert [run.path for run in group.runs] == [whole.resolve()]
    assert [run.path for run in group.repeats] == [short.resolve()]


def test_equal_numbers_of_several_seeds_have_no_spread() -> None:
    for value in (0.1, 0.7, 1 / 3, 0.9621):
        assert Spread.of([value] * 3, is_share=True).std == 0.0
    assert text(Spread.of([0.1] * 3, is_share=True)) == "10.00 ± 0.00%"
    assert Spread.of([0.1, 0.1 + 1e-6]).std > 0


def test_the_best_row_is_first_and_rows_without_an_evaluation_last(tmp_path: Path) -> None:
    for algo, values in (("a", [0.1, 0.3]), ("b", [None]), ("c", [0.1, 0.8]), ("d", [0.1, 0.5])):
        write(tmp_path, values, algo=algo)
    assert [row["method"] for row in summary(groups(tmp_path)).rows] == ["c", "d", "a", "b"]
    losses = [group.label for group in ranked(groups(tmp_path), "test-loss")]
    assert losses == ["c", "d", "a", "b"]


def test_a_long_list_of_seeds_is_abbreviated(tmp_path: Path) -> None:
    for seed in range(7):
        write(tmp_path, [0.1, 0.5], seed=seed)
    assert summary(groups(tmp_path)).rows[0]["seeds"] == "7 (0 to 6)"
    shutil.rmtree(tmp_path / "fedavg-0.1-2")
    assert summary(groups(tmp_path)).rows[0]["seeds"] == "6 (0, 1, 3, 4, 5, ...)"


def test_numbers_are_short() -> None:
    values = (0.93333, 3.0, 4.5, 0.9, 12345.0, 2.5e9, -31.4159)
    words = ["0.9333", "3", "4.5", "0.9000", "12.35k", "2.5G", "-31.42"]
    assert [*map(shown, values)] == words
