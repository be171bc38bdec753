"""One HTML file of runs side by side, which opens without a network."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import groupby
from string import Template
from typing import Any

import pandas as pd
from bokeh.document import Document
from bokeh.embed import components
from bokeh.resources import Resources
from bokeh.settings import settings

from fedaccord.experiments.analysis import plots
from fedaccord.experiments.analysis.figures import metrics_of
from fedaccord.experiments.analysis.groups import (
    Group,
    Spread,
    differing,
    main_metric,
    ranked,
    tuned,
)
from fedaccord.experiments.analysis.table import Summary, summary, text
from fedaccord.runs.reader import Run

MAPS = 4  # different partitions, and settings, that are drawn
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1360px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin: 2em 0 .3em; }
p { margin: .3em 0 .8em; color: #555; }
nav a { margin-right: 1em; }
table { border-collapse: collapse; font-size: .9em; }
th, td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #ddd;
  vertical-align: top; }
.wide { overflow-x: auto; }
section { scroll-margin-top: 6em; }
#methods { position: sticky; top: 0; z-index: 9; background: white; max-height: 30vh;
  overflow-y: auto; }
#methods h2 { font-size: 1em; margin: 0; }
#methods p { display: none; }
th { cursor: default; } table.sorted th { cursor: pointer; }
td.number { white-space: nowrap; }
td { overflow-wrap: anywhere; } td.number, td:first-child { overflow-wrap: normal; }
</style>
$scripts
</head>
<body>
<h1>$title</h1>
<nav>$links</nav>
$sections
$script
<script>
$sort
</script>
</body>
</html>
""")
SORT = """
for (const table of document.querySelectorAll("table.sorted")) {
  const [head, ...rows] = table.rows
  ;[...head.cells].forEach((cell, i) => cell.addEventListener("click", () => {
    const up = cell.dataset.up = cell.dataset.up == "1" ? "" : "1"
    const value = (row) => row.cells[i].dataset.value ?? row.cells[i].textContent
    const order = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b
    rows.sort((a, b) => (up ? 1 : -1) * order(value(a), value(b)))
    table.tBodies[0].append(...rows)
  }))
}
"""  # a click on a column's head sorts, by data-value where a cell has one
FACTS = {  # settings that say what the runs are: before all others
    **{"dataset": "data set", "model": "model", "num-clients": "clients"},
    **{"partition": "partition", "fraction-train": "share of the clients in a round"},
    **{"num-server-rounds": "rounds"},
}


class Section:
    """A heading, a sentence and a plot or HTML (a string); is_chart: the methods' switches hold."""

    def __init__(self, name: str, note: str, content: Any, is_chart: bool = False) -> None:
        self.name, self.note, self.content, self.is_chart = name, note, content, is_chart

    @property
    def id(self) -> str:
        return self.name.lower().replace(" ", "-")


def html(groups: Sequence[Group], target: float | None = None) -> str:
    """The report's page; target: see `table.summary`."""
    groups = ranked(groups, main_metric(groups))
    curves = plots.Curves(groups, metrics_of(groups))
    sections = [*_sections(groups, target, curves)]
    drawn = {part.id: part.content for part in sections if not isinstance(part.content, str)}
    document = Document()
    with document.models.freeze():  # one pass over all models instead of one for each root
        for root in drawn.values():
            document.add_root(root)
    document.js_on_event("document_ready", *curves.draws)
    with _unchecked():
        script, divs = components(drawn)
    scripts = Resources("inline", components=["bokeh", "bokeh-widgets"])
    bodies = []
    for _, parts in groupby(sections, lambda part: part.is_chart):
        bodies += ["<div>", *(_body(part, divs.get(part.id, part.content)) for part in parts)]
        bodies.append("</div>")
    runs = sum(len(group.runs) + len(group.repeats) for group in groups)
    return PAGE.substitute(
        title=f"FedAccord: {runs} run{'s' if runs > 1 else ''}",
        links=" ".join(f'<a href="#{part.id}">{part.name}</a>' for part in sections),
        scripts=scripts.render_js(),
        sections="\n".join(bodies),
        script=script,
        sort=SORT,
    )


@contextmanager
def _unchecked() -> Iterator[None]:
    """Bokeh does not check its models, a sixth of the time: a test in a browser does."""
    check = settings.perform_document_validation
    check.set_value(False)
    try:
        yield
    finally:
        check.unset_value()


def _body(part: Section, content: str) -> str:
    return (
        f'<section id="{part.id}"><h2>{part.name}</h2>\n<p>{escape(part.note)}</p>\n'
        f'<div class="wide">{content}</div></section>'
    )


