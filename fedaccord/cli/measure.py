"""`fedaccord measure`: curvature, sharpness, fairness and risk of the models of runs."""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedaccord.cli.compare import read_groups
from fedaccord.cli.console import make_console, print_table, refusing, stop, warn
from fedaccord.cli.settings import read_place

FORMATS = (".png", ".pdf")

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedaccord.experiments.analysis.groups import Group
    from fedaccord.experiments.analysis.measures import Landscape, Measure
    from fedaccord.runs.reader import Run


def measure(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR... [KEY=VALUE...]",
            help="Run directories, or folders that hold some; then settings, as device=cuda.",
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
    from fedaccord.experiments.analysis.groups import tested
    from fedaccord.experiments.analysis.measures import FILE, Options, Saved
    from fedaccord.experiments.analysis.measures import landscape as landscape_of
    from fedaccord.experiments.analysis.measures import measure as measures
    from fedaccord.process import threads

    _check(landscape, out)
    runs, pairs = _parted(words)
    options = Options(samples=samples, probes=probes, radius=radius)
    console, reference = make_console(), reference and reference.expanduser()
    found: dict[Path, list[Measure]] = {}
    drawn: dict[str, Landscape] = {}
    with refusing(ValueError, OSError):
        place = read_place(pairs)
        groups = _measurable(tested(read_groups(runs)))
        every = [(group, run) for group in groups for run in group.runs]
        if len(every) > 1 and out is not None:
            raise ValueError(
                f"--out: expected one run, got {len(every)}; each of them gets a {FILE}: leave it "
                "out"
            )
        for number, (group, run) in enumerate(every, 1):
            saved = Saved(run.path, place)
            chosen = threads.of_task(saved.config.threads, saved.task, saved.config.strategy)
            status = console.status(f"measuring run {number} of {len(every)}: {run.path.name}")
            with chosen.in_use(), status:
                found[run.path] = [*measures(saved, options, reference)]
                if landscape is not None and run is group.runs[0]:
                    drawn[group.label] = landscape_of(saved, options)
            if file := out.expanduser() if out else run.path / FILE if len(every) > 1 else None:
                _write(file, found[run.path])
        if landscape is not None:
            from fedaccord.experiments.analysis.figures import save_landscapes

            save_landscapes(landscape.expanduser(), drawn)
    if len(every) > 1:
        print_table(console, *_rows(groups, found))
        return
    table = Table.grid(padding=(0, 2))
    for each in found[every[0][1].path]:
        table.add_row(each.name, f"{each.value:.6g}", each.note)
    console.print(table)


def _parted(words: "Sequence[str]") -> tuple[list[Path], list[str]]:
    """(run directories, KEY=VALUE pairs): the name of a folder may have an equals sign."""
    is_pair = ["=" in word and not Path(word).expanduser().exists() for word in words]
    pairs = [word for word, is_it in zip(words, is_pair, strict=True) if is_it]
    runs = [Path(word) for word, is_it in zip(words, is_pair, strict=True) if not is_it]
    if not runs:
        stop(f"expected a run directory, got {words[0]!r}", 2)
    return runs, pairs


def _measurable(groups: "Sequence[Group]") -> "list[Group]":
    """Their completed runs with a model, with a warning for each other one; a single run itself."""
    from fedaccord.runs.directory import COMPLETED, MODEL

    def is_measurable(run: "Run") -> bool:
        return run.summary["status"] == COMPLETED and (run.path / MODEL).is_file()

    every, found = [run for group in groups for run in group.runs], []
    if len(every) == 1:
        return [*groups]
    for group in groups:
        if kept := [*filter(is_measurable, group.runs)]:
            found.append(group._replace(runs=kept))
    for run in every:
        if not is_measurable(run):
            status = run.summary["status"]
            warn(f"left out: {run.path}: expected a completed run with {MODEL}; it is {status}")
    if not found:
        raise ValueError(f"expected completed runs with {MODEL}, got none; resume them first")
    return found


def _check(landscape: Path | None, out: Path | None) -> None:
    """End the command, before it measures, if its files cannot be written."""
    if landscape is not None:
        import_module("matplotlib")
    if landscape is not None and landscape.suffix not in FORMATS:
        endings = " or ".join(FORMATS)
        stop(f"--landscape: expected a file that ends in {endings}, got {landscape.name!r}", 2)
    for option, file in (("--landscape", landscape), ("--out", out)):
        if file is not None and not file.expanduser().absolute().parent.is_dir():
            stop(f"{option}: expected a file in an existing folder, got {file}", 2)


def _write(file: Path, values: "Sequence[Measure]") -> None:
    from fedaccord.storage.files import replace

    numbers = {m.name: m.value if math.isfinite(m.value) else None for m in values}
    replace(file, json.dumps(numbers, indent=2).encode())


def _rows(
    groups: "Sequence[Group]", found: "Mapping[Path, Sequence[Measure]]"
) -> tuple[list[str], list[list[str]]]:
    """(the heading, a row a group): means over its runs ± their standard deviation."""
    from fedaccord.experiments.analysis.ranking import Spread
    from fedaccord.experiments.analysis.table import text

    names = [*dict.fromkeys(each.name for values in found.values() for each in values)]
    rows = []
    for group in groups:
        each = [{m.name: m.value for m in found[run.path]} for run in group.runs]
        spreads = [Spread.of([own.get(name, math.nan) for own in each]) for name in names]
        rows.append([group.label, *map(text, spreads)])
    return ["method", *names], rows
