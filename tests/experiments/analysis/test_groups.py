"""Groups of runs: their members and labels."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedaccord.config import affecting
from fedaccord.core.options import FREE, key_of
from fedaccord.data.kind import ReadOptions
from fedaccord.experiments.analysis.groups import (
    DEFAULTS,
    READING,
    TRIALS,
    groups_of,
    several_contents,
)
from fedaccord.experiments.analysis.ranking import (
    counted,
    final,
)
from fedaccord.experiments.analysis.table import summary, text
from fedaccord.runs import reader
from tests.cli.shell import invoke, success
from tests.experiments.analysis.made import groups, write
from tests.loading import ENDS_AT_PYTORCH


def test_seeds_are_one_group_and_its_label_has_what_differs(tmp_path: Path) -> None:
    for seed in (1, 0):
        write(tmp_path, [0.1, 0.5], seed=seed, threads=seed + 1, workers=seed)
    write(tmp_path, [0.1, 0.6], lr=0.05)
    write(tmp_path, [0.1, 0.7], algo="scaffold")
    by_label = {group.label: group for group in groups(tmp_path)}
    assert {*by_label} == {"fedavg lr=0.1", "fedavg lr=0.05", "scaffold lr=0.1"}
    both = by_label["fedavg lr=0.1"]
    assert [run.settings["seed"] for run in both.runs] == [0, 1]
    assert [*both.tables[1]["test-accuracy"]] == [0.1, 0.5]


def test_settings_that_affect_no_number_do_not_split_a_group(tmp_path: Path) -> None:
    free = sorted(affecting("records", "speed", "place") - {"name", "out-dir"})
    base = {"gossip.topology": "ring", "dp.epsilon": 1.0}  # the tables are in use
    for seed, key in enumerate(["none", *free]):
        write(tmp_path, [0.1, 0.5], seed=seed, **base, **({key: "other"} if key != "none" else {}))
    (group,) = groups(tmp_path)
    assert len(group.runs) == 1 + len(free)
    assert any("tracker" in run.settings for run in group.runs)
    write(tmp_path, [0.1, 0.5], seed=len(free) + 1, **base, **{"max-update-norm": 2.0})
    assert len(groups(tmp_path)) == 2


def test_other_data_or_code_behind_equal_settings_is_another_group(tmp_path: Path) -> None:
    for folder, model in (("a", "1"), ("b", "2"), ("c", "1")):
        write(tmp_path / folder, [0.1, 0.5], contents={"samples": "3", "model": model})
    write(tmp_path / "d", [0.1, 0.7], seed=1)  # of an earlier version
    write(tmp_path / "e", [0.1, 0.7], lr=0.05, contents={"samples": "4"})
    sizes = {group.label: len(group.runs + group.repeats) for group in groups(tmp_path)}
    equal = "fedavg lr=0.1 contents.model="
    assert sizes == {"fedavg lr=0.05": 1, f"{equal}1": 2, f"{equal}2": 1, f"{equal}unknown": 1}
    assert several_contents(groups(tmp_path)) == ["samples", "model"]
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "e")
    (group,) = groups(tmp_path)  # what is unknown is the one that is known
    assert ([run.settings["seed"] for run in group.runs], group.label) == ([0, 1], "fedavg")
    write(tmp_path / "f", [0.1, 0.7], image_size=8, contents={"samples": "4"})
    assert not several_contents(groups(tmp_path))


def test_runs_with_several_metrics_of_ones_own_are_one_group(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        write(tmp_path, [0.1], seed=seed, metrics=f"mine:{name}", contents={"metrics": name})
    assert len(groups(tmp_path)) == 1
    write(tmp_path, [0.1], seed=2, metrics="mine:b", contents={"metrics": "changed"})
    assert len(groups(tmp_path)) == 3
    assert not several_contents(groups(tmp_path))


def test_pytorch_is_loaded_for_the_options_of_other_packages_alone(tmp_path: Path) -> None:
    code = """from pathlib import Path; from fedaccord.runs import reader
