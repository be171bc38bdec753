"""A trial: a run in its own directory, which can resume and never ends the sweep.

Its result is a file of the sweep's folder, ``rows/TRIAL-ROUNDS.json``, written last. A restarted
sweep reads it and runs only the missing trials.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
import torch

from fedaccord import config, engine
from fedaccord.config import RunConfig
from fedaccord.core.metrics import OUTPUT, PERSONAL
from fedaccord.engine import quiet
from fedaccord.engine.checks import load_checked
from fedaccord.experiments.analysis.costs import Point, with_costs
from fedaccord.experiments.analysis.groups import DEFAULTS, TRIALS, Group
from fedaccord.experiments.analysis.ranking import up_to
from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.plan import Plan, SweepOptions
from fedaccord.experiments.sweep.records import naming_defaults, read_table
from fedaccord.process import threads
from fedaccord.runs import flatten, lock, logbook, metrics, named_contents, reader
from fedaccord.runs.directory import COMPLETED as COMPLETED
from fedaccord.runs.directory import FAILED as FAILED
from fedaccord.runs.lock import LockedError
from fedaccord.storage.files import read_json, replace
from fedaccord.task import forget_tasks

ROWS = "rows"  # folder of a sweep's folder
RUN = "run.json"  # in a sweep's folder: its methods, and the settings of [run] behind its tables
WINNERS = "winners.csv"  # in a sweep's folder
DIVERGED = "model diverged"  # in the reason of a run whose local models or output model diverged
KEPT = ("rounds-counted", *metrics.of_kind(metrics.SUMMED))  # of a run's summary
Row = dict[str, Any]


class Job(NamedTuple):
    """A trial up to a number of rounds, in plain types: it is sent to other processes."""

    folder: str  # of the sweep
    name: str
    settings: dict[str, Any]  # of the run, its rounds among them
    metric: str = ""  # that ranks it
    code: dict[str, str] | None = None  # of functions, by key, as of `Configuration.code`

    @classmethod
    def of(
        cls, folder: Path, configuration: Configuration, seed: int, rounds: int, metric: str = ""
    ) -> "Job":
        settings = configuration.settings | {"seed": seed, "num-server-rounds": rounds}
        return cls(str(folder), configuration.run_name(seed), settings, metric, configuration.code)

    @property
    def path(self) -> Path:
        return Path(self.folder) / "runs" / self.name

    @property
    def rounds(self) -> int:
        return int(self.settings["num-server-rounds"])

    @property
    def file(self) -> Path:
        return Path(self.folder) / ROWS / f"{self.name}-{self.rounds}.json"


OnRow = Callable[[Job, Row], None]  # called with every completed row
Workers = Callable[[Sequence[Job], OnRow], None]  # runs jobs: see workers.py


Records = dict[str, dict[str, Any]]  # files of a sweep's folder, written once all checks passed


def check_names(folder: Path, configurations: Iterable[Configuration]) -> Records:
    """The defaults that the names of trials leave out, see `naming_defaults`.

    configurations: of the sweep, with every value of its space. Raises ValueError, in one line, if
    one of them has another default than the folder was begun with: its trials would be run again,
    or get names that a later start does not find; and if a sweep would replace files of something
    else.
    """
    file, usual = folder / DEFAULTS, naming_defaults(folder)
    rows = [*(folder / ROWS).glob("*.json")]
    if rows and not file.exists():
        raise ValueError(
            f"{folder}: expected a sweep of this version, got one of an earlier version, whose "
            "trials have other names and would be run again; choose another --out"
        )
    for each in configurations:
        used = config.in_use(each.config) if rows else {}
        for key in sorted((used.keys() & usual.keys()) - each.settings.keys()):
            if used[key] != usual[key]:
                raise ValueError(
                    f"{folder}: it was begun with the default {key}={usual[key]}, which is now "
                    f"{used[key]}; set it, or choose another --out"
                )
    other = [name for name in (TRIALS, WINNERS, RUN) if (folder / name).exists()]
    if other and not file.exists():
        raise ValueError(
            f"{folder}: expected a new folder or one of a sweep, got one whose {other[0]} is not a "
            "sweep's and would be replaced; choose another --out"
        )
    return {DEFAULTS: usual}


def check_run(folder: Path, plan: Plan) -> Records:
    """The settings. Raises ValueError, in one line, if a folder's trials were begun with others.

    Those that [space] varies, and those of methods that are new in the folder, may differ.
    """
    file, free = folder / RUN, config.affecting("speed", "place")
    usual = config.defaults()
    usual_before = usual | naming_defaults(folder)
    now = {k: v for k, v in plan.run.items() if k.rpartition(".")[2] not in free and k != "algo"}
    now = {key: value for key, value in now.items() if key not in config.paths(now)}
    begun = file.exists() and any((folder / ROWS).glob("*.json"))
    record: dict[str, Any] = (
        read_table(file, "methods", "run") if begun else {"methods": [], "run": now}
    )
    for key in {**record["run"], **now}:
        before = record["run"].get(key, usual_before.get(key))
        value = now.get(key, usual.get(key))
        is_new = key.partition(".")[0] in {*plan.methods} - {*record["methods"]}
        if before != value and key not in plan.space and not is_new:
            begun_with = f"no {key}" if before is None else f"{key}={before}"
            raise ValueError(
                f"{folder}: expected {begun_with}, as in its earlier trials, got {value}; "
                "choose another --out"
            )
    methods = sorted({*record["methods"], *plan.methods})
    return {RUN: {"methods": methods, "run": record["run"] | now}}


def write_records(folder: Path, records: Records) -> None:
    for name, content in records.items():
        replace(folder / name, json.dumps(content).encode())


def read_row(file: Path) -> Row:
    """The result of a trial. Raises ValueError, which names the file, if it is damaged."""
    advice = "remove it: its run is then read again or repeated"
    return read_table(file, "status", "reason", advice=advice)


def row_of(job: Job) -> Row | None:
    """The result of a job; None: it is not completed."""
    return read_row(job.file) | _at_seconds(job) if job.file.exists() else None


def execute(job: Job) -> Row:
    """Run the rest of a job, and store its result.

    Raises OSError if a file cannot be read or written, LockedError if another process runs the
    trial; a run that fails is a row with the reason.
    """
    if row := row_of(job):
        return row
    row = _run(job)
    job.file.parent.mkdir(parents=True, exist_ok=True)
    replace(job.file, json.dumps(row).encode())
    return row | _at_seconds(job)


def check_measured(job: Job, row: Row) -> None:
    """Raises ValueError, in one line, if a completed run did not measure the metric that ranks it
    on its validation samples, or on the test samples."""
    names = sorted({metrics.metric_of(key) for key in row} - {""})
    split = "validation" if job.settings["validation"] else "test"
    ranking = metrics.metric_of(column(job.metric, split))
    of_samples = ranking.startswith(split)
    if row["status"] == COMPLETED and of_samples and ranking not in names:
        raise ValueError(
            f"[sweep] metric: expected one that these runs measure, {', '.join(names)}, got "
            f"{job.metric}; choose one of them, or add it to metrics in [run], in another --out"
        )


def check_data(jobs: Iterable[Job], options: SweepOptions) -> None:
    """Raises ValueError, in one line, if data and model fit the settings of none of the jobs; of
    jobs that differ only by their seeds the first is checked. Jobs on a Ray cluster are not
    checked, as its machines have the data, nor models that will be on a GPU in other processes.
    options: where the jobs will run."""
    if options.ray_address:
        return
    forget_tasks()  # files, and what functions read, may have changed
    elsewhere = threads.processes(options.workers) > 1
    leaves_gpu = elsewhere and torch.cuda.is_available()  # to the processes
    errors: dict[Any, Exception] = {}
    for job in jobs:
        run_config = _config(job)
        method, task = run_config.strategy, replace_fields(run_config.task, seed=0)
        sizes = run_config.num_clients, run_config.num_server_rounds, method.max_examples
        key = task, method.model_settings, method.guarantee, sizes
        if key in errors:
            continue
        if leaves_gpu:
            run_config = replace_fields(
                run_config, task=replace_fields(run_config.task, device="cpu")
            )
        try:
            load_checked(run_config, builds_model=not leaves_gpu)
        except (ValueError, OSError) as error:
            errors[key] = error
        else:
            return
        finally:
            if elsewhere:
                forget_tasks()
    if errors:
        raise next(iter(errors.values()))


def forget_failures(folder: Path) -> None:
    """Remove the rows of failed trials from a sweep's folder: they run again, as the cause may be
    fixed. A model that diverged is a result, as it would diverge again."""
    for file in (folder / ROWS).glob("*.json"):
        row = read_row(file)
        if row["status"] == FAILED and DIVERGED not in row["reason"]:
            file.unlink()


def forget_checkpoints(job: Job) -> None:
    """Remove the checkpoints of a run that will not resume: they contain every client's state."""
    shutil.rmtree(job.path / logbook.FOLDER, ignore_errors=True)


