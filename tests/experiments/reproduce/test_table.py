"""The tables: each cell is a valid configuration with the settings of its paper's preset."""

import csv
import itertools
import math
from pathlib import Path

import pytest

from fedaccord.config import RunConfig
from fedaccord.experiments.presets import preset
from fedaccord.experiments.reproduce import Table, find, tables

COUNTS = {  # of numbers, and their sum
    "afedpd-table2": (186, 6118.74),
    "dfedsam-table1": (144, 9509.12),
    "dfedsam-table2": (20, 1620.69),
    "fedinit-table1": (224, 7173.04),
    "fedinit-table10": (28, 320.48),
    "fedinit-table11": (56, 82137.72),
    "fedinit-table2": (48, 3681.12),
    "fedinit-table3": (15, 551.89),
    "fedinit-table8": (21, 31.0),
    "fl-simulator": (80, 6579.87),
    "nvflare-cifar10": (4, 324.22),
}

each_table = pytest.mark.parametrize("table", tables(), ids=lambda table: table.name)


def settings(table: str, cell: str) -> dict[str, object]:
    (match,) = find(table).matching([cell])
    return match.settings


@each_table
def test_every_cell_is_valid_and_its_method_reads_every_setting(table: Table) -> None:
    for cell in table.cells:
        config = RunConfig.make(cell.settings)
        config.strategy.check_clients(config.num_clients)
        keys = set(cell.settings)
        if cell.settings.get("partition") == "iid":  # the presets are of Dirichlet partitions
            keys -= {"dirichlet-alpha", "replacement"}
        lines = [line for line in config.unread(keys) if line.partition("=")[0] in keys]
        assert lines == [], cell.name


@each_table
def test_a_table_has_a_title_and_the_source_of_its_numbers(table: Table) -> None:
    names = [cell.name for cell in table.cells]
    assert len(set(names)) == len(names)
    for text in (table.title, table.source, table.setting):
        assert text
        assert "\n" not in text
    numbers = [cell.paper for cell in table.cells if cell.paper is not None]
    assert all(0 < number < 100 for number in numbers if not math.isnan(number))
    # a column's methods are adjacent
    columns = [cell.column for cell in table.cells]
    assert len([*itertools.groupby(columns)]) == len(set(columns))


def test_a_cell_of_a_papers_preset_is_that_preset() -> None:
    cells = ("resnet18/cifar10/10%-100/dir-0.1", "10%-100/dir-0.1")
    for algo in ("fedavg", "fedadam", "scaffold", "feddyn", "fedinit"):
        own = settings("fedinit-table1", f"{algo}/{cells[0]}")
        assert own == preset(algo)
    for algo in ("fedavg", "fedprox", "fedadam", "fedspeed", "fedsmoo"):
        assert settings("fl-simulator", f"{algo}/{cells[1]}") == {
            **preset(algo),
            "num-server-rounds": 1000,
        }


def test_columns_rows_and_presets_change_their_own_keys() -> None:
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
        own = settings("dfedsam-table1", f"{name}/cifar10/dir-0.6")
        assert (own["batch-size"], own["weight-decay"]) == (128, 0.0005)


def test_the_relaxation_is_that_of_its_row() -> None:
    for cell in find("fedinit-table3").cells:
        beta = float(cell.row.removeprefix("beta="))
        strategy = RunConfig.make(cell.settings).strategy
        betas = [plugin.beta for plugin in strategy.active_plugins if hasattr(plugin, "beta")]
        assert betas == ([beta] if beta else [])


def test_participation_interval_and_rounds_of_a_figure() -> None:
    """Rounds times local steps is constant."""
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


PAPERS = Path(__file__).parents[3].parent / "shared" / "papers"  # beside a checkout
OTHER_NAMES = {"d-psgd": "dpsgd", "exp": "exponential"}


def printed(file: str) -> list[dict[str, str]]:
    """The rows of a transcription of a paper's table."""
    if not (path := PAPERS / file).is_file():
        pytest.skip(f"no transcription of the papers' tables: {path}")
    with path.open(encoding="utf-8") as lines:
        heading, *rows = csv.reader(lines)
    # two columns may have one name: the second one is known by its number
    names = [name if name not in heading[:k] else f"{name} {k}" for k, name in enumerate(heading)]
    return [dict(zip(names, row, strict=True)) for row in rows]


def numbers(table: str) -> dict[tuple[str, str], float]:
    """By a cell's name and its measure; accuracy and its spread among them."""
    by_cell = {}
    for cell in find(table).cells:
        values = {"accuracy": cell.paper, "spread": cell.spread, **cell.more}
        by_cell |= {(cell.name, k): float(v) for k, v in values.items() if v is not None}
    return by_cell


def test_costs_are_counted_to_the_paper_s_target_or_else_to_its_fedavg() -> None:
    def target(table: str, cell: str) -> float | None:
        return find(table).matching([cell])[0].target

    assert target("fedinit-table11", "scaffold/cifar100") == 30
    assert target("afedpd-table2", "afedpd/lenet/cifar10/dir-0.1") == 75.57
    assert target("nvflare-cifar10", "scaffold/*") == 80.45
    assert target("lenet", "feddyn/dir-0.6") == 60
    assert target("afedpd-figure2", "afedpd/rounds=250") is None


