"""One HTML file that compares runs and opens without a network."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import pandas as pd
from bokeh.document import Document
from bokeh.embed import components
from bokeh.resources import Resources
from bokeh.settings import settings

from fedaccord.experiments.analysis import plots
from fedaccord.experiments.analysis.costs import Point
from fedaccord.experiments.analysis.figures import metrics_of
from fedaccord.experiments.analysis.groups import Group, differing, has_stopped, is_swept, tested
from fedaccord.experiments.analysis.ranking import Spread, counted, tuned
from fedaccord.experiments.analysis.table import Summary, summary, text
from fedaccord.runs.origin import DIRTY
from fedaccord.runs.reader import StoredRun

ROWS = 20  # visible rows of the summary, and lines of the charts, at first
PROBLEM = ("dataset", "partition", "dirichlet-alpha")  # metrics that no method can affect
NAMED = 4  # methods, or settings, in the title
ROUNDS = "num-server-rounds"
MAPS = 4  # different partitions, and settings, that are drawn
PAGE = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
FACTS = {  # settings that describe the runs: before all others
    **{"dataset": "data set", "model": "model", "num-clients": "clients"},
    **{"partition": "partition", "fraction-train": "share of the clients in a round"},
    **{ROUNDS: "rounds"},
}


class Section(NamedTuple):
    name: str
    note: str  # a sentence below the heading
    content: Any  # a plot, or HTML (a string)
    is_chart: bool = False  # whether the methods' switches apply

    @property
    def id(self) -> str:
        return self.name.lower().replace(" ", "-")


def html(
    groups: Sequence[Group],
    target: float | None = None,
    at: float | str | None = None,
    metric: str = "",
) -> str:
    """The report's page; target, at, metric: see `table.summary`."""
    table = summary(groups, target, at, metric)
    leading = _leading(table.groups)
    curves = plots.Curves(table.groups, metrics_of(table.groups), leading)
    sections = [*_sections(table, curves, leading, groups)]
    drawn = {part.id: part.content for part in sections if not isinstance(part.content, str)}
    document = Document()
    with document.models.freeze():  # one pass over all models instead of one for each root
        for root in drawn.values():
            document.add_root(root)
    document.js_on_event("document_ready", *curves.draws)
    with _unchecked():
        script, divs = components(drawn) if drawn else ("", {})  # of a run without a round
    bodies = []
    for _, parts in groupby(sections, lambda part: part.is_chart):
        bodies += ["<div>", *(_body(part, divs.get(part.id, part.content)) for part in parts)]
        bodies.append("</div>")
    return PAGE.substitute(
        title=escape(_title(tested(groups))),
        links=" ".join(f'<a href="#{part.id}">{part.name}</a>' for part in sections),
        scripts=Resources("inline", components=["bokeh", "bokeh-widgets"]).render_js(),
        sections="\n".join(bodies),
        script=script,
    )


@contextmanager
def _unchecked() -> Iterator[None]:
    """Bokeh skips the checks of its models, a sixth of the time: a test in a browser does them."""
    check = settings.perform_document_validation
    check.set_value(False)
    try:
        yield
    finally:
        check.unset_value()


def _body(part: Section, content: str) -> str:
    note = f"<p>{escape(part.note)}</p>\n" if part.note else ""
    return (
        f'<section id="{part.id}"><h2>{part.name}</h2>\n{note}'
        f'<div class="wide">{content}</div></section>'
    )


def _title(groups: Sequence[Group]) -> str:
    """The subject of the comparison: 3 methods by lr on digits: 18 runs."""
    methods = [*dict.fromkeys(str(group.settings.get("algo")) for group in groups)]
    data = dict.fromkeys(str(group.settings.get("dataset")) for group in groups)
    words = ", ".join(methods) if len(methods) <= NAMED else f"{len(methods)} methods"
    if keys := _swept(groups):
        words += f" by {' and '.join(keys) if len(keys) <= NAMED else f'{len(keys)} settings'}"
    runs = sum(len(group.runs) + len(group.repeats) for group in groups)
    return f"{words} on {', '.join(data)}: {runs} run{'s' if runs > 1 else ''}"


