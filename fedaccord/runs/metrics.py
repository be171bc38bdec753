"""The meaning of every number of a run directory, from columns.toml, and which way is better.

Row r of metrics.csv is the end of round r: clients received w^{r-1}, the server's step gave w^r.
Code that summarises, ranks, draws or prints a metric reads its properties here.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MAX, SHARE_UNIT, LOSS_UNIT = "max", "0 to 1", "of the loss (nats)"  # the last two are units
NAMED: dict[str, dict[str, Any]] = tomllib.loads(  # not imported from core, which loads PyTorch
    Path(__file__).parents[1].joinpath("core", "metrics.toml").read_text(encoding="utf-8")
)


class Column(NamedTuple):
    """A column of a table, or a key of the summary. <metric> in its name stands for any of `NAMED`,
    in the summary for any that is repeated there."""

    name: str
    meaning: str  # the formula, with its model and data
    unit: str
    rows: str  # which rows have it
    source: str = "server"  # who measures it
    title: str = ""  # of its curve; empty: it is not drawn
    kind: str = ""  # EVALUATED: the summary has its last value; SUMMED: the summary has its sum
    better: str = ""  # MAX, MIN or "of the metric"; empty: no mean and no best value


EVALUATED, SUMMED = "evaluated", "summed"
METRIC_NAME = "<metric>"
DIFFERENCE_UNIT = "-1 to 1"  # a unit, displayed in percent, as SHARE_UNIT
WINDOW = 10  # last evaluations behind a window mean
LAST, MEAN, BEST = "-last", f"-mean-of-last-{WINDOW}", "-best"  # endings of keys of the summary
AT = re.compile(r"-at-(\d+(?:\.\d+)?)$")  # of a sweep's metrics: simulated seconds
DERIVED_SUFFIXES = ("-broadcast", "-nodes", "-std")  # as in core.metrics
SPLITS = ("test", "validation", "client")
RANKED = tuple(  # runs are ranked by the first that they have
    f"{split}-{name}" for name in (*NAMED, "loss") for split in SPLITS
)


def _tables() -> Iterator[tuple[str, tuple[Column, ...]]]:
    content = Path(__file__).with_name("columns.toml").read_text(encoding="utf-8")
    for file, columns in tomllib.loads(content).items():
        yield file, tuple(Column(name, **facts) for name, facts in columns.items())
        if file == "metrics.csv":
            targets = {True: "class labels", False: "numbers as targets"}
            yield (
                "Metrics by name",
                tuple(
                    Column(
                        name, m["meaning"], m["unit"], targets[m["of_classes"]], better=m["better"]
                    )
                    for name, m in NAMED.items()
                ),
            )


TABLES = dict(_tables())  # by file
METRICS = TABLES["metrics.csv"]


def _of_each_metric(column: Column) -> Iterator[Column]:
    """The column, or those of its <metric>."""
    if METRIC_NAME not in column.name:
        yield column
        return
    for name, metric in NAMED.items():
        yield column._replace(
            name=column.name.replace(METRIC_NAME, name),
            unit=metric["unit"],
            title=column.title.replace(METRIC_NAME, metric["title"]),
            better=column.better and metric["better"],
        )


METRIC = {column.name: column for general in METRICS for column in _of_each_metric(general)}


def named(columns: Iterable[str]) -> list[str]:
    """The names of columns, those with <metric> once for each metric."""
    return [
        name
        for column in columns
        for name in dict.fromkeys(column.replace(METRIC_NAME, metric) for metric in NAMED)
    ]


def of_kind(kind: str) -> list[str]:
    """The metrics whose last value, or sum, is in the summary."""
    return [column.name for column in METRIC.values() if column.kind == kind]


def own(columns: Iterable[str]) -> list[str]:
    """The metrics of the user's own functions, or ClientApp, among the columns of metrics.csv."""
    splits = tuple(f"{split}-" for split in (*SPLITS, "personal", "train"))
    named = (
        name for name in columns if name.startswith(splits) and not name.endswith(DERIVED_SUFFIXES)
    )
    return [name for name in named if name not in METRIC]


def column_of(name: str) -> Column:
    """The column of `METRIC`, or of a metric of the user's own, which is drawn and printed but not
    used to rank."""
    own = Column(name, "", "of the metric", "", title=name.replace("-", " "), kind=EVALUATED)
    return METRIC.get(name, own)


def best(metric: str) -> Callable[[Iterable[float]], Any]:
    """max or min, whichever gives the best of a metric's values."""
    return max if METRIC[metric].better == MAX else min


def is_share(metric: str) -> bool:
    return metric in METRIC and METRIC[metric].unit in (SHARE_UNIT, DIFFERENCE_UNIT)


def is_loss(metric: str) -> bool:
    return metric in METRIC and METRIC[metric].unit == LOSS_UNIT


def metric_of(key: str) -> str:
    """The metric behind a key of the summary: test-loss of test-loss-last; empty: none."""
    key = AT.sub(LAST, key)
    names = (key.removesuffix(end) for end in (LAST, MEAN, BEST) if key.endswith(end))
    return next((name for name in names if name in METRIC), "")
