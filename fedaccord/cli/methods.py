"""`fedaccord methods`: the methods, their papers and what a round of each costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fedaccord.cli.console import Json, print_json, stop
from fedaccord.cli.keys import indented

if TYPE_CHECKING:
    from fedaccord.core.cost import Cost
    from fedaccord.federation.strategy import FederatedStrategy

COSTS = ("down", "up", "gradients", "client", "server")  # fields of Cost
BUFFERED = "buffered"


def methods(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: Json = False,
) -> None:
    """List the methods, their papers and what a round of each costs.

    Costs are in vectors of d, the number of parameters: down and up per active client, gradients
    per local step, client and server state. Buffered: whether it supports schedule=buffered.
    """
    from fedaccord.strategies import PLUGINS

    if markdown and as_json:
        stop("--json: expected it without --markdown, got both; leave one out", 2)
    if markdown:
        typer.echo(methods_markdown(), nl=False)
        return
    rows = _rows()
    if as_json:
        print_json([row._asdict() | {"cost": row.cost._asdict()} for row in rows])
        return
    notes = _notes(rows)
    typer.echo(_line("method", "arXiv", COSTS) + f"{BUFFERED:>9}")
    for row in rows:
        mark = f" [{notes.index(row.note) + 1}]" if row.note else ""
        typer.echo(_line(row.name + mark, row.arxiv, _costs(row.cost)) + f"{_buffered(row):>9}")
        typer.echo("\n".join(indented(row.title)))
    units = "in vectors of d; gradients per local step, down and up per active client and round"
    remarks = [
        *(f"[{number}] {note}" for number, note in enumerate(notes, 1)),
        f"Costs are {units}.",
        "Server steps that read more of the uploads than sums, for which the server cannot add the "
        "noise of dp: "
        f"{', '.join(row.name for row in rows if row.beyond_sums)}.",
        f"Any method also supports the plug-ins {', '.join(PLUGINS)}, unless it refuses them.",
    ]
    typer.echo("\n" + "\n".join(line for remark in remarks for line in indented(remark)))


def _line(name: str, arxiv: str, costs: Sequence[str]) -> str:
    numbers = "".join(
        f"{cost:>{len(column) + 3}}" for cost, column in zip(costs, COSTS, strict=True)
    )
    return f"{name:17}{arxiv:12}{numbers}"


def methods_markdown() -> str:
    """The methods as a Markdown table, with notes below it; links start at the repository root."""
    rows = _rows()
    notes = _notes(rows)
    lines = [
        f"| method | file | paper | {' | '.join(COSTS)} | {BUFFERED} |",
        "|---|---|---|" + "---:|" * len(COSTS) + "---|",
    ]
    for row in rows:
        mark = f" <sup>{notes.index(row.note) + 1}</sup>" if row.note else ""
        file = f"[{Path(row.file).name}]({row.file})"
        link = f"[{row.title}](https://arxiv.org/abs/{row.arxiv})"
        cells = [f"`{row.name}`{mark}", file, link if row.arxiv else row.title]
        lines.append(f"| {' | '.join([*cells, *_costs(row.cost), _buffered(row)])} |")
    if notes:
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def cost_note(strategy: "FederatedStrategy") -> str:
    """The conditions on which a method's cost depends; empty: none."""
    first = "w^0 once, with a client's first training message"
    is_late = strategy.client_half().needs_w_init and not strategy.all_clients
    notes = [first] if is_late else []
    return "; ".join([*notes, *([strategy.cost_note] if strategy.cost_note else [])])


class _Row(NamedTuple):
    name: str
    file: str
    title: str
    arxiv: str  # the paper's number; empty: none
    cost: "Cost"
    note: str
    beyond_sums: str  # what the server step reads besides sums of uploads; empty: nothing
    synchronous: str  # why its rounds are synchronous; empty: it supports schedule=buffered


def _rows() -> list[_Row]:
    from fedaccord.cli.about import about, file
    from fedaccord.strategies import METHODS

    rows = []
    for name, kind in METHODS.items():
        # some train all clients; some read sums if clients take equal steps
        strategy, words = kind(fraction_train=1.0, local_steps=1), about(kind)
        title = words.title.partition(": ")[2] or words.title
        note, why = cost_note(strategy), strategy.why_synchronous
        cells = name, file(kind), title, words.arxiv, strategy.cost, note, strategy.beyond_sums
        rows.append(_Row(*cells, synchronous=why))
    return rows


def _buffered(row: _Row) -> str:
    return "no" if row.synchronous else "yes"


def _notes(rows: list[_Row]) -> list[str]:
    """The distinct notes on costs; a note's number is its position."""
    return list(dict.fromkeys(row.note for row in rows if row.note))


def _costs(cost: "Cost") -> list[str]:
    return [f"{getattr(cost, column):g}" for column in COSTS]
