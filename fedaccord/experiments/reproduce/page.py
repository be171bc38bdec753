"""The page of results: every table, ours beside the paper's, and the cells without runs."""

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from fedaccord.experiments.reproduce.measures import (
    BASELINE,
    NAMES,
    OF_RUN,
    TO_TARGET,
    of_method,
    ratio,
)
from fedaccord.experiments.reproduce.results import COLUMNS
from fedaccord.experiments.reproduce.table import Cell, Table
from fedaccord.experiments.sweep.trial import COMPLETED

HEADING = [
    "cell",
    "paper",
    "rounds",
    "seeds",
    "last",
    "mean of last 10",
    "best",
    "best - paper",
    "gradients",
    "hours",
]
INTRODUCTION = """\
# The papers' tables, run again

Test accuracy in percent of the model that a method returns, evaluated after every round: after the
last one, the mean of the last ten evaluations, and the best of all. `paper` is the paper's number,
with its spread if that is printed, and a dash if there is none; "unstable" means that the paper
prints a dash. The code of FedInit's and A-FedPD's authors reports the best round, which is chosen
on the test samples and therefore too optimistic. Our numbers are the mean over the seeds and, after
±, their standard deviation (divided by n - 1). `rounds` are our rounds of the paper's. `gradients`,
each of one batch, and `hours` are of one run; the hours depend on the machine and its other load.
`best - paper` is given only if all rounds were run, and is bold if it is more than two standard
deviations: runs with fewer rounds cannot be compared with the paper's number. Costs are counted up
to the first evaluation at a target: if the paper has none, the accuracy of its FedAvg. They are
means over the seeds that reached it, "1 of 3" if not all did; speeds need all of them, the same
seeds of both cells, and in seconds the same device.
"""
END = "Written by `fedaccord reproduce`; every run is a row of [{csv}]({csv}).\n"


def as_markdown(tables: Sequence[Table], results: pd.DataFrame, csv: str) -> str:
    """Markdown, tables with a result first. results: as of `results.merged`; csv: the name of their
    file, beside the page."""
    run = set(results["table"])
    ordered = sorted(tables, key=lambda table: table.name not in run)
    return "\n".join([INTRODUCTION, *(_section(t, results) for t in ordered), END.format(csv=csv)])


def _section(table: Table, results: pd.DataFrame) -> str:
    own = results[results["table"] == table.name]
    text = [f"## {table.title}", ""]
    text += [f"`fedaccord reproduce {table.name}`. {table.setting}", ""]
    text += [f"The paper's numbers: {table.source}.", ""]
    if rows := [*_rows(table, own)]:
        text += [_line(HEADING), _line(["---", *["--:"] * (len(HEADING) - 1)]), *rows, ""]
        devices = sorted({str(name) for name in own["device"].dropna() if name})
        text += [f"Run on: {', '.join(devices)}.", ""] if devices else []
    heading, *others = measures_of(table, own)
    if others:
        text += [_line(heading), _line(["---", *["--:"] * (len(heading) - 1)])]
        text += [*map(_line, others), ""]
    text += _not_run(table, set(own["cell"])) if table.is_run else []
    return "\n".join(text)


def _rows(table: Table, results: pd.DataFrame) -> Iterator[str]:
    """A line for each cell that was run; several if it was also run with other settings."""
    by_cell = dict(iter(results.groupby("cell")))
    for cell in table.cells:
        if cell.name not in by_cell:
            continue
        own = by_cell[cell.name]
        for key, runs in own.groupby(["changed", "rounds"]):
            changed, rounds = str(key[0]), int(runs["rounds"].iloc[0])
            name = f"`{cell.name}`" + (f" with `{changed}`" if changed else "")
            complete = runs[runs["status"] == COMPLETED]
            failed = len(runs) - len(complete)
            seeds = f"{len(complete)}" + (f", {failed} failed" if failed else "")
            length = f"{rounds} of {cell.rounds}"
            accuracies = [_spread(complete[x]) for x in ("last", "mean-of-last-10", "best")]
            alike = all(change.startswith("precision=") for change in changed.split())
            difference = _difference(cell, rounds, complete["best"]) if alike else "–"
            spent = complete if len(complete) else runs
            cost = [f"{spent['gradients'].mean():,.0f}", f"{spent['hours'].mean():.2f}"]
            yield _line([name, _paper(cell), length, seeds, *accuracies, difference, *cost])


