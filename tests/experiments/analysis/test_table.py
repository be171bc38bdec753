"""The table of a comparison."""

import shutil
from pathlib import Path

from fedaccord.experiments.analysis.table import shown, summary, text
from tests.experiments.analysis.made import groups, write


def test_the_table_names_failures_and_targets_that_were_not_reached(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.5], seed=0)
    path = write(tmp_path, [0.1, 0.3], seed=1)
    text_of = (path / "summary.json").read_text()
    (path / "summary.json").write_text(text_of.replace("completed", "failed"))
    table = summary(groups(tmp_path), target=0.4)
    assert table.target == 0.4
    (row,) = table.rows
    assert row["seeds"] == "2 (0, 1), 1 failed"
    assert row["reached"] == "1 of 2"
    assert table.numbers()["status"].tolist() == ["completed failed"]
    assert text(row["test-accuracy-last"]) == "50.00%"  # of the completed run
    assert text(row["gradients-to-target"]) == "14"
    assert [*table.texts()][6:8] == ["rounds to 40.00%", "bytes sent to 40.00%"]
    (row,) = summary(groups(tmp_path), target=0.8).rows
    assert text(row["round-to-target"]) == "-"


def test_rounds_are_those_of_the_longest_run_and_the_best_loss_is_the_least(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.5, 0.75, 0.25], seed=0)
    write(tmp_path, [0.1, 0.5], seed=1)
    (row,) = summary(groups(tmp_path)).rows
    assert (row["rounds"], text(row["test-accuracy-best"])) == (3, "62.50 ± 17.68%")
    (row,) = summary(groups(tmp_path), metric="test-loss").rows
    assert text(row["test-loss-best"]) == "0.3750 ± 0.1768"


def test_a_long_list_of_seeds_is_abbreviated(tmp_path: Path) -> None:
    for seed in range(7):
        write(tmp_path, [0.1, 0.5], seed=seed)
    assert summary(groups(tmp_path)).rows[0]["seeds"] == "7 (0 to 6)"
    shutil.rmtree(tmp_path / "fedavg-0.1-2")
    assert summary(groups(tmp_path)).rows[0]["seeds"] == "6 (0, 1, 3, 4, 5, ...)"


def test_numbers_are_short() -> None:
    values = (0.93333, 3.0, 4.5, 0.9, 12345.0, 2.5e9, -31.4159, 999_999, 999.96)
    words = ["0.9333", "3", "4.5", "0.9000", "12.35k", "2.5G", "-31.42", "1M", "1000"]
    assert [*map(shown, values)] == words
