"""table.csv, a row a trial, and winners.csv, a row a method."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd

from fedaccord.sweep.plan import Configuration
from fedaccord.sweep.trial import COMPLETED, Row, number

TUNE, TEST = "tune", "test"  # stages: on validation samples, and on the test samples
STOPPED = "stopped"  # of a trial that did not go on after a rung
BASELINES = ("fedavg", "dfedavg")  # what methods are compared with: the first that is there
LAST = ("seconds", "reason")  # columns; only the seconds differ from one machine to another


class Trial(NamedTuple):
    """A configuration with a seed, as far as it came."""

    configuration: Configuration
    seed: int
    stage: str
    rounds: int
    row: Row

    @property
    def status(self) -> str:
        whole = self.rounds >= self.configuration.rounds
        done = self.row["status"] == COMPLETED
        return STOPPED if done and not whole else str(self.row["status"])


def trials_table(trials: Sequence[Trial]) -> pd.DataFrame:
    """A row a trial: its keys of the space, and what it came to."""
    points = list(dict.fromkeys(key for trial in trials for key in trial.configuration.point))
    rows = []
    for trial in trials:
        configuration = trial.configuration
        point = {key: configuration.point.get(key) for key in points}
        known = {
            "trial": configuration.name,
            "stage": trial.stage,
            "algo": configuration.algo,
            **point,
            "seed": trial.seed,
            "rounds": trial.rounds,
        }
        rows.append(known | trial.row | {"status": trial.status})
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in LAST))
    return pd.DataFrame(rows, columns=[*columns, *LAST], dtype=object)


class Winner(NamedTuple):
    """The best configuration of a method, and how many it was chosen from."""

    configuration: Configuration
    score: float  # on validation samples, larger is better; NaN: the only configuration
    configurations: int


def winners_table(
    winners: Mapping[str, Winner], tests: Sequence[Trial], metric: str
) -> pd.DataFrame:
    """A row a method, the best first: test metric over the seeds, and the differences to FedAvg's
    run of the same seed.

    Standard deviations are of the seeds (divided by n - 1). ``better``: seeds in which it is
    better than FedAvg; ``seeds``: those that completed.
    """
    by_method: dict[str, dict[int, float]] = {name: {} for name in winners}
    for trial in tests:
        value = number(trial.row, f"test-{metric}")
        if not math.isnan(value):
            by_method[trial.configuration.algo][trial.seed] = value
    base = next((name for name in BASELINES if name in winners), None)
    sign = -1 if metric.startswith("loss") else 1
    rows: list[dict[str, Any]] = []
    for name, winner in winners.items():
        values, point = by_method[name], winner.configuration.point
        row: dict[str, Any] = {
            "algo": name,
            "trial": winner.configuration.name,
            "settings": ", ".join(f"{key}={_short(value)}" for key, value in point.items()),
            "configurations": winner.configurations,
            f"validation-{metric}": sign * winner.score,
            "seeds": len(values),
            **_spread(f"test-{metric}", [*values.values()]),
        }
        if base and name != base:
            both = [seed for seed in values if seed in by_method[base]]
            gains = [values[seed] - by_method[base][seed] for seed in both]
            row |= _spread(f"over-{base}", gains)
            row["better"] = f"{sum(sign * gain > 0 for gain in gains)} of {len(gains)}"
        rows.append(row)
    place = f"test-{metric}"
    rows.sort(key=lambda row: -sign * row[place] if row[place] == row[place] else math.inf)
    return pd.DataFrame(rows)


def as_text(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Its heading and rows for people."""
    rows = [["" if x != x else _short(x) for x in row] for row in table.itertuples(index=False)]
    return [*table.columns], rows


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        name: fmean(values) if values else math.nan,
        f"{name}-std": stdev(values) if len(values) > 1 else math.nan,
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
