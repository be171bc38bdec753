"""The page: our numbers beside the paper's, with their costs, and the cells without runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedaccord.experiments.reproduce import tables
from fedaccord.experiments.reproduce.page import as_markdown, measures_of
from fedaccord.experiments.reproduce.results import COLUMNS, device_of, merged, write
from fedaccord.experiments.sweep.trial import COMPLETED, DIVERGED
from tests.experiments.reproduce.studies import TABLE


def result(cell: str, seed: int, best: float, **own: Any) -> dict[str, Any]:
    usual = {"table": "small", "cell": cell, "seed": seed, "changed": "", "rounds": 4}
    usual |= {"status": "completed", "last": best - 2, "mean-of-last-10": best - 1, "best": best}
    return usual | {"gradients": 12500, "hours": 0.5, "device": "cpu", "reason": ""} | own


def failed(cell: str, seed: int) -> dict[str, Any]:
    nothing = {"status": "failed", "last": None, "mean-of-last-10": None, "best": None}
    return result(cell, seed, 0.0) | nothing | {"reason": "the loss is NaN"}


def lines(tmp_path: Path, *results: dict[str, Any]) -> list[str]:
    frame = merged(tmp_path / "none.csv", results)
    return as_markdown([TABLE], frame, "results.csv").splitlines()


def row(page: list[str], cell: str) -> list[str]:
    (line,) = [line for line in page if line.startswith(f"| `{cell}`")]
    return [word.strip() for word in line.strip("|").split("|")]


def test_a_cell_with_its_paper_rounds_seeds_and_cost(tmp_path: Path) -> None:
    page = lines(tmp_path, *(result("fedavg/few", s, 90 + s) for s in range(3)))
    (heading,) = [line for line in page if line.startswith("| cell")]
    assert row(page, "fedavg/few") == [
        *("`fedavg/few`", "90.00", "4 of 4", "3", "89.00 ± 1.00", "90.00 ± 1.00", "91.00 ± 1.00"),
        *("+1.00", "12,500", "0.50"),
    ]
    assert heading.count("|") == len(row(page, "fedavg/few")) + 1
    text = "\n".join(page)
    assert TABLE.source in text
    assert TABLE.setting in text
    assert "[results.csv](results.csv)" in text


def test_a_table_names_the_devices_of_its_runs(tmp_path: Path) -> None:
    """A GPU by its name in the run directory."""
    assert device_of({"device": "cuda", "gpu": "NVIDIA X"}) == "NVIDIA X"
    of = [result("fedavg/few", seed, 90.0) for seed in range(2)] + [failed("fedavg/few", 2)]
    page = lines(tmp_path, of[0], of[1] | {"device": "NVIDIA X"}, of[2] | {"device": ""})
    assert "Run on: NVIDIA X, cpu." in page


def test_a_deviation_of_more_than_two_spreads_is_bold(tmp_path: Path) -> None:
    far = lines(tmp_path, result("fedsam/few", 0, 53.0), result("fedsam/few", 1, 55.0))
    assert row(far, "fedsam/few")[7] == "**+4.00**"  # spread 1.41
    near = lines(tmp_path, result("fedsam/few", 0, 51.0), result("fedsam/few", 1, 53.0))
    assert row(near, "fedsam/few")[7] == "+2.00"
    alone = lines(tmp_path, result("fedsam/few", 0, 99.0))
    assert row(alone, "fedsam/few")[6:8] == ["99.00", "+49.00"]


@pytest.mark.parametrize(
    ("cell", "own", "words"),
    [
        ("fedavg/few", {"rounds": 2}, ("90.00", "2 of 4", "–")),  # fewer rounds than the paper's
        ("fedavg/few", {"rounds": 8}, ("90.00", "8 of 4", "–")),  # the best of more evaluations
        ("fedinit/few", {}, ("–", "4 of 4", "–")),
        ("fedavg/few", {}, ("90.00", "4 of 4", "+1.00")),
        ("fedavg/few", {"changed": "precision=bfloat16"}, ("90.00", "4 of 4", "+1.00")),
        ("fedavg/few", {"changed": "precision=bfloat16 model=lenet"}, ("90.00", "4 of 4", "–")),
    ],
)
def test_only_the_same_setting_is_compared(
    tmp_path: Path, cell: str, own: dict[str, Any], words: tuple[str, ...]
) -> None:
    entries = row(lines(tmp_path, result(cell, 0, 91.0, **own)), cell)
    assert (entries[1], entries[2], entries[7]) == words


def test_failed_runs_are_counted_and_not_averaged(tmp_path: Path) -> None:
    cheap = {"gradients": 100, "hours": 0.1}
    page = lines(tmp_path, result("fedavg/few", 0, 80.0), failed("fedavg/few", 1) | cheap)
    assert row(page, "fedavg/few")[3:7] == ["1, 1 failed", "78.00", "79.00", "80.00"]
    assert row(page, "fedavg/few")[8:] == ["12,500", "0.50"]
    every = lines(tmp_path, failed("fedavg/few", 1))
    assert row(every, "fedavg/few")[3:8] == ["0, 1 failed", "–", "–", "–", "–"]


def test_changed_settings_have_a_line_of_their_own(tmp_path: Path) -> None:
    page = lines(
        tmp_path, result("fedavg/few", 0, 80.0), result("fedavg/few", 0, 70.0, changed="lr=0.05")
    )
    names = [line.split("|")[1].strip() for line in page if line.startswith("| `")]
    assert names == ["`fedavg/few`", "`fedavg/few` with `lr=0.05`"]


def test_cells_without_runs_are_listed(tmp_path: Path) -> None:
    page = lines(tmp_path, result("fedinit/few", 0, 80.0))
    assert "Not run: 3 of 4 cells; in brackets the paper's number." in page
    assert "- `few`: fedavg (90.00), fedsam (50.00)" in page
    assert "- `many`: fedavg (70.00)" in page
    whole = [result(cell.name, 0, 80.0) for cell in TABLE.cells]
    assert not [line for line in lines(tmp_path, *whole) if "Not run" in line]


def test_a_page_begins_with_tables_that_have_results() -> None:
    last = tables()[-1]
    results = pd.DataFrame([result(last.cells[0].name, 0, 80.0)], columns=COLUMNS)
    results["table"] = last.name
    first, second = as_markdown(tables(), results, "x.csv").split("\n## ")[1:3]
    assert first.startswith(last.title)
    assert second.startswith(tables()[0].title)


def test_the_page_has_every_table_and_cell() -> None:
    text = as_markdown(tables(), pd.DataFrame(columns=COLUMNS), "x.csv")
    for table in tables():
        assert f"## {table.title}\n" in text
        line = f"Not run: {len(table.cells)} of {len(table.cells)} cells"
        assert (line in text) == table.is_run or table.name == "fedinit-table8"
    assert "fedsmoo (83.30)" in text
    assert "scaffold (84.25 ± 0.16)" in text
    assert "feddyn (unstable)" in text


def test_measures_beside_the_accuracy_and_their_ratios(tmp_path: Path) -> None:
    """FedAvg's rounds and seconds to the target divided by the method's; a round's seconds
    divided by FedAvg's."""
    more = {"rounds-to-target": 30.0, "rounds-speed": 2.0, "seconds-ratio": 1.5}
    cells = [replace(each, more=more) for each in TABLE.cells[:2]]
    table = replace(TABLE, cells=(*cells,))
    results = [
        result("fedavg/few", 0, 80.0, **{"rounds-to-target": 30.0, "seconds-a-round": 2.0}),
        result("fedavg/few", 1, 80.0, **{"rounds-to-target": 50.0, "seconds-a-round": 2.0}),
        result("fedinit/few", 0, 80.0, **{"rounds-to-target": 9.0, "seconds-a-round": 3.0}),
        result("fedinit/few", 1, 80.0, **{"rounds-to-target": 11.0, "seconds-a-round": 3.0}),
        result("fedinit/few", 2, 80.0, changed="lr=9", **{"rounds-to-target": 99.0}),
        result("fedinit/few", 3, 80.0, rounds=2, **{"rounds-to-target": 99.0}),
    ]
    heading, fedavg, fedinit = measures_of(table, merged(tmp_path / "none.csv", results))
    assert heading[1:4] == ["rounds to the target", "ours", "speed in rounds"]
    assert fedavg[1:7] == ["30", "40.00 ± 14.14", "2", "1.00", "1.5", "1.00"]
    assert fedinit[1:7] == ["30", "10.00 ± 1.41", "2", "4.00", "1.5", "1.50"]
    text = "\n".join(as_markdown([table], merged(tmp_path / "none.csv", results), "x").splitlines())
    assert "| `fedinit/few` | 30 | 10.00 ± 1.41 |" in text


