"""The tables: each cell is a valid configuration with the settings of its paper's preset."""

import itertools
import math
from pathlib import Path

import pytest

from fedaccord.config import RunConfig
from fedaccord.experiments.presets import preset
from fedaccord.experiments.reproduce import Table, find, tables

each_table = pytest.mark.parametrize("table", tables(), ids=lambda table: table.name)


def settings(table: str, cell: str) -> dict[str, object]:
    (found,) = find(table).matching([cell])
    return found.settings


@each_table
def test_every_cell_is_valid_and_its_method_reads_what_is_set(table: Table) -> None:
    for cell in table.cells:
        made = RunConfig.make(cell.settings)
        made.strategy.check_clients(made.num_clients)
        given = set(cell.settings)
        if cell.settings.get("partition") == "iid":  # the presets are of Dirichlet partitions
            given -= {"dirichlet-alpha", "replacement"}
        lines = [line for line in made.unread(given) if line.partition("=")[0] in given]
        assert lines == [], cell.name


@each_table
def test_a_table_says_what_it_is_and_where_its_numbers_are_from(table: Table) -> None:
    names = [cell.name for cell in table.cells]
    assert len(set(names)) == len(names)
    for text in (table.title, table.source, table.setting):
        assert text
        assert "\n" not in text
    numbers = [cell.paper for cell in table.cells if cell.paper is not None]
    assert all(0 < number < 100 for number in numbers)
    # a column's methods lie beside each other
    columns = [cell.column for cell in table.cells]
    assert len([*itertools.groupby(columns)]) == len(set(columns))


def test_a_cell_of_a_papers_preset_is_that_preset() -> None:
    cells = ("resnet18/cifar10/10%-100/dir-0.1", "10%-100/dir-0.1")
    for algo in ("fedavg", "fedadam", "scaffold", "feddyn", "fedinit"):
        found = settings("fedinit-table1", f"{algo}/{cells[0]}")
        assert found == preset(algo)
    for algo in ("fedavg", "fedprox", "fedadam", "fedspeed", "fedsmoo"):
        assert settings("fl-simulator", f"{algo}/{cells[1]}") == {
            **preset(algo),
            "num-server-rounds": 1000,
        }


def test_columns_rows_and_presets_change_what_they_say() -> None:
    table = "fedinit-table1"
    few = settings(table, "fedsam/vgg11/cifar100/5%-200/dir-0.6")
    expected = {"sam.rho": 0.01, "num-clients": 200, "fraction-train": 0.05, "batch-size": 25}
    expected |= {"model": "vgg11", "dataset": "cifar100", "dirichlet-alpha": 0.6}
    assert {key: few[key] for key in expected} == expected
    assert few["num-server-rounds"] == 800
    assert settings(table, "feddyn/resnet18/cifar100/10%-100/dir-0.1")["feddyn.alpha"] == 0.01
    assert settings(table, "fedcm/vgg11/cifar10/10%-100/dir-0.1")["fedcm.alpha"] == 0.5
    assert "fedcm.alpha" not in settings(table, "fedcm/resnet18/cifar10/10%-100/dir-0.1")
    assert settings("fl-simulator", "feddyn/5%-200/iid")["lr-decay"] == 0.9995
    assert settings("fl-simulator", "feddyn/5%-200/iid")["partition"] == "iid"
    assert settings("fedinit-table2", "scaffold+ri/5%-200/dir-0.1")["relaxed-init.beta"] == 0.1
    for name in ("dfedsam", "fedavg"):
        found = settings("dfedsam-table1", f"{name}/cifar10/dir-0.6")
        assert (found["batch-size"], found["weight-decay"]) == (128, 0.0005)


def test_the_relaxation_is_that_of_its_row() -> None:
    for cell in find("fedinit-table3").cells:
        beta = float(cell.row.removeprefix("beta="))
        made = RunConfig.make(cell.settings).strategy
        found = [plugin.beta for plugin in made.active_plugins if hasattr(plugin, "beta")]
        assert found == ([beta] if beta else [])