def _run(job: Job) -> Row:
    summary = summary_of(job.path)
    if (summary.get("status"), summary.get("rounds")) != (COMPLETED, job.rounds):
        begun = any((job.path / logbook.FOLDER).glob("*.json")) and summary.get("status") != FAILED
        try:
            with quiet(logging.ERROR):  # a reason is in the row
                if not (begun and _resume(job)):
                    lock.check(job.path)
                    shutil.rmtree(job.path, ignore_errors=True)
                    run_config = _config(job)
                    _check_code(job, run_config)
                    engine.run(run_config)
        except (OSError, LockedError):
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            return _row(job, FAILED, reason)
    return _row(job, COMPLETED)


def _check_code(job: Job, run_config: RunConfig) -> None:
    """Raises ValueError, in one line, if this process has other code than the trial's name."""
    for key, digest in (job.code or {}).items():
        paths = named_contents.functions(run_config)[key]
        if named_contents.of_code(key, paths) != digest:
            raise ValueError(
                f"{key}: the code of {', '.join(paths)} has changed since the sweep was started; "
                "start it again"
            )


def _config(job: Job, **more: Any) -> RunConfig:
    place = {"out-dir": str(job.path.parent), "name": job.name}
    return RunConfig.make(job.settings | place | more)


def _resume(job: Job) -> bool:
    """Whether the run resumed from its last checkpoint; if not, it restarts."""
    try:
        engine.run(_config(job, resume=True))
    except LockedError:
        raise
    except (ValueError, FileNotFoundError):  # a damaged checkpoint, or more rounds than requested
        return False
    return True


