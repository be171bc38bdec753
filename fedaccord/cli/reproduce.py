"""`fedaccord reproduce`: the papers' tables, run again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedaccord.cli.console import (
    check_output,
    make_console,
    print_progress,
    print_table,
    stop,
    warn,
)
from fedaccord.cli.settings import Pairs, read_settings
from fedaccord.cli.watch import made_folder, progress, resumable, rounds, watched
from fedaccord.federation.eta import Eta
from fedaccord.process import threads
from fedaccord.process.interrupts import interruptible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedaccord.experiments.reproduce import Cell, Study, Table
    from fedaccord.experiments.sweep.plan import SweepOptions

PAGE = "reproduction.md"


@interruptible()
def reproduce(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="A table of --list.")] = None,
    pairs: Pairs = None,
    cells: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only these cells, e.g. 'fedavg/*'."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: 0, 1, ...")] = 3,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; by default the paper's.")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=0, help="Number of processes; 0: one for each core, or one with a GPU."),
    ] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"The page of results, with a CSV file beside it; by default DIR/{PAGE}.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print cells, rounds and estimated hours, and exit.")
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="Print the tables, or the cells of TABLE, and exit.")
    ] = False,
) -> None:
    """Run the cells of a paper's table, and write our numbers beside the paper's.

    KEY=VALUE pairs, such as data-dir=/my/cifar10, apply to all cells; the page names those that
    change numbers, such as model=lenet. The same command, started again, resumes, also with more
    rounds or seeds. The page also lists the cells without runs. An example:

    fedaccord reproduce fedinit-table3 --cells 'beta=0*' --seeds 2 --out ~/reproduce
    """
    from fedaccord.experiments.reproduce import Study, find, tables
    from fedaccord.experiments.sweep.plan import SweepOptions

    console, folder = make_console(), out and out.expanduser().absolute()
    with resumable(None if list_all or dry_run else folder):
        if list_all and table is None:
            rows = [[t.name, str(len(t.cells)), t.title] for t in tables()]
            print_table(console, ["table", "cells", "what"], rows)
            return
        if table is None:
            raise ValueError("expected a TABLE, got none; `fedaccord reproduce --list` lists them")
        chosen = find(table).matching(cells or [])
        if list_all:
            _list(console, chosen)
            return
        changes = read_settings(pairs or [])
        study = Study.make(find(table), chosen, range(seeds), rounds, changes)
        for line in study.warnings():
            warn(line)
        threads.check(workers, "--workers")
        options = SweepOptions(workers=workers)
        if not study.table.is_run:
            _costs(console, study.table)
            return
        if dry_run:
            _show(console, study, options, folder)
            return
        if folder is None:
            raise ValueError("--out: expected a folder for the runs, got none")
        written = (page or folder / PAGE).expanduser().absolute()
        if written.suffix == ".csv":
            raise ValueError(
                f"--page: expected a Markdown file, beside which a CSV file is stored, got {page}"
            )
        with made_folder(folder):
            try:
                written.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                stop(f"--page: expected a folder for {written}, got none ({error.strerror})", 2)
            for file in (written, written.with_suffix(".csv")):
                check_output("--page", file)
            _run(console, study, options, folder, written)
    console.print(f"page: {written}\nruns: {folder}", soft_wrap=True)


def _list(console: Console, cells: "Sequence[Cell]") -> None:
    """The cells with the paper's numbers."""
    from fedaccord.experiments.reproduce.measures import NAMES

    more = [*dict.fromkeys(name for cell in cells for name in cell.more)]
    rows = []
    for cell in cells:
        accuracy = "" if cell.paper is None else f"{cell.paper:.2f}"
        others = (f"{cell.more[name]:g}" if name in cell.more else "" for name in more)
        rows.append([cell.name, str(cell.rounds), accuracy, *others])
    print_table(console, ["cell", "rounds", "paper", *(NAMES[name] for name in more)], rows)


def _costs(console: Console, table: "Table") -> None:
    """A table without runs: the paper's costs, and ours."""
    from fedaccord.experiments.reproduce.page import measures_of

    heading, *rows = measures_of(table)
    print_table(console, heading, [[row[0].strip("`"), *row[1:]] for row in rows])
    console.print(f"{table.title}. {table.setting}", soft_wrap=True)


def _run(
    console: Console, study: "Study", options: "SweepOptions", folder: Path, page: Path
) -> None:
    """Run the study; each finished run is printed and added to the page."""
    from fedaccord.experiments.reproduce import tables
    from fedaccord.experiments.reproduce.page import as_markdown
    from fedaccord.experiments.reproduce.results import merged, write
    from fedaccord.experiments.reproduce.study import Done
    from fedaccord.storage.files import replace

    csv, every, results = page.with_suffix(".csv"), tables(), []
    runs = study.runs(folder)
    lengths = {run.job.path: run.job.rounds for run in runs}  # two cells may be one run
    merged(csv, [])  # raises if the file is something else

    def count() -> int:
        return sum(min(number, rounds(path)) for path, number in lengths.items())

    left = Eta(count(), sum(lengths.values()))

    def on_done(done: Done) -> None:
        results.append(study.result(done))
        frame = merged(csv, results)
        write(csv, frame)
        replace(page, as_markdown(every, frame, csv.name).encode())
        result = results[-1]
        best = "no test accuracy" if result["best"] is None else f"best {result['best']:.2f}%"
        best = result["reason"] or best
        words = (f"seed {done.run.seed}", f"{done.rounds} rounds", best, left(count()))
        number = f"run {len(results)}/{len(runs)}"
        print_progress("  ".join((number, done.run.cell.name, *filter(None, words))))

    def on_rounds(number: int) -> None:
        if console.is_terminal:
            status.update(progress(number, left))
        else:
            print_progress(progress(number, left))

    with console.status(progress(left.begun, left)) as status, watched(console, count, on_rounds):
        study.perform(folder, options, on_done)
    reasons = [result["reason"] for result in results]
    if reasons and all(reasons):
        stop(f"none of {len(reasons)} runs was completed: {reasons[0]}", 1)


def _show(console: Console, study: "Study", options: "SweepOptions", folder: Path | None) -> None:
    from fedaccord.config import RunConfig
    from fedaccord.experiments.reproduce.estimate import Estimate, gradients

    runs = study.runs(folder or Path())
    rows, estimate = [], Estimate(study, options.workers)
    with console.status("timing a client of each model"):
        for cell in study.cells:
            own = [run for run in runs if run.cell is cell]
            rounds = study.rounds_of(cell)
            number = rounds * gradients(RunConfig.make(own[0].job.settings))
            alone = estimate.hours(own)
            hours = _hours(alone[0]) if alone else "–"
            rows.append([cell.name, str(len(own)), str(rounds), f"{number:,.0f}", hours])
        total = estimate.hours(runs)
    print_table(console, ["cell", "runs", "rounds", "gradients a run", "hours left"], rows)
    if total:
        left = f"about {_hours(total[0])} hours left with {total[1]}"
    else:
        task = RunConfig.make(runs[0].job.settings).task
        left = f"estimating the hours needs the data: add data-dir=, the folder of {task.dataset}"
        left += f", which is not in {task.data_dir}" if task.data_dir else ""
    console.print(f"{len(runs)} runs; {left}", soft_wrap=True)


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours > 10 else f"{hours:.2g}"
