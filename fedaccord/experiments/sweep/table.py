"""table.csv, a row a trial, and winners.csv, a row a method or a tested configuration."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd

from fedaccord import config
from fedaccord.core.metrics import STD
from fedaccord.experiments.analysis.groups import STOPPED, TEST, Group
from fedaccord.experiments.analysis.ranking import Spread, costs_of, to_target, usual_target
from fedaccord.experiments.analysis.table import TO_TARGET, cost_heading
from fedaccord.experiments.analysis.table import text as text_of
from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.trial import COMPLETED, Row, column, number, sign
from fedaccord.runs.metrics import MEAN, WINDOW, is_share, metric_of

BASELINES = ("fedavg", "dfedavg")  # methods are compared with the first of these in the sweep
SEEDS = "completed"  # column: the seeds behind a mean
LAST = ("seconds", "reason")  # columns; only the seconds differ from one machine to another


class Trial(NamedTuple):
    """A configuration with a seed, and its last result."""

    configuration: Configuration
    seed: int
    stage: str
    rounds: int
    row: Row

    @property
    def status(self) -> str:
        whole = self.rounds >= self.configuration.rounds
        is_complete = self.row["status"] == COMPLETED
        return STOPPED if is_complete and not whole else str(self.row["status"])


def trials_table(trials: Sequence[Trial]) -> pd.DataFrame:
    """A row a trial: its keys of the space, and its result."""
    points = list(dict.fromkeys(key for trial in trials for key in trial.configuration.point))
    rows = []
    for trial in trials:
        configuration = trial.configuration
        point = {key: configuration.point.get(key) for key in points}
        facts = {
            "trial": configuration.name,
            "stage": trial.stage,
            "algo": configuration.algo,
            **point,
            "seed": trial.seed,
            "rounds": trial.rounds,
        }
        rows.append(facts | trial.row | {"status": trial.status})
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in LAST))
    return pd.DataFrame(rows, columns=[*columns, *LAST], dtype=object)


class Winner(NamedTuple):
    """The best configuration of a method, and the number of candidates."""

    configuration: Configuration
    score: float  # on validation samples, larger is better; NaN: the only configuration
    configurations: int


def winners_table(winners: Sequence[Winner], tests: Sequence[Trial], metric: str) -> pd.DataFrame:
    """A row a winner, the best first: test metric over the seeds, and the differences to FedAvg's
    run of the same seed: FedAvg's winner, or among several the one with the same choices.

    Standard deviations are over the seeds (divided by n - 1). ``better``: seeds in which it is
    better than FedAvg; ``seeds``: number of completed seeds, ``completed``: these seeds.
    """
    place, read = f"test-{metric}", column(metric, "test")
    methods = {winner.configuration.algo for winner in winners}
    base = next((name for name in BASELINES if name in methods), None)
    bases = [winner for winner in winners if winner.configuration.algo == base]
    rows: list[dict[str, Any]] = []
    for winner in winners:
        configuration, values = winner.configuration, _by_seed(winner, tests, read)
        point = configuration.point
        row: dict[str, Any] = {
            "algo": configuration.algo,
            "trial": configuration.name,
            "settings": ", ".join(f"{key}={short(value)}" for key, value in point.items()),
            "configurations": winner.configurations,
            f"validation-{metric}": sign(metric) * winner.score,
            "seeds": len(values),
            SEEDS: ", ".join(map(str, sorted(values))),
            **_spread(place, [*values.values()]),
        }
        chosen = configuration.choice.items()
        alike = [each for each in bases if each.configuration.choice.items() <= chosen]
        if configuration.algo != base and (fitting := bases if len(bases) == 1 else alike):
            against = _by_seed(fitting[0], tests, read)
            gains = [value - against[seed] for seed, value in values.items() if seed in against]
            row |= _spread(f"over-{base}", gains)
            row["better"] = f"{sum(sign(metric) * gain > 0 for gain in gains)} of {len(gains)}"
        rows.append(row)
    rows.sort(key=lambda row: -sign(metric) * row[place] if row[place] == row[place] else math.inf)
    return pd.DataFrame(rows)


def costs_table(tests: Sequence[Group], metric: str, target: float) -> pd.DataFrame:
    """A row a group of test runs, by its label: the costs until the metric first reached the
    target, over the ``reached`` runs, with their standard deviations; 0: `usual_target`."""
    measured = metric_of(column(metric, TEST))
    target = target or usual_target(tests, measured)
    rows: dict[str, dict[str, Any]] = {}
    for group in tests:
        row, spent = (
            rows.setdefault(group.label, {"target": target}),
            to_target(group, measured, target),
        )
        for cost in costs_of(tests):
            key = cost + TO_TARGET
            row |= {key: spent[cost].mean, f"{key}{STD}": spent[cost].std}
        row["reached"] = f"{spent['round'].number} of {len(group.runs)}"
    return pd.DataFrame.from_dict(rows, orient="index")


def at_edges(winner: Configuration, tried: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each number of the winner that is the smallest or the largest of those ``tried``:
    a better one may be outside, unless the key's own range ends there."""
    fields = config.keys()
    for key, value in winner.point.items():
        values = sorted({point[key] for point in tried if type(point[key]) in (int, float)})
        if len(values) < 2 or value not in (values[0], values[-1]):
            continue
        which, bound = ("least", "low") if value == values[0] else ("largest", "high")
        if fields[key].metadata[bound] != value:
            yield (
                f"{winner.algo}: the winner's {key}={short(value)} is the {which} of "
                f"{len(values)} values tried; a better one may be outside: widen {key} in [space]"
            )


