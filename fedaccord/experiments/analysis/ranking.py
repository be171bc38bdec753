"""Metrics and costs of a group's runs, with their spread, and the ranking of groups."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedaccord.experiments.analysis.costs import COSTS, GIVEN_BY, Point, evaluated, reached
from fedaccord.experiments.analysis.groups import Group
from fedaccord.runs.directory import COMPLETED, FAILED
from fedaccord.runs.metrics import METRIC, RANKED, SPLITS, WINDOW, best, is_share

ROUNDING = 1e-12  # relative, of sums of floats


class Spread(NamedTuple):
    """Mean and standard deviation of numbers of several runs."""

    mean: float  # NaN: there is none
    std: float  # n - 1 in the denominator; NaN for a single number, or beside inf
    number: int
    is_share: bool = False  # displayed in percent

    @staticmethod
    def of(values: Sequence[float], is_share: bool = False) -> "Spread":
        numbers = [value for value in values if not math.isnan(value)]
        mean = float(np.mean(numbers)) if numbers else math.nan
        several = len(numbers) > 1 and all(map(math.isfinite, numbers))
        std = float(np.std(numbers, ddof=1)) if several else math.nan
        if std <= ROUNDING * abs(mean):
            std = 0.0  # equal numbers, whose mean was rounded
        return Spread(mean, std, len(numbers), is_share)


def counted(group: Group) -> set[Path]:
    """Its completed runs; if there are none, those that did not fail: only their numbers are not of
    the method."""
    by_status = [(run.path, run.summary["status"]) for run in group.runs]
    complete = {path for path, status in by_status if status == COMPLETED}
    return complete or {path for path, status in by_status if status != FAILED}


def measured(group: Group) -> list[pd.DataFrame]:
    """The tables of its runs that count."""
    paths = counted(group)
    pairs = zip(group.runs, group.tables, strict=True)
    return [table for run, table in pairs if run.path in paths]


def final(group: Group, metric: str) -> Spread:
    """The mean of the last ten evaluations, over the measured runs."""
    ends = [evaluated(table, metric)[metric].tail(WINDOW).mean() for table in measured(group)]
    return Spread.of([float(end) for end in ends], is_share(metric))


def up_to(group: Group, metric: str, at: Point) -> Spread:
    """The last evaluation up to this cost, over the runs."""
    tables = [evaluated(table, metric) for table in measured(group)]
    values = [table.loc[table[at.over] <= at.value, metric].tail(1).mean() for table in tables]
    return Spread.of([float(value) for value in values], is_share(metric))


def to_target(group: Group, metric: str, target: float) -> dict[str, Spread]:
    """The costs when the metric first reached the target, by the columns of `COSTS`; over the runs
    that reached it."""
    rows = [reached(table, metric, target) for table in measured(group)]
    return {
        cost: Spread.of([float(row[cost]) for row in rows if row is not None]) for cost in COSTS
    }


def usual_target(groups: Sequence[Group], metric: str) -> float:
    """Nine tenths of the best group's final accuracy; of a loss, a tenth of its size above it."""
    ends = [end for group in groups if math.isfinite(end := final(group, metric).mean)]
    if not ends:
        return math.nan
    end = float(best(metric)(ends))
    return 0.9 * end if best(metric) is max else end + 0.1 * abs(end)


def has(group: Group, metric: str) -> bool:
    return any(metric in table and table[metric].notna().any() for table in group.tables)


def main_metric(groups: Sequence[Group], wanted: str = "") -> str:
    """The metric that ranks runs: ``wanted``, or the first of `RANKED` that some run has. Raises
    ValueError, in one line, if no run has it, or it does not say which value is better."""
    if not wanted:
        return next((name for name in RANKED if any(has(g, name) for g in groups)), RANKED[0])
    ordered = [name for name, column in METRIC.items() if column.better]
    choices = [name for name in ordered if any(has(g, name) for g in groups)]
    if wanted not in choices:
        from fedaccord.core.options import did_you_mean  # loads PyTorch

        near = did_you_mean(wanted, choices)
        names = ", ".join(choices) or "none"
        if any(has(group, wanted) for group in groups):
            near = ", for which it is unknown whether larger is better"
        raise ValueError(f"--metric: expected one of the runs', {names}, got {wanted!r}{near}")
    return wanted


def tuned(groups: Sequence[Group]) -> tuple[str, list[Group]]:
    """The first of the metrics that most groups have, and these groups: in a sweep the tuned ones,
    on validation samples, not the few tested ones."""
    by_metric = {name: [group for group in groups if has(group, name)] for name in RANKED}
    return max(by_metric.items(), key=lambda pair: len(pair[1]))


def ranked(groups: Sequence[Group], metric: str, at: Point | None = None) -> list[Group]:
    """The best final value first, or the best value of `up_to`; groups without one last."""

    def place(group: Group) -> tuple[bool, float]:
        value = (final(group, metric) if at is None else up_to(group, metric, at)).mean
        return math.isnan(value), -value if best(metric) is max else value

    return sorted(groups, key=place)


def costs_of(groups: Sequence[Group]) -> dict[str, str]:
    """The costs that some run has, with their names."""
    absent = {cost for cost in GIVEN_BY if not any(has(group, cost) for group in groups)}
    return {cost: name for cost, name in COSTS.items() if cost not in absent}


def of_untrained_parts(group: Group, metric: str) -> bool:
    """Whether the metric is of w with the clients' own parts as they were before round 1."""
    settings = group.settings
    has_own_parts = settings.get("local-parameters") or settings.get("buffers") == "local"
    return bool(has_own_parts) and metric.startswith(tuple(f"{split}-" for split in SPLITS))
