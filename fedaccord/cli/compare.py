"""`fedaccord compare`: runs side by side in a terminal, and figures of them for papers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from fedaccord.cli.console import make_console, stop
from fedaccord.memory import uncollected

if TYPE_CHECKING:
    from fedaccord.analysis.groups import Group

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN_DIR...", help="Run directories, or folders that hold some."),
]
Target = Annotated[
    float | None,
    typer.Option(
        help="Test accuracy in [0, 1] (a loss for other targets) that costs are counted to; "
        "by default nine tenths of the best."
    ),
]


@uncollected()
def compare(
    runs: Runs,
    target: Target = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write figures as PDF and PNG.")
    ] = None,
) -> None:
    """Print runs side by side: accuracy, its spread over seeds, and what a target accuracy cost.

    Runs that differ in their seed alone are one row. docs/measures.md says what is counted:

    fedaccord compare ~/fedaccord-runs/first ~/fedaccord-runs/second --target 0.9

    fedaccord compare my-sweep --figures paper/figures
    """
    groups = read_groups(runs)
    if figures is not None:
        written = _figures(groups, figures.expanduser())
    from fedaccord.analysis.table import summary, text

    rows, _ = summary(groups, target)
    table = Table(box=SIMPLE)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("method", "runs") else "right")
    for row in rows:
        table.add_row(*map(text, row.values()))
    console = make_console()
    console.print(table)
    if figures is not None:
        console.print(f"figures: {len(written)} files in {figures.expanduser()}", soft_wrap=True)


def read_groups(runs: list[Path]) -> "list[Group]":
    """Ends the command, with one line, where that are no runs."""
    from fedaccord.analysis.groups import groups_of
    from fedaccord.runs import reader

    try:
        return groups_of([reader.read(run) for run in reader.find([r.expanduser() for r in runs])])
    except (ValueError, OSError) as error:
        stop(error, 2)


def _figures(groups: "list[Group]", folder: Path) -> list[Path]:
    try:
        from fedaccord.analysis import figures

        return figures.save(groups, folder)
    except ImportError as error:
        from fedaccord.analysis import INSTALL

        stop(f"{error}: figures need Matplotlib: {INSTALL}", 2)
    except OSError as error:
        stop(error, 2)
