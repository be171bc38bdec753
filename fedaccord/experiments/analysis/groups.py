"""Groups of runs: those that differ only in their seed are one group, with a spread.

Other data, files or code behind equal settings are another group; what is unknown, as in runs of
earlier versions, is no difference where only one is known. A seed counts once: runs that repeat it
are no replicates, even if they differ in the last bits.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedaccord.runs.directory import COMPLETED, CONTENTS, FAILED, SAMPLES
from fedaccord.runs.metrics import METRIC, RANKED, SPLITS, WINDOW, best, is_share
from fedaccord.runs.reader import Run

CLOCK, EPSILON = "clock", "dp-epsilon"
GIVEN_BY = {CLOCK: "device-profile", EPSILON: "dp.epsilon"}  # costs that not every run has
DEFAULTS = "defaults.json"  # in a sweep's folder: the defaults behind the names of its trials
TRIALS = "table.csv"  # in a sweep's folder: the trials and tests of its last start
TUNE, TEST = "tune", "test"  # its stages: on validation samples, and on the test samples
OPTIONS = Path(__file__).with_name("options.json")  # written by tools/sync.py
READING = ("dataset", "image-size", "tokenizer", "max-length", "labels")
UNKNOWN = "unknown"  # the contents behind a setting, in an earlier version
ROUNDING = 1e-12  # relative, of sums of floats
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
        """Of 3600, which are simulated seconds, or dp-epsilon=4. Raises ValueError, in one line."""
        over, _, value = str(at).rpartition("=")
        try:
            point = Point(float(value), over or CLOCK)
        except ValueError:
            point = Point(math.nan)
        if math.isnan(point.value) or point.over not in COSTS:
            raise ValueError(
                f"--at: expected simulated seconds, as 3600, or COST=NUMBER with one of "
                f"{', '.join(COSTS)}, got {at!r}"
            )
        return point


class Group(NamedTuple):
    """Runs of the same settings."""

    label: str  # the method, and the settings in which the groups differ
    runs: list[Run]  # one for each seed, in the order of the seeds
    settings: dict[str, Any]  # that may affect the numbers, without the seed
    tables: list[pd.DataFrame]  # metrics.csv of each run, with the columns of `COSTS`
    repeats: list[Run]  # further runs of these seeds, not counted


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """The groups: methods in the order of their first runs, each by the settings that differ."""
    together: dict[tuple[Any, ...], list[Run]] = {}
    usual, others = _options(run.settings for run in runs)
    free = {"seed", *others}
    for run in runs:
        settings = {k: v for k, v in _complete(run.settings, usual).items() if k not in free}
        together.setdefault(tuple(sorted(settings.items())), []).append(run)
    together = {
        (*settings, *found): alike
        for settings, same in together.items()
        for found, alike in _of_same_contents(same).items()
    }
    each = [dict(key) for key in together]
    keys = differing(each)
    found = []
    for settings, same, name in zip(each, together.values(), _labels(each, keys), strict=True):
        counted, repeats = _once_a_seed(same)
        tables = [*map(with_costs, counted)]
        found.append(Group(name, counted, settings, tables, repeats))
    methods = [*dict.fromkeys(settings.get("algo") for settings in each)]

    def place(group: Group) -> tuple[Any, ...]:
        values = [group.settings.get(key) for key in keys]
        return methods.index(group.settings.get("algo")), *map(_orderly, values)

    return sorted(found, key=place)


def _of_same_contents(runs: Sequence[Run]) -> dict[tuple[tuple[str, str], ...], list[Run]]:
    """The runs by what their equal settings only name, where that differs: the hashes by key."""
    every = [run.contents for run in runs]
    names = dict.fromkeys(name for contents in every for name in contents)
    several = [n for n in names if len({each[n] for each in every if n in each}) > 1]
    found: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        digests = tuple((CONTENTS + name, run.contents.get(name, UNKNOWN)) for name in several)
        found.setdefault(digests, []).append(run)
    return found


def _options(settings: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """(every key with its default, the keys that affect no number of a run).

    They are read from a file, because the code of the options loads PyTorch, which would dominate
    the time of a comparison; a key that is not in it belongs to another package's method.
    """
    found = json.loads(OPTIONS.read_text(encoding="utf-8"))
    if all(key in found for each in settings for key in each if not key.startswith(CONTENTS)):
        usual = {key: default for key, (default, _) in found.items()}
        return usual, {key for key, (_, decides) in found.items() if not decides}
    from fedaccord.config import affecting, defaults
    from fedaccord.core.options import FREE

    return defaults(), affecting(*FREE)


def _complete(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run, with the ``usual`` values of keys that its version did not have yet."""
    tables = {settings.get("algo"), *(key.partition(".")[0] for key in settings if "." in key)}
    plain = {k: v for k, v in usual.items() if "." not in k and k != "algo"}
    own = {k: v for k, v in usual.items() if "." in k and k.partition(".")[0] in tables}
    return {**plain, **own, **settings}


