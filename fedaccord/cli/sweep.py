"""`fedaccord sweep`: many runs, defined by a file."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedaccord.cli.console import make_console, print_progress, print_table, warn
from fedaccord.cli.progress import make_bar
from fedaccord.cli.settings import Force, Pairs, make_absolute, read_settings, read_toml
from fedaccord.cli.watch import made_folder, progress, resumable, rounds, watched
from fedaccord.federation.eta import Eta
from fedaccord.process.interrupts import interruptible

if TYPE_CHECKING:
    from fedaccord.experiments.sweep import Plan, Step
    from fedaccord.experiments.sweep.trial import Job


@interruptible()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.TOML", help="The sweep's file.")],
    pairs: Pairs = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the tables and the runs."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print trials, budget and estimated time, and exit."),
    ] = False,
    force: Force = False,
) -> None:
    """Run many configurations, choose the best of each method on held-out training samples, and
    compare the best ones on the test samples. The same command, started again, resumes.

    A file such as:

        [sweep]
        search = "grid"        # or random, halving, optuna, asha
        seeds = [0, 1]

        [run]                  # run-config keys for all
        dataset = "digits"
        num-server-rounds = 30

        [space]                # lists, or ranges { low = 0.01, high = 0.3, log = true }
        algo = ["fedavg", "fedinit", "scaffold"]
        lr = [0.05, 0.1]

    gives DIR/table.csv with a row for each trial, DIR/winners.csv with a row for each method, and
    the run directories in DIR/runs. KEY=VALUE pairs replace keys of [run]:

    fedaccord sweep sweep.toml --out ~/sweeps/first

    fedaccord sweep sweep.toml num-server-rounds=100 --out ~/sweeps/longer
    """
    from fedaccord.experiments.sweep import Plan, Sweep
    from fedaccord.experiments.sweep.table import as_text
    from fedaccord.runs import lock

    console, folder = make_console(), out and out.expanduser().absolute()
    with resumable(None if dry_run else folder):
        plan = Plan.make(_content(file, pairs or []))
        plan = plan.at(folder) if folder else plan
        for line in plan.warnings():
            warn(line)
        if dry_run:
            _show(console, plan, folder)
            return
        if folder is None:
            raise ValueError("--out: expected a folder for the tables and the runs, got none")
        runs = folder / "runs"
        display = Display(console, plan, begun=rounds_of(plan, runs))
        if force:
            for each in (folder, *runs.glob("*")):
                lock.force(each)
        looking = watched(console, partial(rounds_of, plan, runs), display.look)
        with made_folder(folder), display.bar, looking:
            running = Sweep(plan, folder, display.on_step)
            table = running.run()
    print_table(console, *as_text(table))
    for line in running.warnings:
        warn(line)
    console.print(f"tables and runs: {folder}", soft_wrap=True)


def _content(file: Path, pairs: Sequence[str]) -> dict[str, Any]:
    """The file, with absolute paths and these settings. Raises ValueError if it cannot be read."""
    from fedaccord.runs import flatten

    content, settings = read_toml(file), read_settings(pairs)
    run, space = content.get("run", {}), content.get("space", {})
    if isinstance(space, Mapping) and (both := [key for key in settings if key in space]):
        raise ValueError(
            f"{both[0]}: expected keys that [space] of {file} does not vary, got {both[0]}="
            f"{settings[both[0]]}; change the file"
        )
    if isinstance(run, Mapping):
        run = flatten(run)
        make_absolute(run)
        content["run"] = run | settings
    return content


def rounds_of(plan: "Plan", runs: Path) -> int:
    """Rounds of the plan's runs in a folder that may have other runs, too; of all runs of its
    methods if the search proposes trials one after another."""
    names = plan.run_names
    own = (
        run
        for run in runs.glob("*")
        if (run.name in names if names else run.name.rsplit("-", 2)[0] in plan.methods)
    )
    return sum(map(rounds, own))


class Display:
    """Show a sweep: on a terminal by a bar, else by a line a trial."""

    def __init__(self, console: Console, plan: "Plan", begun: int = 0) -> None:
        """begun: rounds in the folder before this start."""
        from fedaccord.experiments.sweep.estimate import parts

        self.plan, self.done, self.best = plan, 0, ""
        self.stage, self.score = ("", 0), -math.inf  # scores among which the best is chosen
        self.values: dict[tuple[str, str, int], list[float]] = {}  # of a trial, by seed
        adaptive = plan.options.search == "asha" and plan.tunes  # unknown number of runs
        self.of = "" if adaptive else f"/{sum(part.runs for part in parts(plan))}"
        self.bar = make_bar(console)
        rounds = sum(part.rounds for part in parts(plan))
        self.rounds, self.left = 0, Eta(begun, rounds)
        self.task = self.bar.add_task("", total=rounds, text="")

    def on_step(self, step: "Step") -> None:
        """A trial has reached a budget."""
        from fedaccord.experiments.sweep.table import written
        from fedaccord.experiments.sweep.trial import COMPLETED, column, sign

        self.done += 1
        self.rounds += step.rounds
        if step.is_earlier:  # a failed trial counts with all its rounds
            self.left.begun += max(0, step.job.rounds - rounds(step.job.path))
        metric = self.plan.options.metric
        split = "validation" if step.job.settings["validation"] else "test"
        value = step.row.get(column(metric, split))
        text = "no value" if value is None else written(metric, value)
        failed = value is None or step.row["status"] != COMPLETED
        self._rank(step.job, split, -math.inf if failed else sign(metric) * float(value or 0))
        number = f"run {self.done}{self.of}"
        self.bar.update(self.task, description=number, text=self.best)
        reached = self._advance(self.rounds)
        if self.bar.disable and not step.is_earlier:
            shown = text if value is None else f"{split}-{metric} {text}"
            ended = step.row.get("reason") or self.best
            words = (f"round {step.job.rounds}", shown, ended, self.left(reached))
            trial = f"{self._trial(step.job)} seed={step.job.settings['seed']}"
            print_progress("  ".join((number, trial, *filter(None, words))))

    def _rank(self, job: "Job", split: str, score: float) -> None:
        """The best trial is that of the best mean over all seeds, at the same budget."""
        from fedaccord.experiments.sweep.plan import LADDERS
        from fedaccord.experiments.sweep.table import written
        from fedaccord.experiments.sweep.trial import sign

        seeds = self.plan.seeds if split == "validation" else self.plan.test_seeds
        trial = job.name.rpartition("-seed")[0]
        values = self.values.setdefault((split, trial, job.rounds), [])
        values.append(score)
        if split == "test" and self.stage[0] != split:
            self.best = ""  # of the validation samples
        if len(values) < len(seeds):
            return
        stage = (split, job.rounds if self.plan.options.search in LADDERS else 0)
        if split == self.stage[0] and stage < self.stage:
            return
        if stage != self.stage:  # scores of tests and tuning, or of two rungs, are not comparable
            self.stage, self.score = stage, -math.inf
        mean = fmean(values)
        if mean > self.score:
            metric = self.plan.options.metric
            of = f", mean of {len(seeds)} seeds" if len(seeds) > 1 else ""
            text = written(metric, sign(metric) * mean)
            self.score, self.best = mean, f"best {text} ({self._trial(job)}{of})"

    def look(self, rounds: int) -> None:
        """Show the rounds of all trials, the running ones included."""
        rounds = self._advance(rounds)
        if self.bar.disable:
            print_progress(progress(rounds, self.left))

    def _advance(self, rounds: int) -> int:
        """The bar never moves back; a failed trial counts with all its rounds."""
        shown = max(rounds, self.rounds, round(self.bar.tasks[self.task].completed))
        self.bar.update(self.task, completed=shown)
        return shown

    def _trial(self, job: "Job") -> str:
        """Its method and its choices."""
        from fedaccord.experiments.sweep.table import short

        algo = job.settings["algo"]
        chosen = {key: job.settings[key] for key in self.plan.of(algo)}
        words = (f"{key}={short(value)}" for key, value in chosen.items())
        return " ".join([algo, *words])


def _show(console: Console, plan: "Plan", folder: Path | None) -> None:
    """folder: of runs that are not run again."""
    from fedaccord.experiments.sweep.estimate import Part, estimate, parts

    plan_parts = parts(plan)
    heading = [name.replace("_", " ") for name in Part._fields]
    print_table(console, heading, [[*map(str, part)] for part in plan_parts])
    runs, rounds = sum(part.runs for part in plan_parts), sum(part.rounds for part in plan_parts)
    done = min(rounds_of(plan, folder / "runs"), rounds) if folder else 0
    with console.status("timing three rounds"):
        time_left = (
            estimate(plan, plan_parts, 1 - done / rounds) if done < rounds else "none is left"
        )
    here = f", {done} of them in {folder}" if done else ""
    console.print(f"{runs} runs, {rounds} rounds{here}; {time_left}", soft_wrap=True)
