"""The summary table of runs side by side: a row a group, in a terminal and in a report."""

import math
from collections import Counter
from collections.abc import Sequence

from fedaccord.analysis.groups import (
    COSTS,
    Group,
    Spread,
    evaluated,
    final,
    has,
    headline,
    to_target,
    usual_target,
)
from fedaccord.runs.metrics import EVALUATED, best, is_share, of_kind

Cell = str | int | Spread
PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def summary(
    groups: Sequence[Group], target: float | None = None
) -> tuple[list[dict[str, Cell]], float]:
    """(a row a group, the target); a `Spread` is over the group's runs.

    ``target``: of the headline metric; by default `usual_target`.
    """
    metric = headline(groups)
    target = usual_target(groups, metric) if target is None else target
    others = [n for n in of_kind(EVALUATED) if is_share(n) and n != metric]
    others = [name for name in others if any(has(group, name) for group in groups)]
    rows: list[dict[str, Cell]] = []
    for group in groups:
        values = [evaluated(table, metric)[metric].tolist() for table in group.tables]
        spent = to_target(group, metric, target)
        row: dict[str, Cell] = {
            "method": group.label,
            "runs": _statuses(group),
            "rounds": max(int((table["round"] > 0).sum()) for table in group.tables),
            f"{metric}, last 10": final(group, metric),
            "last": Spread.of([value[-1] for value in values if value]),
            "best": Spread.of([best(metric)(value) for value in values if value]),
        }
        row |= {f"{name}, last 10": final(group, name) for name in others}
        row |= {f"{what} to {shown(target)}": spent[cost] for cost, what in COSTS.items()}
        rows.append(row | {"reached": f"{spent['round'].number} of {len(group.runs)}"})
    return rows, target


def _statuses(group: Group) -> str:
    """3, or 2 completed, 1 failed."""
    counts = Counter(str(run.summary["status"]) for run in group.runs)
    if [*counts] == ["completed"]:
        return str(len(group.runs))
    return ", ".join(f"{number} {status}" for status, number in counts.items())


def text(cell: Cell) -> str:
    """A cell for people: mean ± standard deviation."""
    if not isinstance(cell, Spread):
        return str(cell)
    if math.isnan(cell.mean):
        return "-"
    return shown(cell.mean) + ("" if math.isnan(cell.std) else f" ± {shown(cell.std)}")


def shown(value: float) -> str:
    """Four digits, with a prefix from 1000 on: 0.9333, 4.5, 12.35k."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 1000:
        return f"{value:.4f}" if 0.001 <= abs(value) < 1 else f"{value:.4g}"
    power = min(int(math.log10(abs(value)) // 3), len(PREFIXES) - 1)
    return f"{value / 1000**power:.4g}{PREFIXES[power]}"