@pytest.mark.parametrize(
    ("seeds", "device", "status", "own", "speed"),
    [
        ((0, 1), "cpu", COMPLETED, "20.00 ± 0.00", ["2.00", "2.00"]),
        ((0,), "cpu", COMPLETED, "20.00", ["–", "–"]),
        ((0, 1), "NVIDIA H100", COMPLETED, "20.00 ± 0.00", ["2.00", "–"]),
        ((0, 1), "cpu", "failed", "20.00 (1 of 2)", ["–", "–"]),
    ],
)
def test_a_ratio_is_of_the_same_seeds_and_seconds_of_the_same_device(
    seeds: tuple[int, ...], device: str, status: str, own: str, speed: list[str], tmp_path: Path
) -> None:
    more = {"rounds-to-target": 30.0, "rounds-speed": 2.0, "seconds-speed": 2.0}
    table = replace(TABLE, cells=tuple(replace(each, more=more) for each in TABLE.cells[:2]))
    costs = {"rounds-to-target": 40.0, "seconds-to-target": 400.0, "device": "cpu"}
    results = [result("fedavg/few", seed, 80.0, **costs) for seed in (0, 1)]
    costs = {"rounds-to-target": 20.0, "seconds-to-target": 200.0, "device": device}
    results += [result("fedinit/few", seed, 80.0, **costs) for seed in seeds]
    results[-1] |= {"status": status, "reason": "" if status == COMPLETED else DIVERGED}
    _, _, row = measures_of(table, merged(tmp_path / "none.csv", results))
    assert [row[2], row[4], row[6]] == [own, *speed]


