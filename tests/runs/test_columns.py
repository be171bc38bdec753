"""The documented columns are exactly those that real runs write."""

import csv
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from fedaccord import engine
from fedaccord.cli.columns import columns_markdown, columns_tables
from fedaccord.config import RunConfig
from fedaccord.core.metrics import BROADCAST, NODES, STD
from fedaccord.core.request import StateLost
from fedaccord.federation.errors import FederationError
from fedaccord.federation.metrics import client_rows
from fedaccord.runs import RunDirectory, flatten
from fedaccord.runs.metrics import (
    DERIVED_SUFFIXES,
    EVALUATED,
    METRIC,
    METRICS,
    TABLES,
    best,
    is_share,
    metric_of,
    named,
    of_kind,
)
from tests.cli.shell import REPOSITORY, invoke, success

SMALL = {"num-clients": 4, "num-server-rounds": 1, "model": "linear", "local-epochs": 1}
RUNS: dict[str, dict[str, Any]] = {
    "another model is broadcast": {"algo": "afedpd", "relaxed-init.beta": 0.05},
    "without a server": {"algo": "dfedsam", "eval-train": True},
    "personal models": {"algo": "feddeper"},
    "evaluated at the clients": {"evaluation": "clients", "keep-best": "client-loss"},
    "held-out samples": {"algo": "fedavg", "validation": 0.1},
    "private": {"algo": "fedavg", "sampling": "bernoulli", "dp.noise-multiplier": 1.0},
    "simulated devices": {"device-profile": "lognormal", "schedule": "buffered"},
    "failed": {"algo": "fedavg", "lr": 1e30, "clip-norm": 0.0},
}


@pytest.fixture(scope="module")
def by_file(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The columns of each file, of all runs together."""
    folder = tmp_path_factory.mktemp("runs")
    names: dict[str, set[str]] = {name: set() for name in ("metrics", "clients", "summary")}
    for name, values in RUNS.items():
        config = SMALL | values | {"out-dir": str(folder), "name": name, "threads": 1}
        try:
            with engine.quiet():
                engine.run(RunConfig.make(config))
        except FederationError:
            assert name == "failed"
    began = RunDirectory(str(folder), "running", {"algo": "fedavg", "dataset": "digits", "seed": 0})
    for path in [*(folder / name for name in RUNS), began.path]:
        names["summary"] |= flatten(json.loads((path / "summary.json").read_text())).keys()
        for table in ("metrics", "clients"):
            if (path / f"{table}.csv").exists():
                names[table] |= columns(path / f"{table}.csv")
    names["clients"] |= client_rows(1, {0: StateLost(0)}, "what was done")[0].keys()
    return names


def columns(path: Path) -> set[str]:
    with path.open(newline="") as file:
        return set(next(csv.reader(file)))


def of_any_metric(column: str) -> str:
    """test-<metric> of test-f1."""
    for general in METRICS:
        if column in named([general.name]):
            return general.name
    return column


def test_every_column_of_the_tables_is_explained(by_file: dict[str, set[str]]) -> None:
    assert {of_any_metric(name) for name in by_file["metrics"]} == {c.name for c in METRICS}
    clients = {of_any_metric(name) for name in by_file["clients"]}
    assert clients == {column.name for column in TABLES["clients.csv"]}


def test_every_key_of_the_summary_is_explained(by_file: dict[str, set[str]]) -> None:
    columns = TABLES["summary.json"]

    def general(key: str) -> str:
        metric = metric_of(key)
        return f"<metric>{key.removeprefix(metric)}" if metric else key

    assert {general(key) for key in by_file["summary"]} == {column.name for column in columns}
    (last,) = (column for column in columns if column.name == "<metric>-last")
    assert all(of_any_metric(metric) in last.meaning for metric in of_kind(EVALUATED))


def test_a_column_is_explained_once_and_completely() -> None:
    for table in TABLES.values():
        names = [column.name for column in table]
        assert len(set(names)) == len(names)
        assert all(column.meaning and column.rows and column.source for column in table)


def test_a_metric_has_a_direction_and_a_unit() -> None:
    for name, column in METRIC.items():
        is_spread = name.endswith("-std")
        is_large_best = "accuracy" in name or "f1" in name
        is_small_best = any(word in name for word in ("loss", "mae", "perplexity"))
        assert (best(name) is max) == (is_large_best and not is_spread)
        assert (column.better == "min") == (is_small_best and not is_spread)
        assert is_share(name) == (is_large_best or name == "generalisation-gap")
    assert metric_of("test-accuracy-mean-of-last-10") == metric_of("test-accuracy-last")
    assert metric_of("test-accuracy-nodes-best") == "test-accuracy-nodes"
    assert metric_of("test-accuracy") == metric_of("rounds-last") == ""


def test_the_suffixes_of_metrics_agree_with_those_of_the_core() -> None:
    assert DERIVED_SUFFIXES == (BROADCAST, NODES, STD)


def test_no_other_module_derives_the_kind_of_a_metric_from_its_name() -> None:
    package = REPOSITORY / "fedaccord"
    guesses = re.compile(r"""["'](accuracy|loss)["'] in |startswith\(["'](loss|test-)""")
    paths = [path for path in package.rglob("*.py") if guesses.search(path.read_text())]
    assert paths == []


def test_the_command_and_the_page_say_the_same() -> None:
    result = success(invoke("run", "--list-columns"))
    assert [len(table.rows) for table in columns_tables()] == [*map(len, TABLES.values())]
    page = columns_markdown()
    for column in chain(*TABLES.values()):
        assert column.meaning in result.stdout
        assert column.meaning.replace("|", "\\|") in page
