"""`fedaccord compare`: runs side by side, as a table in several formats, and figures of them."""

from collections.abc import Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaccord.cli.console import make_console, print_table, printable, refusing, stop, warn
from fedaccord.process.allocator import uncollected

if TYPE_CHECKING:
    from fedaccord.experiments.analysis.groups import Group
    from fedaccord.experiments.analysis.table import Summary

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN_DIR...",
        help="Run directories, or folders that hold some.",
        readable=False,  # the readers name the folder, and `compare` leaves it out
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        help="Count costs up to this test accuracy in [0, 1] (or loss, if runs have no accuracy); "
        "by default nine tenths of the best."
    ),
]
At = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS|COST=NUMBER",
        help="Rank by the accuracy at this number of simulated seconds, for runs with a "
        "device-profile, or at another cost: dp-epsilon=4, bytes=1e9, round=50.",
    ),
]
Metric = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Rank by this metric, e.g. personal-accuracy; by default the test accuracy, or the "
        "loss of runs without one.",
    ),
]


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"
    JSON = "json"


@uncollected()
def compare(
    runs: Runs,
    target: Target = None,
    at: At = None,
    metric: Metric = "",
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write figures as PDF and PNG.")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="The numbers of csv and json are not rounded.")
    ] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print runs side by side: accuracy, its spread over seeds, and the cost of a target accuracy.

    Runs that differ only in their seed are one row; each seed counts once. The best row comes
    first. docs/measures.md explains the columns. Examples:

    fedaccord compare ~/fedaccord-runs/first ~/fedaccord-runs/second --target 0.9

    fedaccord compare my-sweep --figures paper/figures --format latex

    fedaccord compare my-sweep --at 3600

    fedaccord compare my-private-runs --at dp-epsilon=4
    """
    if as_json and form not in (Format.TABLE, Format.JSON):
        stop(f"--json: expected no other format beside it, got --format {form}; leave one out", 2)
    groups = read_groups(runs)
    from fedaccord.experiments.analysis.table import summary

    with refusing(ValueError):
        rows = summary(groups, target, at, metric)
    note_compared(groups, rows.groups, rows.metric, at)
    if figures is not None:
        figures = figures.expanduser()
        import_module("matplotlib")  # before the folder is created
        from fedaccord.experiments.analysis.figures import save

        try:
            written = save(groups, figures, metric)
        except OSError as error:
            stop(f"--figures: cannot write to {figures} ({error.strerror}); name another folder", 2)
    console = make_console()
    form = Format.JSON if as_json else form
    if form is Format.TABLE:
        texts = rows.texts()
        print_table(console, [*texts], texts.to_numpy().tolist())
        if figures is not None:
            console.print(f"figures: {len(written)} files in {figures}", soft_wrap=True)
    else:
        typer.echo(printable(_formatted(rows, form)), nl=False)


def _formatted(summary: "Summary", form: Format) -> str:
    texts, numbers = summary.texts(), summary.numbers()
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


def note_left_out(groups: "Sequence[Group]", compared: "Sequence[Group]") -> None:
    """Print how many runs of a sweep are not compared, if any."""
    every, shown = (sum(len(g.runs) for g in some) for some in (groups, compared))
    if every > shown:
        warn(
            f"left out: {every - shown} runs of a sweep: trials on validation samples, which chose "
            "the settings of the tests, and tests of earlier choices; table.csv has the trials"
        )


def note_compared(
    groups: "Sequence[Group]", compared: "Sequence[Group]", metric: str, at: str | None
) -> None:
    """Print what is left out, and what the metric cannot compare: runs of several data sets, and
    models with parts that stay at the clients. at: of the rank; None: the last evaluations."""
    note_left_out(groups, compared)
    from fedaccord.experiments.analysis.groups import several_contents
    from fedaccord.runs.metrics import WINDOW, is_loss

    sets = [*dict.fromkeys(str(group.settings.get("dataset")) for group in compared)]
    if len(sets) > 1:
        warn(f"runs of {', '.join(sets)} are ranked together: compare those of one dataset")
    if other := several_contents(compared):
        warn(
            f"runs with equal settings but different {', '.join(other)} are ranked together: "
            "data, files or code have changed, see [used.contents] in each config.toml"
        )
    every_run = [run for group in compared for run in group.runs]
    losses = sorted({str(run.used.get("loss", run.settings.get("loss"))) for run in every_run})
    if len(losses) > 1 and is_loss(metric):
        warn(f"{metric}: runs with different losses ({', '.join(losses)}) are ranked together")
    steps = sorted({int(run.settings.get("eval-every", 1)) for run in every_run})
    if len(steps) > 1 and at is None and metric != "train-loss":  # which is of every round
        warn(
            f"runs with eval-every={', '.join(map(str, steps))} are ranked together: the last "
            f"{WINDOW} evaluations of one are more rounds than those of another; rank by --at"
        )
    if rows := rows_of_untrained_parts(compared, metric):
        warn(
            f"{rows}: {metric} is of a model with the local parts from before round 1; "
            f"--metric personal-{metric.partition('-')[2]} ranks by the clients' own models"
        )


def rows_of_untrained_parts(groups: "Sequence[Group]", metric: str) -> str:
    """The first row with a metric of w and local parts from before round 1, and the number of
    further ones; empty: none."""
    from fedaccord.experiments.analysis.ranking import of_untrained_parts

    first, *others = [g.label for g in groups if of_untrained_parts(g, metric)] or [""]
    return f"{first} and {len(others)} more rows" if others else first


def read_groups(runs: list[Path]) -> "list[Group]":
    """The runs in groups, with a warning for each unreadable one; without any the command ends."""
    from fedaccord.experiments.analysis import notebook

    with refusing(ValueError, OSError):
        return notebook.read_groups(runs, warn)