def _sections(
    groups: Sequence[Group], target: float | None, curves: plots.Curves
) -> Iterable[Section]:
    metric, titles = main_metric(groups), curves.titles
    found = summary(groups, target)
    yield Section("Setup", "What was trained, on which data, by how many clients.", _facts(groups))
    yield Section(
        "Summary",
        "Means over the seeds of a row, ± their standard deviation, the best row first; a click "
        "on a column's head sorts. Costs until the target was first reached, over the runs that "
        "reached it. A seed that was run more than once counts once.",
        _summary(found),
    )
    if metric in titles:
        note = (
            "Pale: means over the runs; strong: smoothed over up to 10 evaluations; band: the "
            "standard deviation over the runs."
        )
        charts = [Section("Curves", note, curves.chart(metric), is_chart=True)]
        note = "The same against what was spent."
        charts.append(Section("Cost", note, curves.chart(metric, "bytes"), is_chart=True))
        if distances := [name for name in titles if name.startswith("consensus")]:
            note = "Mean squared distance of the nodes' models to their mean."
            chart = curves.chart(distances[-1], axes="log y", of=distances)
            charts.append(Section("Consensus", note, chart, is_chart=True))
        note = "Which lines the charts show."
        yield Section("Methods", note, curves.switches(), is_chart=True)
        yield from charts
    runs = [run for group in groups for run in group.runs]
    if maps := _partitions(runs):
        more = "" if len(maps) <= MAPS else f" The first {MAPS} of {len(maps)} partitions."
        note = f"Training samples of each class at each client.{more}"
        yield Section(
            "Classes",
            note,
            plots.stacked([plots.classes(*pair) for pair in maps[:MAPS]]),
        )
    if any(len(run.clients) for run in runs):
        note = (
            "In how many rounds each client's reply was good (blue) or dropped (orange); and the "
            "seconds of its local rounds, from the fastest to the slowest, a point at the median."
        )
        yield Section("Clients", note, plots.clients(groups))
    keys = differing([group.settings for group in groups])
    tried_by, tried = tuned(groups)
    swept = [
        key
        for key in differing([group.settings for group in tried])
        if len({group.settings[key] for group in tried if key in group.settings}) > 1
    ]
    if swept:
        each = [plots.sensitivity(tried, key, tried_by) for key in swept[:MAPS]]
        note = "A point is a row of the summary, its whisker the standard deviation over runs."
        if tried_by.startswith("validation"):
            note += " By what the sweep was tuned on."
        yield Section("Sensitivity", note, plots.stacked(each))
    yield Section(
        "Settings", "What differs, then what all have in common.", _settings(groups, keys)
    )
    every = [(run, name) for g in groups for name, of in _counted(g) for run in of]
    yield Section("Origin", "Where the numbers come from.", _origin(every))


def _partitions(runs: Sequence[Run]) -> list[tuple[pd.DataFrame, str]]:
    """The different tables of class counts, and what dealt them."""
    found: dict[str, tuple[pd.DataFrame, str]] = {}
    for run in runs:
        if run.classes is not None:
            of = run.settings
            title = f"{of.get('partition', '')} partition, seed {of.get('seed', '')}"
            title += f", without {held:.0%} held out" if (held := of.get("validation")) else ""
            found.setdefault(run.classes.to_csv(), (run.classes, title))
    return [*found.values()]


def _settings(groups: Sequence[Group], keys: Sequence[str]) -> str:
    keys = ["algo", *keys]
    rows = [[group.settings.get(key, "") for key in keys] for group in groups]
    every = dict.fromkeys(key for group in groups for key in group.settings)
    common = [
        [key, groups[0].settings[key]]
        for key in every
        if key not in (*keys, *FACTS) and all(key in group.settings for group in groups)
    ]
    return (
        _table(keys, rows)
        + f"<details><summary>{len(common)} further settings in common</summary>"
        + _table(["key", "value"], common)
        + "</details>"
    )


def _facts(groups: Sequence[Group]) -> str:
    """The data set, the model and the clients; several values where the groups differ."""
    rows = []
    for key, name in FACTS.items():
        values = dict.fromkeys(str(g.settings[key]) for g in groups if key in g.settings)
        if values:
            rows.append([name, ", ".join(values)])
    return _table(["", ""], rows) if rows else ""


def _summary(found: Summary) -> str:
    texts = found.texts()
    lines = ["<tr>" + "".join(f"<th>{escape(str(name))}</th>" for name in texts) + "</tr>"]
    for row in found.rows:
        cells = []
        for cell in row.values():
            value = cell.mean if isinstance(cell, Spread) else cell
            kind = "" if isinstance(cell, str) else f' class="number" data-value="{value}"'
            cells.append(f"<td{kind}>{escape(text(cell))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="sorted">{"".join(lines)}</table>'


def _counted(group: Group) -> list[tuple[str, list[Run]]]:
    return [("yes", group.runs), ("no, a repeat", group.repeats)]


def _origin(runs: Sequence[tuple[Run, str]]) -> str:
    """A row a run of what differs; what all have in common is said once."""
    names = [*dict.fromkeys(name for run, _ in runs for name in run.versions)]
    rows = [
        {
            "run": run.path,
            "counted": counted,
            "status": run.summary["status"],
            "seconds": run.summary.get("seconds", ""),
            "commit": run.commit[:12] + ("-dirty" if run.commit.endswith("-dirty") else ""),
            **{key: run.used.get(key, "") for key in ("device", "cpu", "threads")},
            **{name: run.versions.get(name, "") for name in names},
        }
        for run, counted in runs
    ]
    first, always = rows[0], ("run", "status", "seconds")
    differ = [key for key in first if key in always or any(r[key] != first[key] for r in rows)]
    common = [[key, value] for key, value in first.items() if key not in differ]
    return _table(differ, [[row[key] for key in differ] for row in rows]) + _table(
        ["in common", ""], common
    )


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    def line(tag: str, cells: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"
