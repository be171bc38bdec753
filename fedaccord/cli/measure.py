"""`fedaccord measure`: curvature, sharpness, fairness and risk of a run's model."""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedaccord.cli.console import make_console, refusing, stop
from fedaccord.cli.settings import Pairs, RunDir, read_place

FORMATS = (".png", ".pdf")

if TYPE_CHECKING:
    from fedaccord.experiments.analysis.measures import Options, Saved


def measure(
    run: RunDir,
    pairs: Pairs = None,
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
        Path | None, typer.Option(metavar="FILE", help="Draw the loss landscape, .png or .pdf.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the measures as JSON.")
    ] = None,
) -> None:
    """Measure the model of a run in process: Hessian, sharpness, accuracy by client, risk, duals.

    docs/measures.md has every formula. KEY=VALUE pairs replace the run's data-dir, device,
    download or threads:

    fedaccord measure ~/fedaccord-runs/first --landscape first.png

    fedaccord measure ~/fedaccord-runs/first --samples 0 --reference ~/fedaccord-runs/long
    """
    from fedaccord.experiments.analysis.measures import Options, Saved
    from fedaccord.experiments.analysis.measures import measure as measures
    from fedaccord.process import threads
    from fedaccord.storage.files import replace

    _check(landscape, out)
    options = Options(samples=samples, probes=probes, radius=radius)
    console, out = make_console(), out and out.expanduser()
    with refusing(ValueError, OSError):
        saved = Saved(run.expanduser(), read_place(pairs or []))
        chosen = threads.of_task(saved.config.threads, saved.task, saved.config.strategy)
        with chosen.in_use(), console.status("measuring"):
            values = [*measures(saved, options, reference and reference.expanduser())]
            if landscape is not None:
                _draw(saved, options, landscape.expanduser())
        if out is not None:
            numbers = {m.name: m.value if math.isfinite(m.value) else None for m in values}
            replace(out, json.dumps(numbers, indent=2).encode())
    table = Table.grid(padding=(0, 2))
    for each in values:
        table.add_row(each.name, f"{each.value:.6g}", each.note)
    console.print(table)


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


def _draw(saved: "Saved", options: "Options", file: Path) -> None:
    from fedaccord.experiments.analysis import figures
    from fedaccord.experiments.analysis.measures import landscape

    at, losses = landscape(saved, options)
    figures.save_landscape(file, at, losses.numpy())