def _once_a_seed(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """(the run with the most progress for each seed, the other runs); completed runs first, of
    equal ones that with the most metrics."""

    def progress(run: Run) -> tuple[bool, int, int]:
        rounds, columns = run.metrics.shape
        return run.summary["status"] == COMPLETED, rounds, columns

    by_seed: dict[Any, Run] = {}
    for run in sorted(runs, key=progress, reverse=True):
        by_seed.setdefault(run.settings.get("seed", 0), run)
    counted = [by_seed[seed] for seed in sorted(by_seed, key=_orderly)]
    return counted, [run for run in runs if all(run is not other for other in counted)]


def tested(groups: Sequence[Group]) -> list[Group]:
    """The groups without a sweep's trials on validation samples, which chose the settings of the
    others, and without tests of settings that it chose before it had more trials; all if there are
    no others. Labels have the settings in which these groups differ."""
    folders = {_folder(run) for group in groups for run in group.runs}
    chosen = {folder: _chosen(folder) for folder in folders if (folder / DEFAULTS).is_file()}

    def is_compared(run: Run) -> bool:
        names = chosen.get(_folder(run), {}).get(str(run.settings.get("algo")))
        is_trial = _folder(run) in chosen and run.settings.get("validation")
        return not is_trial and (names is None or run.path.name.rpartition("-seed")[0] in names)

    rest = [group for group in groups if any(map(is_compared, group.runs))]
    if len(rest) in (0, len(groups)):
        return [*groups]
    each = [group.settings for group in rest]
    names = _labels(each, differing(each))
    return [group._replace(label=name) for group, name in zip(rest, names, strict=True)]


def _folder(run: Run) -> Path:
    """Of the sweep, if it is a run of one."""
    return run.path.parent.parent


def _chosen(folder: Path) -> dict[str, set[str]]:
    """The names of the tests that a sweep's last start chose by trials, by method."""
    try:
        table = pd.read_csv(folder / TRIALS, usecols=["trial", "stage", "algo"])
    except (OSError, ValueError):  # it was stopped before its first trial, or is damaged
        return {}
    tuned = {*table[table["stage"] == TUNE]["algo"]}
    tests = table[(table["stage"] == TEST) & table["algo"].isin(tuned)]
    return {str(algo): {*names} for algo, names in tests.groupby("algo")["trial"]}


def ranked(groups: Sequence[Group], metric: str, at: Point | None = None) -> list[Group]:
    """The best final value first, or the best value of `up_to`; groups without one last."""

    def place(group: Group) -> tuple[bool, float]:
        value = (final(group, metric) if at is None else up_to(group, metric, at)).mean
        return math.isnan(value), -value if best(metric) is max else value

    return sorted(groups, key=place)


def _orderly(value: Any) -> tuple[bool, bool, Any]:
    """Numbers by size, then words, then None."""
    return value is None, isinstance(value, str), 0 if value is None else value


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys, except algo, in which settings differ. A key that only one method has is no
    difference to other methods; without a plug-in's table its keys have their defaults."""
    found, (usual, _) = [], _options(settings)
    for key in dict.fromkeys(key for each in settings for key in each if key != "algo"):
        of_method: dict[str, set[Any]] = {}
        for each in settings:
            value = each.get(key, usual.get(key))
            of_method.setdefault(str(each.get("algo")), set()).add(value)
        present = {each[key] for each in settings if key in each}
        if len(present) > 1 or any(len(values) > 1 for values in of_method.values()):
            found.append(key)
    return found


def _labels(each: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Numbers have four digits, or all if labels would be equal."""
    short = [label(settings, keys, "{:.4g}") for settings in each]
    return short if len({*short}) == len(short) else [label(settings, keys) for settings in each]


def label(settings: Mapping[str, Any], keys: Sequence[str], form: str = "{}") -> str:
    """form: of numbers."""

    def word(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return form.format(value) if isinstance(value, float) else str(value)

    words = (f"{key}={word(settings[key])}" for key in keys if key in settings)
    return " ".join(" ".join([str(settings.get("algo", "run")), *words]).split())


def with_costs(run: Run) -> pd.DataFrame:
    """metrics.csv with the costs up to the end of each round: ``bytes`` (between nodes if there is
    no server, else up and down), ``gradients`` (of a batch, over the accepted clients; NaN if it
    is not known), ``seconds`` (without evaluation), and those of `GIVEN_BY` (NaN if the run has
    none)."""
    table = run.metrics.copy()
    numbers = table.reindex(columns=["down-bytes", "up-bytes", "peer-bytes", "seconds"]).fillna(0)
    up_and_down = numbers["down-bytes"] + numbers["up-bytes"]
    traffic = numbers["peer-bytes"] if "peer-bytes" in table else up_and_down
    table["bytes"] = traffic.cumsum()
    table["seconds"] = numbers["seconds"].cumsum()
    each = run.used.get("gradients-per-step", math.nan)
    each = each if isinstance(each, (int, float)) else math.nan
    steps = run.clients.groupby("round")["steps"].sum() if "steps" in run.clients else pd.Series()
    table["gradients"] = table["round"].map(steps).fillna(0).cumsum() * each
    return table.assign(**{cost: table.get(cost, math.nan) for cost in GIVEN_BY})


def costs_of(groups: Sequence[Group]) -> dict[str, str]:
    """The costs that some run has, with their names."""
    absent = {cost for cost in GIVEN_BY if not any(has(group, cost) for group in groups)}
    return {cost: name for cost, name in COSTS.items() if cost not in absent}


def several_samples(groups: Sequence[Group]) -> bool:
    """Whether the data behind an equal data set and equal settings of reading it differ."""
    found: dict[tuple[Any, ...], set[str]] = {}
    for group in groups:
        same = found.setdefault(tuple(group.settings.get(key) for key in READING), set())
        same |= {run.contents[SAMPLES] for run in group.runs if SAMPLES in run.contents}
    return any(len(known) > 1 for known in found.values())


def main_metric(groups: Sequence[Group], wanted: str = "") -> str:
    """The metric that ranks runs: ``wanted``, or the first of `RANKED` that some run has. Raises
    ValueError, in one line, if no run has it, or it does not say which value is better."""
    if not wanted:
        return next((name for name in RANKED if any(has(g, name) for g in groups)), RANKED[0])
    ordered = [name for name, column in METRIC.items() if column.better]
    known = [name for name in ordered if any(has(g, name) for g in groups)]
    if wanted not in known:
        from fedaccord.core.options import did_you_mean  # loads PyTorch

        near = did_you_mean(wanted, known)
        names = ", ".join(known) or "none"
        if any(has(group, wanted) for group in groups):
            near = ", of which it is not known whether a larger value is better"
        raise ValueError(f"--metric: expected one of these runs, {names}, got {wanted!r}{near}")
    return wanted


def of_untrained_parts(group: Group, metric: str) -> bool:
    """Whether the metric is of w with the clients' own parts as they were before round 1."""
    kept = group.settings.get("local-parameters") or group.settings.get("buffers") == "local"
    return bool(kept) and metric.startswith(tuple(f"{split}-" for split in SPLITS))


def tuned(groups: Sequence[Group]) -> tuple[str, list[Group]]:
    """The first of the metrics that most groups have, and these groups: in a sweep the tuned ones,
    on validation samples, not the few tested ones."""
    by_metric = {name: [group for group in groups if has(group, name)] for name in RANKED}
    return max(by_metric.items(), key=lambda pair: len(pair[1]))


def has(group: Group, metric: str) -> bool:
    return any(metric in table and table[metric].notna().any() for table in group.tables)


def smoothed(values: "pd.Series[float]") -> "pd.Series[float]":
    """The mean of the last evaluations at each one: a twentieth of all, at most ten."""
    window = min(max(len(values) // 20, 1), WINDOW)
    return values.rolling(window, min_periods=1).mean()


def evaluated(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of trained models that have the metric."""
    if metric not in table:
        return table.iloc[:0].assign(**{metric: []})
    return table[table[metric].notna() & (table["round"] > 0)]


class Spread(NamedTuple):
    """Mean and standard deviation of numbers of several runs."""

    mean: float  # NaN: there is none
    std: float  # n - 1 in the denominator; NaN for a single number
    number: int
    is_share: bool = False  # displayed in percent

    @staticmethod
    def of(values: Sequence[float], is_share: bool = False) -> "Spread":
        known = [value for value in values if not math.isnan(value)]
        mean = float(np.mean(known)) if known else math.nan
        std = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
        if std <= ROUNDING * abs(mean):
            std = 0.0  # equal numbers, whose mean was rounded
        return Spread(mean, std, len(known), is_share)


def measured(group: Group) -> list[pd.DataFrame]:
    """The tables of its runs, without those that failed: their numbers are not of the method."""
    pairs = zip(group.runs, group.tables, strict=True)
    return [table for run, table in pairs if run.summary["status"] != FAILED]


def final(group: Group, metric: str) -> Spread:
    """The mean of the last ten evaluations, over the runs that did not fail."""
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


def reached(table: pd.DataFrame, metric: str, target: float) -> "pd.Series[float] | None":
    """The row of a run's table (see `with_costs`) when the metric first reached the target."""
    rounds = evaluated(table, metric)
    good = rounds[metric] >= target if best(metric) is max else rounds[metric] <= target
    return rounds[good].iloc[0] if good.any() else None


def usual_target(groups: Sequence[Group], metric: str) -> float:
    """Nine tenths of the best group's final accuracy; of a loss, eleven tenths."""
    ends = [end for group in groups if math.isfinite(end := final(group, metric).mean)]
    if not ends:
        return math.nan
    return (0.9 if best(metric) is max else 1.1) * float(best(metric)(ends))
