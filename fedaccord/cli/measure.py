"""`fedaccord measure`: curvature, sharpness, fairness and risk of the models of runs."""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedaccord.cli.compare import note_left_out, read_groups, rows_of_untrained_parts
from fedaccord.cli.console import (
    check_output,
    make_console,
    print_table,
    refusing,
    stop,
    warn,
)
from fedaccord.cli.settings import read_place, unread_typed

FORMATS = (".png", ".pdf")

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedaccord.experiments.analysis.groups import Group
    from fedaccord.experiments.analysis.measures import Landscape, Measure, MeasureOptions
    from fedaccord.runs.reader import StoredRun


def measure(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR... [KEY=VALUE...]",
            help="Run directories, or folders with some; then settings, e.g. device=cuda.",
        ),
    ],
    samples: Annotated[
        int,
        typer.Option(min=0, help="Number of training samples for curvature and landscape; 0: all."),
    ] = 2000,
    probes: Annotated[
        int, typer.Option(min=1, help="Number of random vectors for the trace of the Hessian.")
    ] = 20,
    radius: Annotated[
        float, typer.Option(min=0, help="L2 radius at which sharpness is measured.")
    ] = 0.05,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="A longer run, whose train loss counts as the smallest possible one.",
        ),
    ] = None,
    landscape: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the loss landscape, .png or .pdf; of several runs that of the first seed of "
            "each row, on one scale.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the measures of one run as JSON.")
    ] = None,
) -> None:
    """Measure the models of runs in process: Hessian, sharpness, accuracy by client, risk, duals.

    docs/measures.md has every formula. Several runs are rows as in `fedaccord compare`, and each of
    them gets a measures.json. KEY=VALUE pairs replace the runs' data-dir, device, download or
    threads:

    fedaccord measure ~/fedaccord-runs/first --landscape first.png

    fedaccord measure ~/fedaccord-runs/first --samples 0 --reference ~/fedaccord-runs/long

    fedaccord measure my-sweep --landscape surfaces.png
    """
    from fedaccord.experiments.analysis.figures import save_landscapes
    from fedaccord.experiments.analysis.measures import FILE, MeasureOptions

    if not math.isfinite(radius):
        stop(f"--radius: expected a finite number, got {radius}", 2)
    _check(landscape, out)
    options = MeasureOptions(samples=samples, probes=probes, radius=radius)
    console, reference = make_console(), reference and reference.expanduser()
    by_run: dict[Path, list[Measure]] = {}
    unread: dict[str, None] = {}  # lines, once each
    drawn: dict[str, Landscape] = {}
    with refusing(ValueError, OSError):
        runs, pairs = _parted(words)
        place, (groups, is_one) = read_place(pairs), _chosen(runs, out)
        every = [(group.label, run) for group in groups for run in group.runs]
        for number, (label, run) in enumerate(every, 1):
            is_drawn = landscape is not None and label not in drawn
            with console.status(f"measuring run {number} of {len(every)}: {run.path.name}"):
                try:
                    values, surface, lines = _measured(
                        run.path, place, options, reference, is_drawn
                    )
                except ValueError as error:
                    if is_one:
                        raise
                    warn(f"left out: {run.path.name}: {error}")
                    continue
            by_run[run.path] = values
            unread |= dict.fromkeys(lines)
            drawn |= {label: surface} if surface else {}
            if not is_one:
                try:
                    _write(run.path / FILE, values)
                except OSError as error:  # the table is printed nevertheless
                    warn(f"not written: {error}")
        for line in unread:
            warn(line)
        if not by_run:
            raise ValueError("no run is left to measure")
    if is_one:
        table = Table.grid(padding=(0, 2))
        for each in values:
            table.add_row(each.name, f"{each.value:.6g}", each.note)
        console.print(table)
        if out is not None:
            with refusing(OSError):
                _write(out.expanduser(), values)
    else:
        print_table(console, *_rows(groups, by_run))
        rough = [m.name for values in by_run.values() for m in values if not m.is_exact]
        for name in dict.fromkeys(rough):
            warn(
                f"{name} of {rough.count(name)} of {len(by_run)} runs is not converged; `fedaccord "
                "measure` of one run prints its residual"
            )
    if rows := rows_of_untrained_parts(groups, "test-loss"):
        warn(
            f"{rows}: all measures except dual-drift and dual-mean are of w with the local parts "
            "from before round 1"
        )
    if landscape is not None:
        with refusing(ValueError, OSError):
            save_landscapes(landscape.expanduser(), drawn)


