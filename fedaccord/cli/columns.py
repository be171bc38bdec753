"""`fedaccord run --list-columns`, and the tables of docs/metrics.md."""

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.table import Table


def columns_tables() -> Iterator[Table]:
    """A table for each file of a run directory."""
    from fedaccord.runs.metrics import TABLES

    for file, columns in TABLES.items():
        table = Table(file, "meaning", "unit", box=SIMPLE)
        for column in columns:
            table.add_row(column.name, column.meaning, column.unit)
        yield table


def columns_markdown() -> str:
    """The same in Markdown, with the rows that have a value and who measures it."""
    from fedaccord.runs.metrics import TABLES

    lines = []
    for file, columns in TABLES.items():
        name = "key" if file.endswith(".json") else "column"
        lines += [f"## {file}", "", f"| {name} | meaning | unit | where | measured by | better |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for column in columns:
            facts = column.meaning, column.unit, column.rows, column.source, column.better
            cells = (f"`{column.name}`", *facts)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)
