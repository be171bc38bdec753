"""The tables: a paper's numbers and their settings, read from tables/*.toml.

A file has a ``title``, the ``source`` of its numbers, and a ``setting``: facts that the paper does
not specify. Its columns are all combinations of a choice from each of its ``axes``. A row starts
from the preset of its name, or from ``preset``, or in columns that match a pattern of ``presets``
from another one; the file's table ``run``, the column's choices and the row's ``set`` change that
preset, in this order. ``paper`` holds the paper's accuracies in percent: of all columns, or by the
columns' names; [mean, spread] if the spread is printed, nan if the paper prints a dash. Its other
numbers are in ``more``, by the names of `measures`; ``targets`` has the accuracy, in percent, to
which costs are counted, by patterns of columns. Elsewhere it is the paper's FedAvg.
"""

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedaccord.core.options import did_you_mean
from fedaccord.experiments.presets import preset
from fedaccord.experiments.reproduce.measures import BASELINE, COSTS, NAMES
from fedaccord.runs import flatten

FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True, eq=False)
class Cell:
    """A number of a table, and its settings."""

    row: str
    column: str
    settings: dict[str, Any]  # run-config keys, except seed and place
    paper: float | None  # accuracy in percent; None: the paper has none; NaN: it prints a dash
    spread: float | None = None  # of it, as printed
    more: Mapping[str, float] = field(default_factory=dict)  # other measures, by name
    target: float | None = None  # in percent, to which costs are counted

    @property
    def name(self) -> str:
        return f"{self.row}/{self.column}"

    @property
    def rounds(self) -> int:
        """The paper's rounds."""
        return int(self.settings["num-server-rounds"])


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    source: str
    setting: str
    cells: tuple[Cell, ...]  # column by column

    @property
    def measures(self) -> list[str]:
        """The paper's measures besides the accuracy."""
        return [*dict.fromkeys(name for cell in self.cells for name in cell.more)]

    @property
    def is_run(self) -> bool:
        """Whether its numbers need runs; costs are computed from the methods."""
        return not self.measures or not {*self.measures} <= {*COSTS}

    def matching(self, patterns: Sequence[str]) -> list[Cell]:
        """The cells whose names match one of the patterns, all of them if there are none.

        Raises ValueError for a pattern that no cell matches.
        """
        names = [cell.name for cell in self.cells]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = did_you_mean(pattern, names) or f", e.g. {names[0]!r}"
                raise ValueError(
                    f"--cells: expected a name or pattern of cells of {self.name}{near}, got "
                    f"{pattern!r}; `fedaccord reproduce {self.name} --list` lists them"
                )
        chosen = patterns or ["*"]
        return [c for c in self.cells if any(fnmatchcase(c.name, p) for p in chosen)]


def tables() -> list[Table]:
    """Every table, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.toml"))]


def find(name: str) -> Table:
    """Raises ValueError for an unknown name."""
    path = FOLDER / f"{name}.toml"
    if path.name not in (files := {file.name for file in FOLDER.glob("*.toml")}):
        near = did_you_mean(name, sorted(file.removesuffix(".toml") for file in files))
        raise ValueError(
            f"expected a table, got {name!r}{near}; `fedaccord reproduce --list` lists them"
        )
    return _read(path)


def _read(path: Path) -> Table:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    columns, common = dict(_columns(content["axes"])), flatten(content.get("run", {}))
    base = _by_column(content["rows"].get(BASELINE, {}).get("paper", {}), [*columns])
    base_values = {name: _number(each)[0] for name, each in base.items()}
    targets = {
        name: value for name, value in base_values.items() if value and not math.isnan(value)
    }
    targets |= content.get("targets", {})
    cells = [
        _cell(row, values, column, common | columns[column], [*columns], targets)
        for column in columns
        for row, values in content["rows"].items()
    ]
    return Table(path.stem, content["title"], content["source"], content["setting"], tuple(cells))


def _columns(axes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the settings of each column."""
    for choices in itertools.product(*(axis.items() for axis in axes)):
        settings: dict[str, Any] = {}
        for _, values in choices:
            settings |= flatten(values)
        yield "/".join(name for name, _ in choices), settings


def _cell(
    row: str,
    values: Mapping[str, Any],
    column: str,
    changes: Mapping[str, Any],
    columns: Sequence[str],
    targets: Mapping[str, float],
) -> Cell:
    others = values.get("presets", {})
    fitting = [name for pattern, name in others.items() if fnmatchcase(column, pattern)]
    base = preset(fitting[-1] if fitting else values.get("preset", row))
    settings = {**base, **changes, **flatten(values.get("set", {}))}
    paper, spread = _number(_by_column(values.get("paper", {}), columns).get(column))
    more = {
        name: _by_column(numbers, columns)[column]
        for name, numbers in values.get("more", {}).items()
    }
    if unknown := [name for name in more if name not in NAMES]:
        raise ValueError(f"more: expected measures of {', '.join(NAMES)}, got {unknown[0]!r}")
    target = [value for pattern, value in targets.items() if fnmatchcase(column, pattern)]
    return Cell(row, column, settings, paper, spread, more, target[-1] if target else None)


def _by_column(numbers: Any, columns: Sequence[str]) -> Mapping[str, Any]:
    return numbers if isinstance(numbers, Mapping) else dict(zip(columns, numbers, strict=True))


def _number(value: Any) -> tuple[float | None, float | None]:
    """A mean and its spread."""
    mean, spread = value if isinstance(value, list) else (value, None)
    return mean, spread
