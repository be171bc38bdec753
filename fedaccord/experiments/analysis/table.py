"""The summary table of runs: a row a group, for people and for programs."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from fedaccord.experiments.analysis.costs import COSTS, EPSILON, GIVEN_BY, Point, evaluated
from fedaccord.experiments.analysis.groups import Group, tested
from fedaccord.experiments.analysis.ranking import (
    Spread,
    costs_of,
    final,
    has,
    main_metric,
    measured,
    ranked,
    to_target,
    up_to,
    usual_target,
)
from fedaccord.runs.directory import COMPLETED
from fedaccord.runs.metrics import BEST, EVALUATED, LAST, MEAN, WINDOW, best, is_share, of_kind, own

Cell = str | int | Spread
TO_TARGET, AT = "-to-target", "-at-"
LISTED = 5  # seeds that a cell names
PREFIXES = ("", "k", "M", "G", "T", "P", "E")


class Summary(NamedTuple):
    """Groups side by side; columns that are also in summary.json have the same names."""

    metric: str  # the metric that ranks the rows
    target: float  # of the metric; costs are counted up to it
    groups: list[Group]  # the best first
    rows: list[dict[str, Cell]]  # one a group; a `Spread` is over its runs
    at: Point | None = None  # the cost at which the metric ranks the rows

    def heading(self, key: str) -> str:
        """A column's name for people."""
        if key in (self.metric + LAST, self.metric + BEST):
            return key.removeprefix(f"{self.metric}-")
        if key.endswith(TO_TARGET):
            return cost_heading(key, self.metric, self.target)
        if self.at and key == f"{self.metric}{AT}{self.at.over}":
            return f"{self.metric} at {shown(self.at.value)} {COSTS[self.at.over]}"
        return key.replace(MEAN, f", last {WINDOW}")

    def texts(self) -> pd.DataFrame:
        """For people: mean ± standard deviation, accuracies in percent."""
        return pd.DataFrame(
            [{self.heading(key): text(cell) for key, cell in row.items()} for row in self.rows]
        )

    def numbers(self) -> pd.DataFrame:
        """For programs: a mean and its standard deviation (``-std``) in columns of their own."""
        rows = []
        for group, row in zip(self.groups, self.rows, strict=True):
            flat = {
                "method": group.label,
                "algo": group.settings.get("algo"),
                "runs": len(group.runs),
                "seeds": [run.settings.get("seed", 0) for run in group.runs],
                "repeats": len(group.repeats),
                "status": " ".join(sorted({str(run.summary["status"]) for run in group.runs})),
                "metric": self.metric,
                "target": self.target,
                "reached": row[f"round{TO_TARGET}"].number,  # type: ignore[union-attr]
            }
            for key, cell in row.items():
                if isinstance(cell, Spread):
                    flat |= {key: cell.mean, f"{key}-std": cell.std}
                else:
                    flat.setdefault(key, cell)
            rows.append(flat)
        return pd.DataFrame(rows)


def summary(
    groups: Sequence[Group],
    target: float | None = None,
    at: float | str | None = None,
    metric: str = "",
) -> Summary:
    """metric: that ranks the rows, see `main_metric`. target: of it; by default `usual_target`. at:
    the cost at which the metric ranks the rows, as `Point.of`; None: at the end. Trials are left
    out, see `tested`. Raises ValueError, in one line, if no run has that metric or cost."""
    groups = tested(groups)
    metric, costs = main_metric(groups, metric), costs_of(groups)
    point = None if at is None else Point.of(at)
    if point and point.over not in costs:
        raise ValueError(
            f"--at: expected runs with {COSTS[point.over]}, which {GIVEN_BY[point.over]} gives, "
            "got none"
        )
    if target is not None and is_share(metric) and not 0 <= target <= 1:
        raise ValueError(
            f"--target: expected a share in [0, 1], e.g. 0.9, of {metric}, got {target}"
        )
    target = usual_target(groups, metric) if target is None else target
    others = [n for n in of_kind(EVALUATED) if is_share(n) and n != metric]
    others += dict.fromkeys(n for group in groups for t in group.tables for n in own(t.columns))
    others = [name for name in others if any(has(group, name) for group in groups)]
    order = ranked(groups, metric, point)
    rows: list[dict[str, Cell]] = []
    for group in order:
        values = [evaluated(table, metric)[metric].tolist() for table in measured(group)]
        spent, share = to_target(group, metric, target), is_share(metric)
        row: dict[str, Cell] = {
            "method": group.label,
            **({f"{metric}{AT}{point.over}": up_to(group, metric, point)} if point else {}),
            f"{metric}{MEAN}": final(group, metric),
            "seeds": seeds(group),
            "rounds": max(int((table["round"] > 0).sum()) for table in group.tables),
            f"{metric}{LAST}": Spread.of([value[-1] for value in values if value], share),
            f"{metric}{BEST}": Spread.of([best(metric)(value) for value in values if value], share),
        }
        row |= {f"{name}{MEAN}": final(group, name) for name in others}
        if EPSILON in costs:
            row[EPSILON] = Spread.of([t[EPSILON].iloc[-1] for t in measured(group) if len(t)])
        row |= {f"{cost}{TO_TARGET}": spent[cost] for cost in costs}
        rows.append(row | {"reached": f"{spent['round'].number} of {len(group.runs)}"})
    return Summary(metric, target, order, rows, point)


def cost_heading(key: str, metric: str, target: float) -> str:
    """The name for people of a column such as bytes-to-target."""
    to = percent(target) if is_share(metric) else shown(target)
    to = "the target" if math.isnan(target) else to  # of runs without evaluation
    return f"{COSTS[key.removesuffix(TO_TARGET)]} to {to}"


def seeds(group: Group) -> str:
    """Its runs, their seeds, those not completed, and repeats: 2 (0, 1), 1 failed, 3 repeats."""
    numbers = [run.settings.get("seed", 0) for run in group.runs]
    if len(numbers) > LISTED and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        names = f"{numbers[0]} to {numbers[-1]}"
    else:
        names = ", ".join(map(str, numbers[:LISTED])) + (", ..." if len(numbers) > LISTED else "")
    counts = Counter(str(run.summary["status"]) for run in group.runs)
    ends = [f"{number} {status}" for status, number in counts.items() if status != COMPLETED]
    repeats = len(group.repeats)
    ends += [f"{repeats} repeat{'s' if repeats > 1 else ''}"] if repeats else []
    return ", ".join([f"{len(numbers)} ({names})", *ends])


def text(cell: Cell) -> str:
    """A cell for people: mean ± standard deviation."""
    if not isinstance(cell, Spread):
        return str(cell)
    if math.isnan(cell.mean):
        return "-"
    if math.isnan(cell.std):
        return percent(cell.mean) if cell.is_share else shown(cell.mean)
    if cell.is_share:
        return f"{100 * cell.mean:.2f} ± {percent(cell.std)}"
    return f"{shown(cell.mean)} ± {shown(cell.std)}"


def percent(value: float) -> str:
    """An accuracy: 96.38%."""
    return f"{value:.2%}"


def shown(value: float) -> str:
    """Four digits, with a prefix from 1000 on: 0.9333, 4.5, 12.35k."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 1000:
        return f"{value:.4f}" if 0.001 <= abs(value) < 1 else f"{value:.4g}"
    power = min(int(math.log10(float(f"{abs(value):.4g}")) // 3), len(PREFIXES) - 1)
    return f"{value / 1000**power:.4g}{PREFIXES[power]}"