def measures_of(table: Table, results: pd.DataFrame | None = None) -> list[list[str]]:
    """The paper's measures besides the accuracy, each beside ours, of the runs with the paper's
    settings and the most rounds; then our costs to the target that it does not print. A heading,
    and a row for each cell, or without measures of the paper for each that reached its target."""
    results = pd.DataFrame(columns=COLUMNS) if results is None else results
    costs, names, nothing = [*TO_TARGET], {*results["cell"]}, results[:0]
    printed = {c.name: _as_printed(c, results) for c in table.cells if c.name in names}
    ended = [
        c for c in table.cells if c.name in names and printed[c.name][costs].notna().any(axis=None)
    ]
    unprinted = [name for name in TO_TARGET if ended and name not in table.measures]
    pairs = (word for name in table.measures for word in (NAMES[name], "ours"))
    target = ["target, %"] if unprinted else []
    lines = [["cell", *pairs, *target, *(f"{NAMES[name]}, ours" for name in unprinted)]]
    for cell in table.cells if table.measures else ended:
        own, base = printed.get(cell.name, nothing), _baseline(table, cell)
        cell_costs = {} if table.is_run else of_method(cell.settings, base.settings)
        rounds = int(own["rounds"].max()) if len(own) else cell.rounds
        length = "" if rounds >= cell.rounds else f" ({rounds} of {cell.rounds} rounds)"
        words = [f"`{cell.name}`" + length]
        for name in table.measures:
            words.append(f"{cell.more[name]:g}" if name in cell.more else "–")
            if name in OF_RUN:
                words.append(_over_seeds(own[name]))
            else:
                baseline = printed.get(base.name, nothing)
                value = cell_costs[name] if cell_costs else ratio(name, own, baseline)
                words.append("–" if math.isnan(value) else f"{value:.2f}")
        words += [f"{cell.target:g}" if cell.target else "–" for _ in target]
        words += [_over_seeds(own[name], ",.0f") for name in unprinted]
        lines.append(words)
    return lines


def _as_printed(cell: Cell, results: pd.DataFrame) -> pd.DataFrame:
    """The runs of a cell, without changed settings, that have the most rounds of the completed
    ones; one that failed has no measures."""
    own = results[(results["cell"] == cell.name) & (results["changed"] == "")]
    complete = own["status"] == COMPLETED
    own = own.assign(**{name: own[name].where(complete) for name in OF_RUN})
    longest: pd.DataFrame = own[own["rounds"] == own["rounds"][complete].max()]
    return longest


def _baseline(table: Table, cell: Cell) -> Cell:
    """The cell of FedAvg in the same column; the cell itself if there is none."""
    same = (other for other in table.cells if other.column == cell.column)
    return next((other for other in same if other.row == BASELINE), cell)


def _difference(cell: Cell, rounds: int, best: pd.Series) -> str:
    if cell.paper is None or math.isnan(cell.paper) or rounds != cell.rounds or best.empty:
        return "–"
    value = best.mean() - cell.paper
    text = f"{value:+.2f}"
    return f"**{text}**" if abs(value) > 2 * best.std() else text  # one seed: no spread, not bold


def _not_run(table: Table, run: set[str]) -> list[str]:
    left: dict[str, list[str]] = {}
    for cell in table.cells:
        if cell.name not in run:
            number = "" if cell.paper is None else f" ({_paper(cell)})"
            left.setdefault(cell.column, []).append(cell.row + number)
    if not left:
        return []
    count = sum(map(len, left.values()))
    has_numbers = any(cell.paper is not None for cell in table.cells)
    after = "; in brackets the paper's number" if has_numbers else ""
    lines = [f"- `{column}`: {', '.join(rows)}" for column, rows in left.items()]
    return [f"Not run: {count} of {len(table.cells)} cells{after}.", "", *lines, ""]


def _paper(cell: Cell) -> str:
    if cell.paper is None or math.isnan(cell.paper):
        return "–" if cell.paper is None else "unstable"
    spread = "" if cell.spread is None else f" ± {cell.spread:.2f}"
    return f"{cell.paper:.2f}{spread}"


def _spread(values: pd.Series, form: str = ".2f") -> str:
    if values.empty:
        return "–"
    spread = f" ± {values.std():{form}}" if len(values) > 1 else ""
    return f"{values.mean():{form}}{spread}"


def _over_seeds(values: pd.Series, form: str = ".2f") -> str:
    """values: of all seeds, NaN of those without the measure."""
    if values.empty:
        return "–"
    own = values.dropna()
    return _spread(own, form) + (
        f" ({len(own)} of {len(values)})" if 0 < len(own) < len(values) else ""
    )


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"