def test_participation_interval_and_rounds_of_a_figure() -> None:
    """With other rounds, rounds times local steps stay."""
    for cell in find("afedpd-figure2").cells:
        flat = RunConfig.make(cell.settings).flat
        kind, _, value = cell.column.partition("=")
        steps = flat["local-steps"] or 10 * flat["local-epochs"]
        if kind == "participation":
            assert flat["fraction-train"] == pytest.approx(float(value.rstrip("%")) / 100)
        elif kind == "interval":
            assert steps == int(value)
        else:
            assert flat["num-server-rounds"] == int(value)
            assert steps * int(value) == 25_000


def test_the_papers_numbers_that_are_known() -> None:
    counts = {t.name: sum(cell.paper is not None for cell in t.cells) for t in tables()}
    known = {name: count for name, count in counts.items() if count}
    assert known == {"fl-simulator": 80, "fedinit-table1": 1, "fedinit-table3": 8}
    sums = dict.fromkeys(("fedavg", "fedsmoo"), 0.0)
    for cell in find("fl-simulator").cells:
        if cell.row in sums and cell.paper is not None:
            sums[cell.row] += cell.paper
    assert sums == pytest.approx({"fedavg": 635.12, "fedsmoo": 683.77})
    (cell,) = find("fedinit-table1").matching(["fedavg/resnet18/cifar10/10%-100/dir-0.6"])
    assert math.isclose(cell.paper or 0, 78.77)


def test_patterns_choose_cells() -> None:
    table = find("lenet")
    assert table.matching([]) == [*table.cells]
    chosen = table.matching(["fed[as]*/dir-0.1", "scaffold/*"])
    assert [cell.name for cell in chosen] == [
        *("fedavg/dir-0.1", "scaffold/dir-0.1", "fedspeed/dir-0.1", "scaffold/dir-0.6"),
    ]
    with pytest.raises(ValueError, match=r"--cells: .* of lenet \(did you mean 'fedavg/dir-0.1'"):
        table.matching(["scaffold/*", "fedavg/dir-.1"])


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'fedinit-table9' \(did you mean 'fedinit-table"):
        find("fedinit-table9")
    with pytest.raises(ValueError, match=r"expected a table, got '\.\./x'"):
        find("../x")


OWN = """
title = "Mine"
source = "none"
setting = "none"
run = { lr = 0.2, num-server-rounds = 7 }

[[axes]]
a = { lr = 0.3 }
b = {}

[[axes]]
c = { weight-decay = 0.0 }
d = { relaxed-init.beta = 0.2 }

[rows.fedavg]
paper = [1, 2, 3, 4]

[rows."fedavg lr"]
preset = "fedavg"
set = { lr = 0.4, relaxed-init.beta = 0.1 }
paper = { "b/c" = 5 }
"""


def test_a_table_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset, changed by the table, the column and the row, in this order."""
    (tmp_path / "mine.toml").write_text(OWN)
    monkeypatch.setattr("fedaccord.experiments.reproduce.table.FOLDER", tmp_path)
    (table,) = tables()
    found = {cell.name: cell for cell in table.cells}
    columns = ("a/c", "a/d", "b/c", "b/d")
    assert [*found] == [f"{row}/{column}" for column in columns for row in ("fedavg", "fedavg lr")]
    assert [found[f"fedavg/{column}"].paper for column in columns] == [1, 2, 3, 4]
    assert [found[f"fedavg lr/{column}"].paper for column in columns] == [None, None, 5, None]
    assert [found[f"fedavg/{column}"].settings["lr"] for column in columns] == [0.3, 0.3, 0.2, 0.2]
    for column in columns:
        assert found[f"fedavg lr/{column}"].settings["lr"] == 0.4
        assert found[f"fedavg lr/{column}"].settings["relaxed-init.beta"] == 0.1
        assert found[f"fedavg/{column}"].rounds == 7
    assert found["fedavg/b/d"].settings == {
        **preset("fedavg"),
        **{"lr": 0.2, "num-server-rounds": 7, "relaxed-init.beta": 0.2},
    }
    # a number for no column, or too few of them
    (tmp_path / "mine.toml").write_text(OWN.replace("[1, 2, 3, 4]", "[1, 2, 3]"))
    with pytest.raises(ValueError, match="zip"):
        tables()