def _swept(groups: Sequence[Group]) -> list[str]:
    """The settings of which a method has several values."""
    settings = [group.settings for group in groups]
    return [key for key in differing(settings) if is_swept(key, settings)]


def _leading(groups: Sequence[Group]) -> list[int]:
    """The indices of the groups that are visible at first: all if they are few, else the best of
    each method on each partition, FedAvg among them, or of the only method. groups: the best
    first."""
    if len(groups) <= ROWS:
        return [*range(len(groups))]
    each = [(group.settings.get("algo"), *map(group.settings.get, PROBLEM)) for group in groups]
    firsts = [i for i, pair in enumerate(each) if pair not in each[:i]]
    if _methods(groups) == 1:
        return [*range(ROWS)]
    shown, baseline = firsts[:ROWS], [i for i in firsts if each[i][0] == "fedavg"]
    if baseline and not {*baseline} & {*shown}:
        shown[-1] = baseline[0]
    return shown


def _sections(
    table: Summary, curves: plots.Curves, leading: Sequence[int], every: Sequence[Group]
) -> Iterable[Section]:
    """every: the groups with the trials that are not compared, see `groups.tested`."""
    groups, metric, titles = table.groups, table.metric, curves.titles
    tried_by, tried = tuned(every)
    keys, at = _swept(tried), None
    if ROUNDS in keys and has_stopped(tried):
        keys.remove(ROUNDS)
        at = Point(min(group.settings[ROUNDS] for group in tried), "round")
    swept = [plots.sensitivity(tried, key, tried_by, at) for key in keys[:MAPS]]
    note = "A point is a row of the summary, its whisker the standard deviation over runs."
    if tried_by.startswith("validation"):
        note += " By the metric that the sweep was tuned on."
    if at:
        note += f" Of every trial after {at.value:g} rounds, where the sweep stopped some."
    sensitivity = [Section("Sensitivity", note, plots.stacked(swept))] if swept else []
    is_one_method = _methods(groups) == 1
    yield Section("Setup", "", _facts(groups))
    note = (
        "Means over the seeds of a row, ± their standard deviation, the best row first; a click "
        "on a column's head sorts. Costs until the target was first reached, over the runs that "
        "reached it. A seed that was run more than once counts once."
    )
    yield Section("Summary", note, _summary(table, leading))
    if is_one_method:  # its settings are those that the runs compare
        yield from sensitivity
    if metric in titles:
        yield Section("Methods", "Visible lines of the charts.", curves.switches(), is_chart=True)
        note = (
            "Pale: means over the runs; strong: smoothed over a twentieth of the "
            "evaluations, at most 10; band: the standard deviation of these over the runs."
        )
        yield Section("Curves", note, curves.chart(metric), is_chart=True)
        chart = curves.chart(metric, "bytes")
        yield Section("Cost", "The same against costs.", chart, is_chart=True)
        if distances := [name for name in titles if name.startswith("consensus")]:
            note = "Mean squared distance of the nodes' models to their mean."
            chart = curves.chart(distances[-1], axes="log y", of=distances)
            yield Section("Consensus", note, chart, is_chart=True)
    runs = [run for group in groups for run in group.runs]
    if maps := _partitions(runs):
        more = "" if len(maps) <= MAPS else f" The first {MAPS} of {len(maps)} partitions."
        note = f"Training samples of each class at each client.{more}"
        yield Section("Classes", note, plots.stacked([plots.classes(*m) for m in maps[:MAPS]]))
    if any(len(plots.visits(run)) for run in runs):
        note = (
            "Rounds in which each client's reply was accepted (blue) or dropped (orange); and the "
            "seconds of its local rounds, from the fastest to the slowest, a point at the median."
        )
        yield Section("Clients", note, plots.clients(groups))
    if not is_one_method:
        yield from sensitivity
    yield Section("Settings", "The settings that differ, then the common ones.", _settings(groups))
    yield Section("Origin", "The origin of the numbers.", _origin(every, groups))