def _by_seed(winner: Winner, tests: Sequence[Trial], metric: str) -> dict[int, float]:
    """The metric of the winner's tests, without failed ones."""
    chosen = winner.configuration.algo, winner.configuration.point
    own = [t for t in tests if (t.configuration.algo, t.configuration.point) == chosen]
    values = {trial.seed: number(trial.row, metric) for trial in own}
    return {seed: value for seed, value in values.items() if not math.isnan(value)}


def as_text(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The winners' heading and rows for people: 97.00 ± 0.51% for a mean and its standard
    deviation, the method and its test metric first."""
    place = next(str(name) for name in table if f"{name}{STD}" in table)  # that of the tests
    metric = metric_of(column(place.removeprefix(f"{TEST}-"), TEST))
    text = pd.DataFrame({"algo": table["algo"]})
    for name in [
        place,
        *table.columns.drop(["algo", "trial", "target", place, SEEDS], errors="ignore"),
        "trial",
    ]:
        if name.endswith(STD):
            continue
        stds = table.get(f"{name}{STD}", [math.nan] * len(table))
        cells = [*zip(table[name], stds, strict=True)]
        if name.endswith(TO_TARGET):
            to = cost_heading(name, metric, table["target"].iloc[0])
            text[to] = [text_of(Spread(value, std, 0)) for value, std in cells]
            continue
        of_metric = f"{name}{STD}" in table or name.startswith("validation-")
        text[name] = [_cell(value, std, is_share(metric) and of_metric) for value, std in cells]
    text["seeds"] = [f"{n} ({each})" for n, each in zip(text["seeds"], table[SEEDS], strict=True)]
    heading = [str(n).replace(MEAN, f", last {WINDOW}").replace("-", " ") for n in text]
    return heading, text.to_numpy().tolist()


def _cell(value: Any, std: float, share: bool) -> str:
    """The number as text; empty for NaN."""
    if value != value:
        return ""
    if not share:
        return short(value) + ("" if math.isnan(std) else f" ± {short(std)}")
    return f"{value:.2%}" if math.isnan(std) else f"{100 * value:.2f} ± {std:.2%}"


def written(metric: str, value: float) -> str:
    """A value of a metric such as accuracy-last: an accuracy in percent."""
    return _cell(value, math.nan, is_share(metric_of(column(metric, TEST))))


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        name: fmean(values) if values else math.nan,
        f"{name}{STD}": stdev(values)
        if len(values) > 1 and all(map(math.isfinite, values))
        else math.nan,
    }


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