def expected(table: str, file: str) -> dict[tuple[str, str], float]:
    """The numbers of the transcription, in the form of `numbers`."""
    texts: dict[tuple[str, str], str] = {}
    for row in printed(file):
        name = OTHER_NAMES.get(row.get("method", ""), row.get("method", ""))
        if table in ("fedinit-table1", "afedpd-table2"):
            cell = f"{name}/{row['model']}/{row['column']}"
            texts |= {(cell, "accuracy"): row["accuracy"], (cell, "spread"): row["spread"]}
        elif table == "fedinit-table2":
            texts[f"{name}/{row['column']}", "accuracy"] = row["plain"]
            texts[f"{name}+ri/{row['column']}", "accuracy"] = row["relaxed"]
        elif table == "fedinit-table3":
            cell = f"beta={row['beta']}/10%-100/dir-0.1"
            texts |= {(cell, key): row[key] for key in ("accuracy", "consistency")}
        elif table == "fedinit-table8":
            cell, own = f"{name}/10%-100", {"gradients-a-step": "gradients"}
            own |= {"communication": "communication", "storage": "storage-ratio-printed"}
            texts |= {(cell, key): row[column] for key, column in own.items()}
        elif table == "fedinit-table10":
            for column in ("10%-100", "5%-200"):
                cell = f"{name}/{column}"
                texts[cell, "seconds-a-round"] = row[f"{column} s/round"]
                texts[cell, "seconds-ratio"] = row[f"{column} ratio"]
        elif table == "fedinit-table11":
            keys = ("rounds-to-target", "rounds-speed", "seconds-to-target", "seconds-speed")
            values = [*row.values()][1:]
            for column, k in (("cifar10", 0), ("cifar100", 4)):
                cell = f"{name}/{column}"
                texts |= {(cell, key): v for key, v in zip(keys, values[k : k + 4], strict=True)}
        elif table == "dfedsam-table1":
            cell = f"{name}/{row['dataset']}/{row['partition']}"
            own = {"accuracy": "validation", "train-accuracy": "train"}
            own |= {"generalisation-gap": "gap"}
            texts |= {(cell, key): row[column] for key, column in own.items()}
        else:
            graphs = {key: value for key, value in row.items() if key != "method"}
            for graph, value in graphs.items():
                texts[f"{name}/{OTHER_NAMES.get(graph, graph)}", "accuracy"] = value
    unstable = {key for key, value in texts.items() if not value}
    values = {key: float(value) for key, value in texts.items() if value}
    return values | {key: math.nan for key in unstable if key[1] == "accuracy"}


@pytest.mark.parametrize(
    "table",
    [
        *("fedinit-table1", "fedinit-table2", "fedinit-table3", "fedinit-table8"),
        *("fedinit-table10", "fedinit-table11"),
        *("afedpd-table2", "dfedsam-table1", "dfedsam-table2"),
    ],
)
def test_a_table_has_every_number_of_the_paper(table: str) -> None:
    assert numbers(table) == pytest.approx(expected(table, f"{table}.csv"), abs=0, nan_ok=True)


def test_how_many_numbers_the_papers_have() -> None:
    """A check without the transcriptions: counts and sums."""
    counts = {}
    for table in tables():
        if own := [value for value in numbers(table.name).values() if math.isfinite(value)]:
            counts[table.name] = len(own), round(sum(own), 2)
    assert counts == COUNTS


def test_a_dash_in_the_paper_differs_from_a_missing_number() -> None:
    (unstable,) = find("afedpd-table2").matching(["feddyn/resnet18/cifar100/iid"])
    assert math.isnan(unstable.paper)
    (without,) = find("lenet").matching(["fedavg/dir-0.1"])
    assert without.paper is None


def test_patterns_choose_cells() -> None:
    table = find("lenet")
    assert table.matching([]) == [*table.cells]
    cells = table.matching(["fed[as]*/dir-0.1", "scaffold/*"])
    assert [cell.name for cell in cells] == [
        *("fedavg/dir-0.1", "scaffold/dir-0.1", "fedspeed/dir-0.1", "scaffold/dir-0.6")
    ]
    with pytest.raises(ValueError, match=r"--cells: .* of lenet \(did you mean 'fedavg/dir-0.1'"):
        table.matching(["scaffold/*", "fedavg/dir-.1"])


def test_a_path_is_no_table() -> None:
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


def test_a_users_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset, changed by the table, the column and the row, in this order."""
    (tmp_path / "mine.toml").write_text(OWN)
    monkeypatch.setattr("fedaccord.experiments.reproduce.table.FOLDER", tmp_path)
    (table,) = tables()
    cells = {cell.name: cell for cell in table.cells}
    columns = ("a/c", "a/d", "b/c", "b/d")
    assert [*cells] == [f"{row}/{column}" for column in columns for row in ("fedavg", "fedavg lr")]
    assert [cells[f"fedavg/{column}"].paper for column in columns] == [1, 2, 3, 4]
    assert [cells[f"fedavg lr/{column}"].paper for column in columns] == [None, None, 5, None]
    assert [cells[f"fedavg/{column}"].settings["lr"] for column in columns] == [0.3, 0.3, 0.2, 0.2]
    for column in columns:
        assert cells[f"fedavg lr/{column}"].settings["lr"] == 0.4
        assert cells[f"fedavg lr/{column}"].settings["relaxed-init.beta"] == 0.1
        assert cells[f"fedavg/{column}"].rounds == 7
    assert cells["fedavg/b/d"].settings == {
        **preset("fedavg"),
        **{"lr": 0.2, "num-server-rounds": 7, "relaxed-init.beta": 0.2},
    }
    # a number for no column, or too few of them
    (tmp_path / "mine.toml").write_text(OWN.replace("[1, 2, 3, 4]", "[1, 2, 3]"))
    with pytest.raises(ValueError, match="zip"):
        tables()