def _partitions(runs: Sequence[StoredRun]) -> list[tuple[pd.DataFrame, str]]:
    """The different tables of class counts, and how the samples were partitioned."""
    tables: dict[str, tuple[pd.DataFrame, str]] = {}
    for run in runs:
        if run.classes is not None:
            of = run.settings
            title = f"{of.get('partition', '')} partition, seed {of.get('seed', '')}"
            title += f", without {share:.0%} held out" if (share := of.get("validation")) else ""
            tables.setdefault(run.classes.to_csv(), (run.classes, title))
    return [*tables.values()]


def _settings(groups: Sequence[Group]) -> str:
    keys = ["algo", *differing([group.settings for group in groups])]
    rows = [[group.settings.get(key, "") for key in keys] for group in groups]
    every = dict.fromkeys(key for group in groups for key in group.settings)
    common = [
        [key, groups[0].settings[key]]
        for key in every
        if key not in (*keys, *FACTS) and all(key in group.settings for group in groups)
    ]
    heading = f"<summary>{len(common)} further settings in common</summary>"
    return f"{_table(keys, rows)}<details>{heading}{_table(['key', 'value'], common)}</details>"


def _facts(groups: Sequence[Group]) -> str:
    """The data set, the model and the clients; several values if the groups differ."""
    rows = []
    for key, name in FACTS.items():
        values = dict.fromkeys(_fact(g.settings, key) for g in groups if key in g.settings)
        if values:
            rows.append((name, ", ".join(values)))
    return _table([name for name, _ in rows], [[values for _, values in rows]])


def _fact(settings: Mapping[str, Any], key: str) -> str:
    value = str(settings[key])
    if value == "dirichlet" and "dirichlet-alpha" in settings:
        value += f" {settings['dirichlet-alpha']}"
    return value


def _summary(table: Summary, leading: Sequence[int]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(str(name))}</th>" for name in table.texts()) + "</tr>"]
    for i, row in enumerate(table.rows):
        cells = []
        for cell in row.values():
            value = cell.mean if isinstance(cell, Spread) else cell
            kind = "" if isinstance(cell, str) else f' class="number" data-value="{value}"'
            cells.append(f"<td{kind}>{escape(text(cell))}</td>")
        lines.append(f"<tr{' class=lead' if i in leading else ''}>{''.join(cells)}</tr>")
    if len(leading) == len(table.rows):
        return f'<table class="sorted">{"".join(lines)}</table>'
    first = (
        "The best row of each method and partition"
        if _methods(table.groups) > 1
        else "The best rows"
    )
    button = f"<button class=more>{first}: show all {len(table.rows)}</button>"
    return f'<table class="sorted short">{"".join(lines)}</table>{button}'


def _methods(groups: Sequence[Group]) -> int:
    return len({group.settings.get("algo") for group in groups})


def _origin(groups: Sequence[Group], shown: Sequence[Group]) -> str:
    """The settings that differ, in a row for each run, then the common ones."""
    words = {run.path: "no, not completed" for group in shown for run in group.runs}
    words |= {path: "yes" for group in shown for path in counted(group)}
    every = [run for group in groups for run in group.runs]
    pairs = [
        (run, words.get(run.path, "no, a trial or a test of an earlier choice")) for run in every
    ]
    pairs += [(run, "no, a repeat") for group in groups for run in group.repeats]
    rows = [
        {"run": run.path, "counted": word, "status": run.summary["status"]}
        | {"seconds": run.summary.get("seconds", "")}
        | {"commit": run.commit[:12] + (DIRTY if run.commit.endswith(DIRTY) else "")}
        | {key: run.used.get(key, "") for key in ("device", "cpu", "threads")}
        | run.versions
        for run, word in pairs
    ]
    table = pd.DataFrame(rows, dtype=object).fillna("")
    always = ("run", "status", "seconds")
    same = [name for name in table if name not in always and table[name].nunique() == 1]
    differ, common = table.drop(columns=same), table[same].iloc[0]
    return _table([*differ], differ.to_numpy()) + _table(["in common", ""], [*common.items()])


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    def line(tag: str, cells: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"