from fedaccord.experiments.analysis.groups import groups_of
for path in sys.argv[1:]:
    assert "torch" not in sys.modules; groups_of([reader.read(Path(path))]); print("groups")"""
    paths = [
        write(tmp_path / str(len(keys)), [0.1, 0.5], contents={"samples": "3"}, **keys)
        for keys in ({}, {"of-another-package.beta": 1.0})
    ]
    until = ENDS_AT_PYTORCH.format("'PyTorch'")
    command = [sys.executable, "-c", until + code, *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["groups", "PyTorch"]


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
    result = groups_of([reader.read(tmp_path / name) for name in ("bFalsex", "bTruey", "aTruey")])
    labels = ["b lr=0.1 model=y", "b lr=0.2 model=x", "a lr=0.1 model=y"]
    assert [group.label for group in result] == labels
    assert groups(tmp_path)[0].label == "a lr=0.1 model=y"


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
    line = "left out: 2 runs of a sweep: trials on validation samples, which chose the"
    for command in (["compare"], ["report", "--out", tmp_path / "r.html"]):
        assert line in " ".join(success(invoke(*command, tmp_path)).output.split())
    page = (tmp_path / "r.html").read_text()
    assert page.count("no, a trial") == 2
    only = summary(groups(folder))
    assert [*only.texts()["method"]] == ["fedavg lr=0.05", "fedavg lr=0.1"]


def test_only_the_tests_of_a_sweeps_last_start_are_compared(tmp_path: Path) -> None:
    folder, words = tmp_path / "sweep" / "runs", ["trial,stage,algo,seed,lr"]
    folder.mkdir(parents=True)
    (folder.parent / DEFAULTS).write_text("{}")
    write(folder, [0.1, 0.5], lr=0.5, validation=0.1)
    for seed, end in enumerate((0.5, 0.6, 0.9)):
        write(folder, [0.1, end], seed=seed, validation=0.0)
    words.append("fedavg-0.5,tune,fedavg,0,0.5")
    words += [f"fedavg-0.1,test,fedavg,{seed},0.1" for seed in (0, 1)]
    (folder.parent / TRIALS).write_text("\n".join(words))
    for path in (folder / "fedavg-0.1-0", folder / "fedavg-0.1-1", folder / "fedavg-0.1-2"):
        path.rename(folder / path.name.replace("0.1-", "0.1-seed"))
    (row,) = summary(groups(folder.parent)).rows
    assert row["seeds"] == "2 (0, 1)"
    assert row["test-accuracy-mean-of-last-10"].mean == pytest.approx(0.55)


def test_labels_of_a_sweep_have_what_its_trials_chose(tmp_path: Path) -> None:
    folder, trial = tmp_path / "sweep" / "runs", {"validation": 0.1, "num-server-rounds": 1}
    for algo, keys in {"fedavg": (), "fedinit": ("relaxed-init.beta",), "feddyn": ()}.items():
        decay = {"lr-decay": 0.999 if algo == "feddyn" else 0.998}
        for lr in (0.05, 0.1):
            own = dict.fromkeys(keys, lr / 2)
            write(folder, [0.1, 0.5], algo=algo, lr=lr, **decay, **own, **trial)
        own = dict.fromkeys(keys, 0.05)
        write(folder, [0.1, 0.6], algo=algo, lr=0.1, seed=1, validation=0.0, **decay, **own)
    (folder.parent / DEFAULTS).write_text("{}")
    labels = sorted(summary(groups(tmp_path)).texts()["method"])
    assert labels == ["fedavg", "feddyn lr-decay=0.999", "fedinit relaxed-init.beta=0.05"]


def test_labels_of_a_sweep_leave_out_what_most_methods_share_unless_it_was_tuned(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sweep" / "runs"
    for algo, best, batch, decay in (
        ("fedavg", 0.1, 50, 0.997),
        ("fedprox", 0.1, 50, 0.998),
        ("feddyn", 0.05, 20, 0.999),
    ):
        own = {"batch-size": batch, "lr-decay": decay}
        write(folder, [0.1, 0.6], algo=algo, lr=best, seed=1, validation=0.0, **own)
    own = {"batch-size": 50, "lr-decay": 0.997, "validation": 0.1}
    for lr in (0.05, 0.1):  # trials
        write(folder, [0.1, 0.5], lr=lr, **own)
    (folder.parent / DEFAULTS).write_text("{}")
    assert sorted(summary(groups(tmp_path)).texts()["method"]) == [
        "fedavg lr=0.1 lr-decay=0.997",
        "feddyn batch-size=20 lr=0.05 lr-decay=0.999",
        "fedprox lr=0.1 lr-decay=0.998",
    ]


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


def test_a_seed_that_was_run_again_is_marked_and_counts_once(tmp_path: Path) -> None:
    first = write(tmp_path, [0.1, 0.5, 0.7])
    for copy in ("b", "c", "d"):
        shutil.copytree(first, tmp_path / copy)
    (group,) = groups(tmp_path)
    assert (len(group.runs), len(group.tables), len(group.repeats)) == (1, 1, 3)
    table = summary([group])
    assert table.rows[0]["seeds"] == "1 (0), 3 repeats"
    assert text(table.rows[0]["test-accuracy-last"]) == "70.00%"
    assert not any("±" in cell for cell in table.texts().to_numpy().ravel())
    numbers = table.numbers().to_dict("records")[0]
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


def test_of_equally_long_runs_of_a_seed_the_one_with_more_evaluations_counts(
    tmp_path: Path,
) -> None:
    every_third = write(tmp_path / "a", [0.1, None, None, 0.7], eval_every=3)
    each = write(tmp_path / "b", [0.1, 0.3, 0.5, 0.7])
    (group,) = groups(tmp_path)
    assert [run.path for run in group.runs] == [each.resolve()]
    assert [run.path for run in group.repeats] == [every_third.resolve()]


def test_an_interrupted_run_does_not_count_beside_completed_ones(tmp_path: Path) -> None:
    paths = [write(tmp_path, [0.1, *[0.5 + 0.1 * seed] * 12], seed=seed) for seed in range(2)]
    (group,) = groups(tmp_path)
    before = summary([group])
    cut = write(tmp_path, [0.1, 0.2], seed=2)
    for path in (cut, *paths):
        file = path / "summary.json"
        file.write_text(file.read_text().replace('"completed"', '"interrupted"'))
        (group,) = groups(tmp_path)
        after = summary([group])
        if path == cut:
            assert after.target == before.target == pytest.approx(0.9 * 0.55)
            name = "test-accuracy-mean-of-last-10"
            assert after.rows[0][name] == before.rows[0][name]
            assert after.rows[0]["seeds"] == "3 (0, 1, 2), 1 interrupted"
            assert counted(group) == {*paths}
    assert final(group, "test-accuracy").number == 3  # none is completed: all of them


def test_runs_of_one_data_set_are_those_that_read_it_alike() -> None:
    """The keys are written out in `groups`, which loads no PyTorch."""
    reading = {"dataset", *map(key_of, ReadOptions._fields)} - affecting(*FREE)
    assert {*READING} == reading
