"""Groups of runs: those that differ only in their seed are one group, with a spread.

Runs with equal settings but other data, files or code are another group; unknown contents, as in
runs of earlier versions, count as equal to the known ones if these are all the same. A seed counts
once: runs that repeat it are not replicates, even if they differ in the last bits.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedaccord.experiments.analysis.costs import with_costs
from fedaccord.runs.directory import COMPLETED, CONTENTS, SAMPLES
from fedaccord.runs.reader import StoredRun

DEFAULTS = "defaults.json"  # in a sweep's folder: the defaults behind the names of its trials
TRIALS = "table.csv"  # in a sweep's folder: the trials and tests of its last start
TUNE, TEST = "tune", "test"  # its stages: on validation samples, and on the test samples
STOPPED = "stopped"  # of a trial that ended after a rung
OPTIONS = Path(__file__).with_name("options.json")  # written by tools/sync.py
READING = ("dataset", "image-size", "tokenizer", "max-length", "labels")
UNKNOWN = "unknown"  # the contents behind a setting, in an earlier version


class Group(NamedTuple):
    """Runs of the same settings."""

    label: str  # the method, and the settings in which the groups differ
    runs: list[StoredRun]  # one for each seed, in the order of the seeds
    settings: dict[str, Any]  # that may affect the numbers, without the seed
    tables: list[pd.DataFrame]  # metrics.csv of each run, with the columns of `COSTS`
    repeats: list[StoredRun]  # further runs of these seeds, not counted


def groups_of(runs: Sequence[StoredRun]) -> list[Group]:
    """The groups: methods in the order of their first runs, each by the settings that differ."""
    together: dict[tuple[Any, ...], list[StoredRun]] = {}
    usual, others = _options(run.settings for run in runs)
    free = {"seed", *others}
    for run in runs:
        settings = {k: v for k, v in _complete(run.settings, usual).items() if k not in free}
        together.setdefault(tuple(sorted(settings.items())), []).append(run)
    together = {
        (*settings, *digests): alike
        for settings, same in together.items()
        for digests, alike in _of_same_contents(same).items()
    }
    each = [dict(key) for key in together]
    keys = differing(each)
    groups = []
    for settings, same, name in zip(each, together.values(), _labels(each, keys), strict=True):
        counted, repeats = _once_a_seed(same)
        tables = [*map(with_costs, counted)]
        groups.append(Group(name, counted, settings, tables, repeats))
    methods = [*dict.fromkeys(settings.get("algo") for settings in each)]

    def place(group: Group) -> tuple[Any, ...]:
        values = [group.settings.get(key) for key in keys]
        return methods.index(group.settings.get("algo")), *map(_orderly, values)

    return sorted(groups, key=place)


def _of_same_contents(
    runs: Sequence[StoredRun],
) -> dict[tuple[tuple[str, str], ...], list[StoredRun]]:
    """The runs by the hashes, by key, of the contents that their settings name, if these differ."""
    several = _several(runs)
    by_contents: dict[tuple[tuple[str, str], ...], list[StoredRun]] = {}
    for run in runs:
        digests = tuple((CONTENTS + name, run.contents.get(name, UNKNOWN)) for name in several)
        by_contents.setdefault(digests, []).append(run)
    return by_contents


def _options(settings: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """(every key with its default, the keys that affect no number of a run).

    They are read from a file, because the code of the options loads PyTorch, which would dominate
    the time of a comparison; a key that is not in it belongs to another package's method.
    """
    table = json.loads(OPTIONS.read_text(encoding="utf-8"))
    if all(key in table for each in settings for key in each if not key.startswith(CONTENTS)):
        usual = {key: default for key, (default, _) in table.items()}
        return usual, {key for key, (_, decides) in table.items() if not decides}
    from fedaccord.config import affecting, defaults
    from fedaccord.core.options import FREE

    return defaults(), affecting(*FREE)


def _complete(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run, with the ``usual`` values of keys that its version did not have yet."""
    tables = {settings.get("algo"), *(key.partition(".")[0] for key in settings if "." in key)}
    plain = {k: v for k, v in usual.items() if "." not in k and k != "algo"}
    own = {k: v for k, v in usual.items() if "." in k and k.partition(".")[0] in tables}
    return {**plain, **own, **settings}


def _once_a_seed(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], list[StoredRun]]:
    """(the run with the most progress for each seed, the other runs); completed runs first, of
    equal ones that with the most evaluations and metrics."""

    def progress(run: StoredRun) -> tuple[bool, int, int]:
        numbers = int(run.metrics.notna().to_numpy().sum())
        return run.summary["status"] == COMPLETED, len(run.metrics), numbers

    by_seed: dict[Any, StoredRun] = {}
    for run in sorted(runs, key=progress, reverse=True):
        by_seed.setdefault(run.settings.get("seed", 0), run)
    counted = [by_seed[seed] for seed in sorted(by_seed, key=_orderly)]
    return counted, [run for run in runs if all(run is not other for other in counted)]


