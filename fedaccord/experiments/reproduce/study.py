"""The runs of cells, in a folder from which they resume.

A run is a job of the sweep's workers: after a kill it resumes from its last checkpoint, and with
more ``rounds`` than before from its end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedaccord import config
from fedaccord.experiments.reproduce.results import result
from fedaccord.experiments.reproduce.table import Cell, Table
from fedaccord.experiments.sweep import workers
from fedaccord.experiments.sweep.configuration import Configuration
from fedaccord.experiments.sweep.plan import SAME, SweepOptions, managed_keys
from fedaccord.experiments.sweep.records import naming_defaults
from fedaccord.experiments.sweep.trial import (
    COMPLETED,
    DIVERGED,
    FAILED,
    Job,
    Row,
    check_data,
    check_names,
    forget_checkpoints,
    read_row,
    summary_of,
    write_records,
)
from fedaccord.runs.lock import Lock
from fedaccord.strategies import METHODS

BY_CELL = {"algo", "num-server-rounds"}  # keys that a cell sets


class CellRun(NamedTuple):
    """A cell with a seed."""

    cell: Cell
    seed: int
    job: Job


class Done(NamedTuple):
    run: CellRun
    rounds: int  # rounds that it has: as many as requested, or more
    row: Row


OnDone = Callable[[Done], None]


@dataclass(frozen=True)
class Study:
    """Cells of a table, over seeds. `make` checks them."""

    table: Table
    cells: Sequence[Cell]
    seeds: Sequence[int]
    rounds: int | None = None  # None: the paper's
    changes: Mapping[str, Any] = field(default_factory=dict)  # run-config keys, for all cells
    usual: Mapping[str, Any] | None = None  # as of `Configuration`

    @staticmethod
    def make(
        table: Table,
        cells: Sequence[Cell],
        seeds: Sequence[int],
        rounds: int | None,
        changes: Mapping[str, Any],
    ) -> "Study":
        """Raises ValueError, in one line, for settings that no cell supports."""
        managed = managed_keys() | BY_CELL
        for key in changes:
            if key in managed:
                raise ValueError(
                    f"{key}: `reproduce` sets it for each run; leave it out, and choose by "
                    "--cells, --seeds, --rounds and --out"
                )
        study = Study(table, cells, seeds, rounds, changes)
        for cell in cells:
            run_config = study.configuration(cell).config
            run_config.strategy.check_clients(run_config.num_clients)
            names = run_config.task.metrics
            has = not names or any(name.strip() == "accuracy" for name in names.split(","))
            if run_config.strategy.evaluation == "clients" or not has:
                raise ValueError(
                    "expected runs whose server measures the accuracy, as the tables have it, got "
                    f"metrics={names or 'accuracy'} evaluation={run_config.strategy.evaluation}: "
                    "add accuracy to metrics, or use evaluation=both"
                )
        return study

    def configuration(self, cell: Cell) -> Configuration:
        """A cell's configuration with the paper's rounds: runs with fewer have the same name."""
        settings: dict[str, Any] = {**SAME, **cell.settings, **self.changes}
        if METHODS[settings["algo"]].anneals:
            settings["num-server-rounds"] = self.rounds_of(cell)
        return Configuration(settings["algo"], {}, settings, self.usual)

    def at(self, folder: Path) -> "Study":
        """The study with the names that its runs have in a folder."""
        return replace(self, usual=naming_defaults(folder))

    def rounds_of(self, cell: Cell) -> int:
        return self.rounds or cell.rounds

    @cached_property
    def shown_changes(self) -> dict[str, Any]:
        """The changes that affect numbers, and which replies and evaluations count."""
        numbers = config.affecting("numbers") | config.affecting("rounds") | {"eval-every"}
        return {key: value for key, value in self.changes.items() if key in numbers}

    def warnings(self) -> list[str]:
        """A line for each change that no cell reads."""
        configs = [self.configuration(cell).config for cell in self.cells]
        unread = [{x.partition("=")[0]: x for x in each.unread(self.changes)} for each in configs]
        return [unread[0][key] for key in self.changes if all(key in lines for lines in unread)]

    def runs(self, folder: Path) -> list[CellRun]:
        """Seed by seed, column by column: whenever it stops, a column's methods are comparable.

        Empty for a table of costs, which are computed.
        """
        if not self.table.is_run:
            return []
        named = self.at(folder)
        configurations = [named.configuration(cell) for cell in self.cells]
        return [
            CellRun(cell, seed, Job.of(folder, configuration, seed, named.rounds_of(cell)))
            for seed in self.seeds
            for cell, configuration in zip(self.cells, configurations, strict=True)
        ]

    def perform(self, folder: Path, options: SweepOptions, on_done: OnDone) -> None:
        """Run the missing runs. Raises ValueError if another process runs the study, and if a run
        already has more rounds than requested."""
        missing: dict[str, list[CellRun]] = {}

        def on_row(job: Job, row: Row) -> None:
            runs = missing[job.name]
            if row["status"] == COMPLETED and job.rounds >= runs[0].cell.rounds:
                forget_checkpoints(job)
            for run in runs:
                on_done(Done(run, job.rounds, row))

        folder.mkdir(parents=True, exist_ok=True)
        with Lock(folder):
            configurations = map(self.at(folder).configuration, self.cells)
            records = check_names(folder, configurations)
            for run in self.runs(folder):
                if (done := self.done(run)) is not None:
                    on_done(done)
                else:
                    _check_shorter(run)
                    missing.setdefault(run.job.name, []).append(run)
            check_data((runs[0].job for runs in missing.values()), options)
            write_records(folder, records)
            for runs in missing.values():
                runs[0].job.file.unlink(missing_ok=True)  # of a failure
            with workers.of(options) as work:
                work([runs[0].job for runs in missing.values()], on_row)

    def done(self, run: CellRun) -> Done | None:
        """The result of a run with at least the requested rounds; None: to be run, as is a failed
        one. A model that diverged in these rounds is a result, as it would diverge again."""
        files = (Path(run.job.folder) / "rows").glob(f"{run.job.name}-*.json")
        rows = {int(file.stem.rpartition("-")[2]): read_row(file) for file in files}
        whole = [n for n, row in rows.items() if row["status"] != FAILED and n >= run.job.rounds]
        if whole:
            return Done(run, max(whole), rows[max(whole)])
        row = rows.get(run.job.rounds)
        return Done(run, run.job.rounds, row) if row and DIVERGED in row["reason"] else None

    def result(self, done: Done) -> dict[str, Any]:
        run = done.run
        return result(
            self.table.name, run.cell, run.seed, self.shown_changes, done.rounds, run.job, done.row
        )


def _check_shorter(run: CellRun) -> None:
    has = summary_of(run.job.path).get("rounds", 0)
    if has > run.job.rounds:
        raise ValueError(
            f"--rounds: {run.job.path} has {has} already; expected at least that, got "
            f"{run.job.rounds}"
        )
