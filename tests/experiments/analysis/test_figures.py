"""Figures for papers: curves of what the runs measured."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedaccord.experiments.analysis import figures
from fedaccord.experiments.analysis.groups import groups_of
from fedaccord.runs import reader
from fedaccord.strategies import METHODS
from tests.cli.shell import invoke, success
from tests.experiments.analysis.made import write


def test_a_curve_is_the_mean_over_seeds_with_its_spread(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.5, 0.7], seed=0)
    write(tmp_path, [0.1, 0.7, 0.9], seed=1)
    (group,) = groups_of([reader.read(path) for path in reader.find([tmp_path])])
    line = figures.curve(group, "test-accuracy", "bytes")
    assert [*line["x"]] == [0, 15, 30]
    np.testing.assert_allclose(line["raw"], [0.1, 0.6, 0.8])
    np.testing.assert_allclose(line["smooth"], line["raw"])  # few evaluations
    np.testing.assert_allclose(line["high"] - line["smooth"], [0, 0.02**0.5, 0.02**0.5], atol=1e-12)
    (axes,) = figures.draw([group], "test-accuracy").axes
    np.testing.assert_allclose(axes.lines[0].get_ydata(), line["smooth"])
    low, high = axes.get_ylim()  # the untrained model, 0.1, is below the picture
    assert 0.4 < low < line["low"].iloc[1]
    assert line["high"].iloc[2] < high < 1


def test_a_failed_run_is_in_no_curve(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.5, 0.7], seed=0)
    path = write(tmp_path, [0.1, 0.01], seed=1)
    file = path / "summary.json"
    file.write_text(file.read_text().replace('"completed"', '"failed"'))
    (group,) = groups_of([reader.read(path) for path in reader.find([tmp_path])])
    np.testing.assert_allclose(figures.curve(group, "test-accuracy")["raw"], [0.1, 0.5, 0.7])
    (alone,) = groups_of([reader.read(path)])
    assert len(figures.curve(alone, "test-accuracy")) == 2


@pytest.mark.parametrize("last", ["completed", "running"])
def test_a_curve_is_of_the_same_runs_along_its_whole_line(last: str, tmp_path: Path) -> None:
    """Of the completed ones; if there are none, to their last common round."""
    unfinished = [write(tmp_path, [0.1, 0.3], seed=1), write(tmp_path, [0.1, 0.5, 0.7], seed=0)]
    for path in unfinished[: 1 if last == "completed" else 2]:
        file = path / "summary.json"
        file.write_text(file.read_text().replace('"completed"', '"interrupted"'))
    (group,) = groups_of([reader.read(path) for path in reader.find([tmp_path])])
    line = figures.curve(group, "test-accuracy", "seconds")
    wanted = [0.1, 0.5, 0.7] if last == "completed" else [0.1, 0.4]
    np.testing.assert_allclose(line["raw"], wanted)
    assert line["x"].is_monotonic_increasing


@pytest.mark.parametrize("rows", [[0.1, 0.3], []])
def test_a_run_without_a_row_yet_is_in_no_curve(rows: list[float], tmp_path: Path) -> None:
    """As the second seed of a sweep that has just begun."""
    for seed, values in enumerate((rows, [])):
        path = write(tmp_path, values or [0.1], seed=seed)
        file = path / "summary.json"
        file.write_text(file.read_text().replace('"completed"', '"running"'))
        if not values:
            (path / "metrics.csv").unlink()
    (group,) = groups_of([reader.read(path) for path in reader.find([tmp_path])])
    assert len(figures.curve(group, "test-accuracy")) == len(rows)


def test_smoothing_begins_after_the_untrained_model(tmp_path: Path) -> None:
    (group,) = groups_of([reader.read(write(tmp_path, [0.1, *[0.7] * 60]))])
    smooth = figures.curve(group, "test-accuracy")["smooth"]
    np.testing.assert_allclose(smooth, [0.1, *[0.7] * 60])


def test_a_metric_of_ones_own_has_a_curve(tmp_path: Path) -> None:
    (group,) = groups_of([reader.read(write(tmp_path, [0.1, 0.5, 0.7], brier=0.3))])
    titles = figures.metrics_of([group])
    assert titles["test-brier"] == "test brier"
    assert [*titles].index("test-brier") < [*titles].index("drift")  # beside what is evaluated
    (axes,) = figures.draw([group], "test-brier").axes
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.3, 0.3, 0.3])
    assert axes.get_ylabel() == "test brier"


def test_large_costs_have_prefixes_and_lines_their_styles(tmp_path: Path) -> None:
    (group,) = groups_of([reader.read(write(tmp_path, [0.1, 0.5]))])
    words = [
        figures.draw([group], "test-accuracy", over).axes[0].xaxis.get_major_formatter()(20e6)
        for over in ("bytes", "gradients")
    ]
    assert words == ["20M", "20M"]
    assert len({*figures.styles([*map(str, range(28))])}) == 28


def test_a_method_looks_the_same_beside_others() -> None:
    few = ["fedavg", "afedpd", "scaffold"]
    many = ["fedinit beta=0", *few, "fedinit beta=0.1", "feddyn"]
    looks = dict(zip(many, figures.styles(many), strict=True))
    assert figures.styles(few) == [looks[name] for name in few]
    assert len({*looks.values()}) == len(many)
    assert {dash for _, dash in looks.values()} == {"solid"}
    assert figures.styles([*reversed(many)]) == [*reversed(looks.values())]
    assert looks["fedavg"] == ("#000000", "solid")
    assert figures.styles([*METHODS])[[*METHODS].index("fedavg")] == looks["fedavg"]


@pytest.mark.parametrize(("factor", "scale"), [(4.0, "linear"), (6.0, "log")])
def test_a_distance_that_grows_fivefold_has_a_logarithmic_axis(
    factor: float, scale: str, tmp_path: Path
) -> None:
    write(tmp_path, [0.1, 0.5, 0.7])
    (path,) = reader.find([tmp_path])
    table = pd.read_csv(path / "metrics.csv")
    table["consistency"] = [float("nan"), 0.1, 0.1 * factor]
    table.to_csv(path / "metrics.csv", index=False)
    groups = groups_of([reader.read(path)])
    assert figures.draw(groups, "consistency").axes[0].get_yscale() == scale
    assert figures.draw(groups, "test-accuracy").axes[0].get_yscale() == "linear"


def test_the_command_prints_the_table_and_writes_figures(tmp_path: Path) -> None:
    write(tmp_path / "runs", [0.1, 0.5, 0.7])
    write(tmp_path / "runs", [0.1, 0.5, 0.8], algo="scaffold")
    result = success(invoke("compare", tmp_path, "--target", "0.75", "--figures", tmp_path / "f"))
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.split()}
    assert "rounds to 75.00%" in lines["method"]
    assert "1 of 1" in lines["scaffold"]
    assert "0 of 1" in lines["fedavg"]
    names = {path.name for path in (tmp_path / "f").iterdir()}
    assert names >= {"test-accuracy.pdf", "test-accuracy.png", "test-accuracy-by-bytes.pdf"}
    assert "drift.pdf" in names
    assert "dropped.pdf" not in names  # no reply was dropped
    assert all(path.stat().st_size > 1000 for path in (tmp_path / "f").iterdir())


def test_a_figure_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "runs", [0.1, 0.5])
    picture, other = tmp_path / "f" / "test-accuracy.png", tmp_path / "other.png"
    picture.parent.mkdir()
    picture.write_bytes(b"old")
    other.hardlink_to(picture)
    success(invoke("compare", tmp_path / "runs", "--figures", tmp_path / "f"))
    assert picture.read_bytes()[1:4] == b"PNG"
    assert other.read_bytes() == b"old"  # not written to in place


def test_figures_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = write(tmp_path / "runs", [0.1, 0.5])
    result = invoke("compare", run, "--figures", tmp_path / "file" / "f")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