def tested(groups: Sequence[Group]) -> list[Group]:
    """The groups without a sweep's trials on validation samples, which chose the settings of the
    others, and without tests that its last start did not choose; all if there are no others.
    Labels have the settings that the trials chose, and those in which a method differs from most of
    the others."""
    folders = {_folder(run) for group in groups for run in group.runs}
    chosen = {folder: _chosen(folder) for folder in folders if (folder / DEFAULTS).is_file()}

    def is_compared(run: StoredRun) -> bool:
        names = chosen.get(_folder(run), {}).get(str(run.settings.get("algo")))
        is_trial = _folder(run) in chosen and run.settings.get("validation")
        return not is_trial and (names is None or run.path.name in names)

    rest = []
    for group in groups:
        pairs = zip(group.runs, group.tables, strict=True)
        if kept := [(run, table) for run, table in pairs if is_compared(run)]:
            runs, tables = map(list, zip(*kept, strict=True))
            rest.append(group._replace(runs=runs, tables=tables))
    if not rest:
        return [*groups]
    if len(rest) == len(groups):
        return rest
    names = _labels_of_chosen(rest, groups)
    return [group._replace(label=name) for group, name in zip(rest, names, strict=True)]


def _labels_of_chosen(rest: Sequence[Group], every: Sequence[Group]) -> list[str]:
    each, tried = ([group.settings for group in some] for some in (rest, every))
    keys = differing(each)
    own = [key for key in differing(tried) if "." in key and key not in keys]
    usual: dict[str, Any] = {}
    for key in keys:
        if not is_swept(key, tried):
            value, count = Counter(settings.get(key) for settings in each).most_common(1)[0]
            usual |= {key: value} if count > len(each) / 2 else {}
    unusual = [{k: v for k, v in s.items() if k not in usual or v != usual[k]} for s in each]
    short = _labels(unusual, [*keys, *own])
    return short if len({*short}) == len(short) else _labels(each, [*keys, *own])


def is_swept(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a method has several values of the key."""
    pairs = {(each.get("algo"), each[key]) for each in settings if key in each}
    return len(pairs) > len({algo for algo, _ in pairs})


def _folder(run: StoredRun) -> Path:
    """The sweep's folder, if it is a run of a sweep."""
    return run.path.parent.parent


def _chosen(folder: Path) -> dict[str, set[str]]:
    """The names of the runs that test what a sweep's last start chose by trials, by method."""
    table = _trials(folder, "trial", "stage", "algo", "seed")
    tuned = {*table[table["stage"] == TUNE]["algo"]}
    tests = table[(table["stage"] == TEST) & table["algo"].isin(tuned)]
    names = tests["trial"] + "-seed" + tests["seed"].astype(str)
    return {str(algo): {*own} for algo, own in names.groupby(tests["algo"])}


def has_stopped(groups: Iterable[Group]) -> bool:
    """Whether some are of a sweep that stopped trials after fewer rounds."""
    folders = {_folder(run) for group in groups for run in group.runs}
    return any((_trials(folder, "status")["status"] == STOPPED).any() for folder in folders)


def _trials(folder: Path, *columns: str) -> pd.DataFrame:
    """These columns of a sweep's table; no row if it was stopped before its first trial, or its
    table is damaged."""
    try:
        return pd.read_csv(folder / TRIALS, usecols=[*columns])
    except (OSError, ValueError):
        return pd.DataFrame(columns=[*columns])


def _orderly(value: Any) -> tuple[bool, bool, Any]:
    """Numbers by size, then words, then None."""
    return value is None, isinstance(value, str), 0 if value is None else value


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys, except algo, in which settings differ. A key that only one method has does not
    count between methods; without a plug-in's table its keys have their defaults."""
    keys, (usual, _) = [], _options(settings)
    for key in dict.fromkeys(key for each in settings for key in each if key != "algo"):
        of_method: dict[str, set[Any]] = {}
        for each in settings:
            value = each.get(key, usual.get(key))
            of_method.setdefault(str(each.get("algo")), set()).add(value)
        present = {each[key] for each in settings if key in each}
        if len(present) > 1 or any(len(values) > 1 for values in of_method.values()):
            keys.append(key)
    return keys


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


def several_contents(groups: Sequence[Group]) -> list[str]:
    """The keys with equal values but different samples, files or code in the groups; without
    metrics, which affect no other number."""
    runs = [run for group in groups for run in group.runs]
    return [name for name in _several(runs) if name != "metrics"]


def _several(runs: Sequence[StoredRun]) -> list[str]:
    """The keys with equal values but different contents."""
    digests: dict[tuple[Any, ...], set[str]] = {}
    for run in runs:
        for name, digest in run.contents.items():
            values = (run.settings.get(key) for key in (READING if name == SAMPLES else (name,)))
            digests.setdefault((name, *values), set()).add(digest)
    return [*dict.fromkeys(name for (name, *_), each in digests.items() if len(each) > 1)]
