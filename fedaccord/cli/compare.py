"""`fedaccord compare`: runs side by side, as a table in several formats, and figures of them."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaccord.cli.console import make_console, print_table, printable, stop, warn
from fedaccord.process.allocator import uncollected

if TYPE_CHECKING:
    from fedaccord.experiments.analysis.groups import Group
    from fedaccord.experiments.analysis.table import Summary

LINES = 5  # runs that are left out and named
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


class Format(StrEnum):
    """What a comparison is printed as."""

    TABLE = "table"
    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"
    JSON = "json"


@uncollected()
def compare(
    runs: Runs,
    target: Target = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write figures as PDF and PNG.")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="csv and json have plain numbers, not rounded.")
    ] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print runs side by side: accuracy, its spread over seeds, and what a target accuracy cost.

    Runs that differ in their seed alone are one row; a seed counts once. The best row comes
    first. docs/measures.md says what is counted:

    fedaccord compare ~/fedaccord-runs/first ~/fedaccord-runs/second --target 0.9

    fedaccord compare my-sweep --figures paper/figures --format latex
    """
    groups = read_groups(runs)
    written = [] if figures is None else _figures(groups, figures.expanduser())
    from fedaccord.experiments.analysis.table import summary

    found = summary(groups, target)
    console = make_console()
    form = Format.JSON if as_json else form
    if form is Format.TABLE:
        texts = found.texts()
        print_table(console, [*texts], texts.to_numpy().tolist())
        if figures is not None:
            line = f"figures: {len(written)} files in {figures.expanduser()}"
            console.print(line, soft_wrap=True)
    else:
        typer.echo(printable(_formatted(found, form)), nl=False)


def _formatted(found: "Summary", form: Format) -> str:
    texts, numbers = found.texts(), found.numbers()
    if form is Format.MARKDOWN:
        rows = [[*texts], ["---"] * len(texts.columns), *texts.to_numpy().tolist()]
        cells = ([cell.replace("|", "\\|") for cell in map(str, row)] for row in rows)
        return "".join(f"| {' | '.join(row)} |\n" for row in cells)
    if form is Format.LATEX:
        style = texts.style.hide(axis="index").format(escape="latex")
        return str(style.format_index(escape="latex", axis=1).to_latex(hrules=True))
    if form is Format.JSON:
        return numbers.to_json(orient="records", indent=2, double_precision=15) + "\n"
    numbers["seeds"] = [" ".join(map(str, seeds)) for seeds in numbers["seeds"]]
    return numbers.to_csv(index=False)


def read_groups(runs: list[Path]) -> "list[Group]":
    """Ends the command, with one line, where that are no runs; warns of those left out."""
    from fedaccord.experiments.analysis.groups import groups_of
    from fedaccord.runs import reader

    try:
        found, lines = reader.read_all(run.expanduser() for run in runs)
    except (ValueError, OSError) as error:
        stop(error, 2)
    for line in lines[:LINES]:
        warn(f"left out: {line}")
    if len(lines) > LINES:
        warn(f"{len(lines) - LINES} more that cannot be read are left out")
    groups = groups_of(found)
    if repeats := sum(len(group.repeats) for group in groups):
        warn(
            f"{repeats} of {len(found)} runs repeat the settings and the seed of another run: "
            "they are marked and not counted"
        )
    return groups


def _figures(groups: "list[Group]", folder: Path) -> list[Path]:
    try:
        from fedaccord.experiments.analysis import figures

        return figures.save(groups, folder)
    except ImportError as error:
        from fedaccord.experiments.analysis import INSTALL

        stop(f"{error}: figures need Matplotlib: {INSTALL}", 2)
    except OSError as error:
        stop(error, 2)