def test_costs_name_the_seeds_that_reached_the_target(tmp_path: Path) -> None:
    """And a speed is that of all seeds."""
    cells = [
        replace(each, more={"rounds-to-target": 30.0, "rounds-speed": 2.0})
        for each in TABLE.cells[:2]
    ]
    results = [result("fedavg/few", seed, 80.0, **{"rounds-to-target": 40.0}) for seed in range(3)]
    results += [
        result("fedinit/few", seed, 80.0, **({"rounds-to-target": 20.0} if seed else {}))
        for seed in range(3)
    ]
    table = replace(TABLE, cells=(*cells,))
    _, fedavg, fedinit = measures_of(table, merged(tmp_path / "none.csv", results))
    assert fedavg[1:5] == ["30", "40.00 ± 0.00", "2", "1.00"]
    assert fedinit[1:5] == ["30", "20.00 ± 0.00 (2 of 3)", "2", "–"]


def test_costs_to_a_target_that_a_paper_does_not_print_are_ours_alone(tmp_path: Path) -> None:
    aimed = replace(TABLE.cells[0], more={"rounds-to-target": 30.0}, target=70.0)
    costs = {"rounds-to-target": 9.0, "gradients-to-target": 1e4, "rounds": 2}
    results = [
        result("fedavg/few", 0, 80.0, **costs),
        result("fedavg/few", 1, 80.0, **costs | {"gradients-to-target": 2e4}),
    ]
    frame = merged(tmp_path / "none.csv", results)
    heading, row = measures_of(replace(TABLE, cells=(aimed,)), frame)
    assert heading[3:] == [
        "target, %",
        *(f"{of} ours" for of in ("gradients to it,", "bytes to it,", "seconds to the target,")),
    ]
    assert row[0] == "`fedavg/few` (2 of 4 rounds)"
    assert row[3:] == ["70", "15,000 ± 7,071", "–", "–"]


def test_costs_are_also_on_a_page_whose_paper_has_the_accuracy_alone(tmp_path: Path) -> None:
    results = [result("fedavg/few", 0, 80.0), result("fedsam/few", 0, 90.0)]
    assert len(measures_of(TABLE, merged(tmp_path / "none.csv", results))) == 1
    results[1] |= {"rounds-to-target": 3.0, "gradients-to-target": 1e4}
    aimed = replace(TABLE, cells=(*(replace(cell, target=90.0) for cell in TABLE.cells),))
    heading, *rows = measures_of(aimed, merged(tmp_path / "none.csv", results))
    assert heading[:3] == ["cell", "target, %", "rounds to the target, ours"]
    assert rows == [["`fedsam/few`", "90", "3", "10,000", "–", "–"]]
    page = as_markdown([aimed], merged(tmp_path / "none.csv", results), "x.csv")
    assert "| `fedsam/few` | 90 | 3 | 10,000 | – | – |" in page


def test_costs_are_computed_without_a_run() -> None:
    """FedInit's table 8: twice the traffic of scaffold, twice the gradients of fedsam."""
    (table,) = [each for each in tables() if not each.is_run]
    rows = {row[0]: row for row in measures_of(table)}
    assert rows["`scaffold/10%-100`"][1:] == ["2", "2.00", "1", "1.00", "3", "2.00"]
    assert rows["`fedsam/10%-100`"][1:] == ["1", "1.00", "2", "2.00", "2", "1.00"]
    assert "Not run" not in as_markdown([table], pd.DataFrame(columns=COLUMNS), "x.csv")


def test_results_grow_and_longer_runs_replace_shorter_ones(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    write(file, merged(file, [result("fedavg/few", 0, 70.0), result("fedavg/few", 1, 71.0)]))
    longer = [result("fedavg/few", 0, 80.0, rounds=9), result("fedavg/few", 1, 60.0, rounds=2)]
    write(file, merged(file, longer))
    after = merged(file, [])
    assert [*after.best] == [80.0, 71.0]
    assert [*after.rounds] == [9, 4]
    again = merged(file, [result("fedavg/few", 1, 72.0)])  # as many rounds: the newer one
    assert [*again.best] == [80.0, 72.0]
    broken = failed("fedavg/few", 0) | {"rounds": 30}
    assert [*merged(file, [broken]).best] == [80.0, 71.0]
    diverged = broken | {"reason": "the model diverged in round 20"}  # a result
    assert [*merged(file, [diverged]).status] == ["failed", "completed"]
    assert [*merged(file, [diverged | {"rounds": 8}]).status] == ["completed", "completed"]


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "\0"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "results.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match="expected results of `fedaccord reproduce`"):
        merged(file, [])
    assert file.read_text() == content
