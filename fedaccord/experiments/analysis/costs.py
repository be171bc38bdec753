"""The costs of a run up to each round, beside its measurements."""

import math
from typing import NamedTuple

import pandas as pd

from fedaccord.runs.metrics import WINDOW, best
from fedaccord.runs.reader import StoredRun

CLOCK, EPSILON = "clock", "dp-epsilon"
GIVEN_BY = {CLOCK: "device-profile", EPSILON: "dp.epsilon"}  # costs that not every run has
COSTS = {
    **{"round": "rounds", "bytes": "bytes sent"},
    **{"gradients": "batch gradients", "seconds": "seconds"},
    **{CLOCK: "simulated seconds", EPSILON: "epsilon"},
}


class Point(NamedTuple):
    """A value of a cost, at which runs are compared."""

    value: float
    over: str = CLOCK  # a column of `COSTS`

    @staticmethod
    def of(at: float | str) -> "Point":
        """The point of 3600 (simulated seconds) or dp-epsilon=4. Raises ValueError, in one line."""
        over, _, value = str(at).rpartition("=")
        try:
            point = Point(float(value), over or CLOCK)
        except ValueError:
            point = Point(math.nan)
        if math.isnan(point.value) or point.over not in COSTS:
            raise ValueError(
                f"--at: expected simulated seconds, e.g. 3600, or COST=NUMBER with one of "
                f"{', '.join(COSTS)}, got {at!r}"
            )
        if point.value <= 0:
            raise ValueError(f"--at: expected a cost above 0, got {at!r}")
        return point


def with_costs(run: StoredRun) -> pd.DataFrame:
    """metrics.csv with the costs up to the end of each round: ``bytes`` (between nodes if there is
    no server, else up and down), ``gradients`` (of a batch, over the accepted clients; NaN if it
    is not known, as with privacy, which keeps no clients.csv), ``seconds`` (without evaluation),
    and those of `GIVEN_BY` (NaN if the run has none)."""
    table = run.metrics.copy()
    numbers = table.reindex(columns=["down-bytes", "up-bytes", "peer-bytes", "seconds"]).fillna(0)
    up_and_down = numbers["down-bytes"] + numbers["up-bytes"]
    traffic = numbers["peer-bytes"] if "peer-bytes" in table else up_and_down
    table["bytes"] = traffic.cumsum()
    table["seconds"] = numbers["seconds"].cumsum()
    each = run.used.get("gradients-per-step", math.nan)
    is_known = isinstance(each, (int, float)) and "steps" in run.clients
    steps = run.clients.groupby("round")["steps"].sum() if is_known else pd.Series()
    counted = table["round"].map(steps).fillna(0).cumsum()
    table["gradients"] = counted * each if is_known else math.nan
    return table.assign(**{cost: table.get(cost, math.nan) for cost in GIVEN_BY})


def evaluated(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of trained models that have the metric."""
    if metric not in table:
        return table.iloc[:0].assign(**{metric: []})
    return table[table[metric].notna() & (table["round"] > 0)]


def reached(table: pd.DataFrame, metric: str, target: float) -> "pd.Series[float] | None":
    """The row of a run's table (see `with_costs`) when the metric first reached the target."""
    rounds = evaluated(table, metric)
    good = rounds[metric] >= target if best(metric) is max else rounds[metric] <= target
    return rounds[good].iloc[0] if good.any() else None


def smoothed(values: "pd.Series[float]") -> "pd.Series[float]":
    """The mean of the last evaluations at each one: a twentieth of all, at most ten."""
    window = min(max(len(values) // 20, 1), WINDOW)
    return values.rolling(window, min_periods=1).mean()