def summary_of(path: Path) -> dict[str, Any]:
    try:
        return flatten(read_json(path / "summary.json"))
    except (FileNotFoundError, ValueError, AttributeError):  # the last: no table
        return {}


def _row(job: Job, status: str, reason: str = "") -> Row:
    summary = summary_of(job.path)
    own = {
        name + metrics.LAST for name in metrics.own(k.removesuffix(metrics.LAST) for k in summary)
    }
    measured = {k: v for k, v in summary.items() if k in KEPT or k in own or metrics.metric_of(k)}
    row = {"status": status, **measured, "gradients": _gradients(job)}
    return row | {"seconds": summary.get("seconds"), "reason": reason}


def _at_seconds(job: Job) -> Row:
    """The metric of the last evaluation up to its simulated seconds; empty: it is another metric,
    or there is no evaluation."""
    if not (at := metrics.AT.search(job.metric)):
        return {}
    key = column(job.metric, "validation" if job.settings["validation"] else "test")
    try:
        run = reader.read(job.path)
    except (ValueError, OSError):
        return {}
    table = with_costs(run)
    group = Group(job.name, [run], job.settings, [table[table["round"] <= job.rounds]], [])
    spread = up_to(group, metrics.metric_of(key), Point(float(at[1])))
    return {key: spread.mean} if spread.number else {}


def _gradients(job: Job) -> int | None:
    """Gradient evaluations of all accepted clients, each over a batch."""
    try:
        steps = pd.read_csv(job.path / "clients.csv")["steps"].sum()
    except (FileNotFoundError, KeyError):
        return None
    return round(float(steps) * _config(job).strategy.cost.gradients)


def number(row: Mapping[str, Any], key: str) -> float:
    """A number of a row; NaN if it has none, and of a failed trial."""
    value = row.get(key) if row["status"] == COMPLETED else None
    return float("nan") if value is None else float(value)


def column(metric: str, split: str) -> str:
    """The key of a metric in a row, as ``accuracy-last``; clients' metrics have the same key in
    both splits, as validation samples replace their test samples."""
    return metric if metric.startswith((OUTPUT, PERSONAL)) else f"{split}-{metric}"


def sign(metric: str) -> int:
    """1 if larger is better, -1 for a loss."""
    return 1 if metrics.best(metrics.metric_of(column(metric, "test"))) is max else -1


def mean(rows: Sequence[Row], metric: str) -> float:
    """The score on validation samples, larger is better: a loss is negated. NaN if a trial
    failed."""
    return sign(metric) * fmean(number(row, column(metric, "validation")) for row in rows)