def _chosen(runs: list[Path], out: Path | None) -> "tuple[list[Group], bool]":
    """(the groups to be measured, whether a single run was given). Of several runs the completed
    ones with a model that `fedaccord compare` compares; a line for each other one."""
    from fedaccord.experiments.analysis.groups import tested
    from fedaccord.runs.directory import COMPLETED, MODEL

    def is_measurable(run: "StoredRun") -> bool:
        return run.summary["status"] == COMPLETED and (run.path / MODEL).is_file()

    groups = read_groups(runs)
    every_run = [run for group in groups for run in group.runs]
    if len(every_run) == 1:
        if (status := every_run[0].summary["status"]) != COMPLETED:
            warn(f"{every_run[0].path} is {status}: the model is from an earlier round")
        return groups, True
    if out is not None:
        raise ValueError(
            f"--out: expected one run, got {len(every_run)}; each of them gets a measures.json: "
            "leave it out"
        )
    compared = tested(groups)
    note_left_out(groups, compared)
    measurable = []
    for group in compared:
        for run in group.runs:
            if not is_measurable(run):
                status = run.summary["status"]
                warn(f"left out: {run.path}: expected a completed run with {MODEL}; it is {status}")
        if usable := [*filter(is_measurable, group.runs)]:
            measurable.append(group._replace(runs=usable))
    if not measurable:
        raise ValueError(f"expected completed runs with {MODEL}, got none; resume them first")
    return measurable, False


def _measured(
    path: Path,
    place: "Mapping[str, Any]",
    options: "MeasureOptions",
    reference: Path | None,
    is_drawn: bool,
) -> "tuple[list[Measure], Landscape | None, list[str]]":
    """The measures, the landscape, and a line for each setting in ``place`` without effect."""
    from fedaccord.experiments.analysis.measures import Saved, landscape
    from fedaccord.experiments.analysis.measures import measure as measures
    from fedaccord.task.multiplications import threads_of_task

    saved = Saved(path, place)
    with threads_of_task(saved.config.threads, saved.task, saved.config.strategy).in_use():
        values = [*measures(saved, options, reference)]
        surface = landscape(saved, options) if is_drawn else None
    return values, surface, unread_typed(saved.config, place)


def _parted(words: "Sequence[str]") -> tuple[list[Path], list[str]]:
    """(run directories, KEY=VALUE pairs): the name of a folder may have an equals sign."""
    is_pair = ["=" in word and not Path(word).expanduser().exists() for word in words]
    pairs = [word for word, is_it in zip(words, is_pair, strict=True) if is_it]
    if "" in words:
        stop("expected a path, got an empty one", 2)
    runs = [Path(word) for word, is_it in zip(words, is_pair, strict=True) if not is_it]
    if not runs:
        stop(f"expected a run directory, got {words[0]!r}", 2)
    return runs, pairs


def _check(landscape: Path | None, out: Path | None) -> None:
    """End the command, before it measures, if its files cannot be written."""
    for option, file in (("--landscape", landscape), ("--out", out)):
        if file is not None:
            check_output(option, file)
    if landscape is not None:
        import_module("matplotlib")
    if landscape is not None and landscape.suffix not in FORMATS:
        endings = " or ".join(FORMATS)
        stop(f"--landscape: expected a file that ends in {endings}, got {landscape.name!r}", 2)


def _write(file: Path, values: "Sequence[Measure]") -> None:
    from fedaccord.storage.files import replace

    numbers = {m.name: m.value if math.isfinite(m.value) else None for m in values}
    replace(file, json.dumps(numbers, indent=2).encode())


def _rows(
    groups: "Sequence[Group]", by_run: "Mapping[Path, Sequence[Measure]]"
) -> tuple[list[str], list[list[str]]]:
    """(the heading, a row a group): means over its runs ± their standard deviation."""
    from fedaccord.experiments.analysis.ranking import Spread
    from fedaccord.experiments.analysis.table import text

    names = [*dict.fromkeys(each.name for values in by_run.values() for each in values)]
    rows = []
    for group in groups:
        each = [
            {m.name: m.value for m in by_run[run.path]} for run in group.runs if run.path in by_run
        ]
        spreads = [Spread.of([own.get(name, math.nan) for own in each]) for name in names]
        rows += [[group.label, str(len(each)), *map(text, spreads)]] if each else []
    return ["method", "runs", *names], rows
