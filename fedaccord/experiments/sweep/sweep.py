"""A sweep, new or resumed: tune on validation samples, test the winners."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fedaccord.experiments.analysis.costs import with_costs
from fedaccord.experiments.analysis.groups import TEST, TRIALS, TUNE, Group
from fedaccord.experiments.sweep import space, workers
from fedaccord.experiments.sweep.plan import Plan
from fedaccord.experiments.sweep.search import Ask, budget, ranked, search
from fedaccord.experiments.sweep.table import (
    Trial,
    Winner,
    at_edges,
    costs_table,
    trials_table,
    winners_table,
)
from fedaccord.experiments.sweep.trial import (
    COMPLETED,
    FAILED,
    ROWS,
    WINNERS,
    Job,
    Records,
    Row,
    Workers,
    check_data,
    check_measured,
    check_names,
    check_run,
    forget_checkpoints,
    forget_failures,
    mean,
    row_of,
    write_records,
)
from fedaccord.runs import reader
from fedaccord.runs.lock import Lock
from fedaccord.storage.files import replace, unfinished


class Step(NamedTuple):
    """A trial that has reached a budget."""

    job: Job
    row: Row
    rounds: int  # rounds since its last rung
    is_earlier: bool  # completed by an earlier start


OnStep = Callable[[Step], None]


class Sweep:
    """A plan that runs in ``folder``; see `run`."""

    def __init__(self, plan: Plan, folder: Path, on_step: OnStep) -> None:
        self.plan, self.folder, self.on_step = plan, folder, on_step
        self.trials: dict[tuple[str, int], Trial] = {}  # by configuration and seed
        self.warnings: list[str] = []  # after `run`
        self.records: Records = {}  # written before the first trial
        self.reported: dict[str, int] = {}  # rounds of the jobs that `on_step` knows of, by name

    def run(self) -> pd.DataFrame:
        """The table of the winners. Raises ValueError if another process runs the sweep, if the
        folder has a sweep of other settings, or if no trial has the metric."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with Lock(self.folder):
            for folder in (self.folder, self.folder / ROWS):
                for file in unfinished(folder):
                    file.unlink()
            plan = self.plan = self.plan.at(self.folder)
            points = ((m, point) for m in plan.methods for point in space.corners(plan.of(m)))
            corners = starmap(plan.configuration, points)
            self.records = check_names(self.folder, corners) | check_run(self.folder, plan)
            forget_failures(self.folder)
            return self._run()

    def _run(self) -> pd.DataFrame:
        winners = self._asha() if self.plan.options.search == "asha" and self.plan.tunes else None
        with workers.of(self.plan.options) as work:
            winners = winners or self._tune(work)
            for trial in self.trials.values():  # also of those that were stopped at a rung
                ask = Ask(trial.configuration, trial.rounds)
                forget_checkpoints(self._job(ask, trial.seed))
            lost = self._without_score(winners)
            tested = [self.plan.tested(winner.configuration) for winner in winners]
            asks = [Ask(configuration, configuration.rounds) for configuration in tested]
            self._do(work, asks, self.plan.test_seeds, TEST)
        tests = [trial for trial in self.trials.values() if trial.stage == TEST]
        self._check_completed(tests)
        self.warnings = lost
        options, runs = self.plan.options, [*map(self._test_runs, winners)]
        table = winners_table(winners, tests, options.metric)
        table = table.join(costs_table(runs, options.metric, options.target), on="trial")
        self.warnings += self._at_edges(winners)
        self._write(WINNERS, table.to_csv(index=False))
        return table

    def _check_completed(self, trials: Sequence[Trial]) -> None:
        """Raises ValueError, with the first reason, if all of them failed."""
        if all(trial.status == FAILED for trial in trials):
            reasons = (str(trial.row.get("reason", "")) for trial in trials)
            raise ValueError(
                f"none of {len(trials)} runs was completed: {next(filter(None, reasons), '')}"
            )

    def _without_score(self, winners: Sequence[Winner]) -> list[str]:
        """Warnings about tuned methods without a score. Raises ValueError if none has one."""
        if not self.plan.tunes:
            return []
        self._check_completed([*self.trials.values()])
        lost = [each.configuration.algo for each in winners if math.isnan(each.score)]
        why = f"no trial has {self.plan.options.metric}: see status and numbers in table.csv"
        if len(lost) == len(winners):
            raise ValueError(f"[sweep] metric: {why}; use a metric that these runs measure")
        return [f"{algo}: {why}; its values were not chosen" for algo in lost]

    def _tune(self, work: Workers) -> list[Winner]:
        """The winner of each method; every configuration if there is nothing to choose."""
        if not self.plan.tunes:
            every = [c for m in self.plan.methods for c in self.plan.configurations(m)]
            return [Winner(self.plan.tested(c), math.nan, 1) for c in every]
        searches = {method: search(self.plan, method) for method in self.plan.methods}
        batches = {method: next(proposals) for method, proposals in searches.items()}
        winners = {}
        while batches:
            self._do(work, [ask for asks in batches.values() for ask in asks], self.plan.seeds)
            scores = {m: [*map(self._score, asks)] for m, asks in batches.items()}
            for method, values in scores.items():
                try:
                    batches[method] = searches[method].send(values)
                except StopIteration as end:
                    del batches[method]
                    winners[method] = self._best(end.value)
        return [winners[method] for method in self.plan.methods]

    def _best(self, asks: Sequence[Ask]) -> Winner:
        every = (trial.configuration for trial in self.trials.values())
        tried = {c.name for c in every if c.algo == asks[0].configuration.algo}
        best = ranked(asks, [*map(self._score, asks)])[0]
        return Winner(best, self._score(Ask(best, best.rounds)), len(tried))

    def _test_runs(self, winner: Winner) -> Group:
        """A winner's completed tests, from their run directories."""
        tested, runs = self.plan.tested(winner.configuration), []
        for seed in self.plan.test_seeds:
            if self.trials[tested.name, seed].status == COMPLETED:
                try:
                    runs.append(reader.read(self._job(Ask(tested, tested.rounds), seed).path))
                except ValueError as error:  # it was removed or damaged: its row stays
                    self.warnings.append(f"{error}; its costs are not in winners.csv")
        tables = [*map(with_costs, runs)]
        return Group(winner.configuration.name, runs, winner.configuration.settings, tables, [])

    def _at_edges(self, winners: Sequence[Winner]) -> list[str]:
        tuned = [trial.configuration for trial in self.trials.values() if trial.stage == TUNE]
        best = [winner.configuration for winner in winners]
        tried = {each.algo: [c.point for c in tuned if c.algo == each.algo] for each in best}
        return [line for each in best for line in at_edges(each, tried[each.algo])]

    def _do(
        self, work: Workers, asks: Sequence[Ask], seeds: Iterable[int], stage: str = TUNE
    ) -> None:
        """Run the missing jobs; afterwards `trials` has all, in the order of requests."""
        proposed = [(ask, seed, self._job(ask, seed)) for ask in asks for seed in seeds]
        jobs = {job.name: job for _, _, job in proposed}  # once each, even if proposed twice
        rows = {name: row for name, job in jobs.items() if (row := row_of(job)) is not None}
        before = self.trials
        for name in rows:
            self._report(jobs[name], rows[name], is_earlier=True)

        def on_row(job: Job, row: Row) -> None:
            rows[job.name] = row
            self._report(job, row)
            keep()

        def keep() -> None:
            self.trials = before | {
                (ask.configuration.name, seed): Trial(
                    ask.configuration, seed, stage, ask.rounds, rows[job.name]
                )
                for ask, seed, job in proposed
                if job.name in rows
            }
            self._write(TRIALS, trials_table([*self.trials.values()]).to_csv(index=False))

        missing = [job for name, job in jobs.items() if name not in rows]
        # optuna's search continues after a point that cannot run: it is a failed trial
        if not before and not rows and self.plan.options.search != "optuna":
            check_data(missing, self.plan.options)
        write_records(self.folder, self.records)
        work(missing, on_row)
        keep()

    def _report(self, job: Job, row: Row, is_earlier: bool = False) -> None:
        """Each rung of a trial once."""
        check_measured(job, row)
        before = self.reported.get(job.name, 0)
        if job.rounds > before:
            self.reported[job.name] = job.rounds
            self.on_step(Step(job, row, job.rounds - before, is_earlier))

    def _job(self, ask: Ask, seed: int) -> Job:
        return Job.of(self.folder, ask.configuration, seed, ask.rounds, self.plan.options.metric)

    def _score(self, ask: Ask) -> float:
        rows = [self.trials[ask.configuration.name, seed].row for seed in self.plan.seeds]
        return mean(rows, self.plan.options.metric)

    def _asha(self) -> list[Winner]:
        from fedaccord.experiments.sweep.on_ray import asha

        options = self.plan.options
        budgets = [*reversed(range(options.rungs))]
        rungs = {
            method: [
                [Ask(c, budget(c.rounds, options.eta, below)) for below in budgets]
                for c in self.plan.configurations(method)
            ]
            for method in self.plan.methods
        }
        ladders = [[list(map(self._jobs, asks)) for asks in each] for each in rungs.values()]
        write_records(self.folder, self.records)
        asha(options, ladders, self._report)
        winners = []
        for each in rungs.values():
            complete = [[ask for ask in asks if all(map(row_of, self._jobs(ask)))] for asks in each]
            self._do(lambda *_: None, [ask for asks in complete for ask in asks], self.plan.seeds)
            last = [asks[-1] for asks in complete if asks]
            if not last:  # no run of this method left a row
                raise ValueError(
                    f"{each[0][0].configuration.algo}: none of its runs completed: their "
                    "processes ended, perhaps for lack of memory, or could not use their files"
                )
            longest = max(ask.rounds for ask in last)
            winners.append(self._best([ask for ask in last if ask.rounds == longest]))
        return winners

    def _jobs(self, ask: Ask) -> list[Job]:
        return [self._job(ask, seed) for seed in self.plan.seeds]

    def _write(self, name: str, text: str) -> None:
        replace(self.folder / name, text.encode())
