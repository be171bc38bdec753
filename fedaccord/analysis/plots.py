"""The report's plots, in Bokeh: what a reader can hover, zoom and switch off."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from bokeh.layouts import column, row
from bokeh.models import (
    BasicTicker,
    CheckboxButtonGroup,
    CheckboxGroup,
    ColorBar,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    CustomJSTickFormatter,
    DataTable,
    HoverTool,
    HTMLTemplateFormatter,
    LinearColorMapper,
    LinearScale,
    LogAxis,
    LogScale,
    RadioButtonGroup,
    Range1d,
    Select,
    TableColumn,
)
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from fedaccord.analysis.figures import PARTS, curves, styles
from fedaccord.analysis.groups import COSTS, Group, Spread, final
from fedaccord.analysis.table import Cell, text
from fedaccord.runs.metrics import METRIC

AXES = ("linear", "log y", "log x", "log both")  # x by pairs, y in turn: see `DRAW`
TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
SHOWN = 1000  # clients

SHORT = """
const power = Math.min(Math.floor(Math.log10(Math.abs({value})) / 3), 6)
const prefixes = ["", "k", "M", "G", "T", "P", "E"]
if (!(power > 0)) return String(Number({value}.toPrecision(4)))
return Number(({value} / 1000 ** power).toPrecision(4)) + prefixes[power]
"""  # 12350000 as 12.35M, as in the summary
LINE = ("xs", "ys", "color", "dash", "width", "alpha", "label")  # of a line; three of a band
DRAW = """
const metric = y.value, cost = x.value
const line = {xs: [], ys: [], color: [], dash: [], width: [], alpha: [], label: []}
const band = {xs: [], ys: [], color: []}
for (const g of groups.active) {
  const data = stores[g].data, [label, color, dash] = looks[g]
  const [raw, smooth, low, high] = parts.map((part) => data[part + " " + metric] ?? [])
  const there = [...raw.keys()].filter((i) => isFinite(raw[i]))
  if (!there.length) continue
  const pick = (values) => there.map((i) => values[i])
  const at = pick(data[cost])
  for (const [kind, ys] of [raw, smooth].entries()) {
    if (!kinds.active.includes(kind)) continue
    line.xs.push(at)
    line.ys.push(pick(ys))
    line.color.push(color)
    line.dash.push(dash)
    line.width.push(kind ? 2 : 1)
    line.alpha.push(kind ? 1 : 0.3)
    line.label.push(label + (kind ? ", smoothed" : ""))
  }
  if (kinds.active.includes(2) && low.length) {
    band.xs.push([...at, ...[...at].reverse()])
    band.ys.push([...pick(low), ...pick(high).reverse()])
    band.color.push(color)
  }
}
lines.data = line
bands.data = band

const isLog = {x: axes.active >= 2, y: axes.active % 2 == 1}
const names = {x: costs[cost], y: titles[metric]}
const drawn = {x: line.xs, y: [...line.ys, ...band.ys]}
for (const way of ["x", "y"]) {
  const log = isLog[way], range = plot[way + "_range"]
  const place = log ? Math.log : (v) => v, back = log ? Math.exp : (v) => v
  const places = drawn[way].flatMap((each) => [...each].map(place)).filter(isFinite)
  const low = places.reduce((a, b) => Math.min(a, b), places[0] ?? 0)
  const high = places.reduce((a, b) => Math.max(a, b), places[0] ?? 0)
  const margin = 0.05 * (high - low) || 0.5
  const start = back(low - margin), end = back(high + margin)
  sides[way].forEach((axis, i) => {
    axis.visible = i == log
    axis.axis_label = names[way]
  })
  grids[way].axis = sides[way][+log]
  plot[way + "_scale"] = scales[way][+log]
  range.setv({start, end, reset_start: start, reset_end: end})
}
"""


class Curves:
    """Charts of one or two metrics, chosen by the reader, and the switches of all their lines.

    A chart has one glyph for all its lines and one for all bands, which `DRAW` fills: Bokeh takes
    milliseconds for each glyph.
    """

    def __init__(self, groups: Sequence[Group], titles: Mapping[str, str]) -> None:
        self.titles = dict(titles)
        self.stores = [ColumnDataSource(_store(group, titles)) for group in groups]
        labels = [group.label for group in groups]
        pairs = zip(labels, styles(len(groups)), strict=True)
        self.looks = [[label, *style] for label, style in pairs]
        self.groups = CheckboxGroup(
            labels=labels,
            active=[*range(len(labels))],
            inline=True,
            name="groups",
            stylesheets=[_keys(len(labels))],
        )
        self.draws: list[CustomJS] = []  # of the charts, for a page that was just opened
        self.kinds = CheckboxButtonGroup(labels=["raw", "smoothed", "spread"], active=[0, 1, 2])

    def switches(self) -> Any:
        """Of all charts: which methods, and which of their lines."""
        return column(self.groups, self.kinds, sizing_mode="stretch_width")

    def chart(
        self, metric: str, over: str = "round", axes: str = "linear", of: Sequence[str] = ()
    ) -> Any:
        """of: the metrics to choose from; empty: all."""
        lines = ColumnDataSource({name: [] for name in LINE})
        bands = ColumnDataSource({name: [] for name in LINE[:3]})
        lines.name, bands.name = f"lines {metric} {over}", f"bands {metric} {over}"
        plot, parts = _figure(axes, lines, bands, metric, over)
        plot.name = f"plot {metric} {over}"
        choices = [(name, t) for name, t in self.titles.items() if not of or name in of]
        y = Select(
            name=f"measure {metric} {over}",
            title="measure",
            value=metric,
            options=choices,
            width=260,
        )
        x = Select(title="over", value=over, options=[*COSTS.items()], width=160)
        switch = RadioButtonGroup(
            name=f"axes {metric} {over}",
            labels=[*AXES],
            active=AXES.index(axes),
            margin=(24, 5, 5, 5),
        )
        draw = CustomJS(
            args={"x": x, "y": y, "axes": switch, "groups": self.groups, "kinds": self.kinds}
            | {"stores": self.stores, "looks": self.looks, "parts": PARTS, "titles": self.titles}
            | {"lines": lines, "bands": bands, "plot": plot, "costs": COSTS}
            | parts,
            code=DRAW,
        )
        self.draws.append(draw)
        for select in (x, y):
            select.js_on_change("value", draw)
        for buttons in (switch, self.groups, self.kinds):
            buttons.js_on_change("active", draw)
        return column(row(y, x, switch), plot, sizing_mode="stretch_width")


def _figure(
    axes: str, lines: ColumnDataSource, bands: ColumnDataSource, metric: str, over: str
) -> tuple[Any, dict[str, Any]]:
    """A chart and its linear and logarithmic parts, by direction, of which one pair is shown."""
    plot = figure(
        height=380,
        sizing_mode="stretch_width",
        tools=TOOLS,
        x_range=Range1d(),
        y_range=Range1d(),
    )
    is_log = {"x": AXES.index(axes) >= 2, "y": AXES.index(axes) % 2 == 1}
    plot.add_layout(LogAxis(), "below")
    plot.add_layout(LogAxis(), "left")
    sides = {"x": [*plot.xaxis], "y": [*plot.yaxis]}
    scales = {way: [LinearScale(), LogScale()] for way in sides}
    grids = {"x": plot.xgrid[0], "y": plot.ygrid[0]}
    for way, label in (("x", COSTS[over]), ("y", METRIC[metric].title)):
        for i, axis in enumerate(sides[way]):
            axis.visible, axis.axis_label = i == is_log[way], label
        grids[way].axis = sides[way][is_log[way]]
        setattr(plot, f"{way}_scale", scales[way][is_log[way]])
    for axis in sides["x"]:
        axis.formatter = CustomJSTickFormatter(code=SHORT.format(value="tick"))
    plot.patches("xs", "ys", source=bands, color="color", fill_alpha=0.15, line_alpha=0)
    drawn = plot.multi_line(
        *("xs", "ys"),
        source=lines,
        color="color",
        line_dash="dash",
        line_width="width",
        line_alpha="alpha",
    )
    values = [("", "@label"), ("at", "$snap_x{custom}"), ("value", "$snap_y{0.[0000]}")]
    forms = {"$snap_x": CustomJSHover(code=SHORT.format(value="value"))}
    plot.add_tools(
        HoverTool(renderers=[drawn], line_policy="nearest", tooltips=values, formatters=forms)
    )
    return plot, {"sides": sides, "grids": grids, "scales": scales}


def _keys(number: int) -> str:
    """Style sheet: a label in its line's colour and dashes."""
    lines = [".bk-input-group.bk-inline { flex-wrap: wrap; }"]
    for i, (colour, dash) in enumerate(styles(number), 1):
        kind = "dashed" if dash == "dashdot" else dash
        lines.append(f"label:nth-of-type({i}) span {{ border-bottom: 3px {kind} {colour}; }}")
    return "\n".join(lines)


def _store(group: Group, titles: Mapping[str, str]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Every metric of a group by round, and what was spent: columns "raw test-loss", "bytes"."""
    table = curves(group, titles)
    for name in (f"{end} {metric}" for end in PARTS[2:] for metric in titles):
        if name in table:  # where one run got to, a band has no width
            table[name] = table[name].fillna(table[f"smooth {name.partition(' ')[2]}"])
    return {str(name): values.to_numpy(np.float32) for name, values in table.items()}


def stacked(plots: Sequence[Any]) -> Any:
    return column(*plots, sizing_mode="stretch_width")


def table(rows: Sequence[Mapping[str, Cell]]) -> Any:
    """A table that sorts by a click on a column's head: spreads by their means."""
    columns: list[TableColumn] = []
    data: dict[str, Any] = {}
    for i, name in enumerate(rows[0]):
        cells = [each[name] for each in rows]
        keys = [cell.mean if isinstance(cell, Spread) else cell for cell in cells]
        data |= {f"c{i}": keys, f"t{i}": [*map(text, cells)]}
        form = HTMLTemplateFormatter(template=f"<%- t{i} %>")
        longest = max(len(name), *(len(text(cell)) for cell in cells))
        columns.append(
            TableColumn(field=f"c{i}", title=name, formatter=form, width=7 * longest + 24)
        )
    return DataTable(
        source=ColumnDataSource(data),
        columns=columns,
        index_position=None,
        autosize_mode="none",
        height=min(25 * len(rows) + 48, 600),
        sizing_mode="stretch_width",
    )


def classes(counts: pd.DataFrame, title: str) -> Any:
    """Heat map of the training samples of each class that a client holds."""
    names, values = [*map(str, counts.columns[1:])], counts.iloc[:, 1:].to_numpy().T
    plot = figure(
        title=title,
        height=max(180, min(420, 60 + 24 * len(names))),
        sizing_mode="stretch_width",
        tools=TOOLS,
        x_range=(-0.5, values.shape[1] - 0.5),
        y_range=(-0.5, len(names) - 0.5),
        x_axis_label="client",
        y_axis_label="class",
    )
    mapper = LinearColorMapper(palette=Viridis256, low=0, high=max(1, int(values.max())))
    plot.image(
        image=[values.astype(np.float32)],
        x=-0.5,
        y=-0.5,
        dw=values.shape[1],
        dh=len(names),
        color_mapper=mapper,
    )
    if len(names) <= 20:
        plot.yaxis.ticker = [*range(len(names))]
        plot.yaxis.major_label_overrides = dict(enumerate(names))
    plot.add_layout(ColorBar(color_mapper=mapper, ticker=BasicTicker(), title="samples"), "right")
    plot.add_tools(HoverTool(tooltips=[("client, class", "$x{0}, $y{0}"), ("samples", "@image")]))
    return plot


def clients(groups: Sequence[Group]) -> Any:
    """In how many rounds each client's reply was good or dropped, and the seconds of its local
    rounds; a run is chosen."""
    runs = [(group.label, run) for group in groups for run in group.runs if len(run.clients)]
    names = [f"{name} seed={run.settings.get('seed', 0)} ({run.path.name})" for name, run in runs]
    tables = _per_client([run.clients for _, run in runs])
    drawn = ColumnDataSource(tables[0])
    choice = Select(title="run", value=names[0], options=names, width=700)
    columns = [{str(name): t[name].to_numpy(np.float32) for name in t} for t in tables]
    choice.js_on_change(
        "value",
        CustomJS(
            args={"tables": columns, "drawn": drawn},
            code="drawn.data = tables[this.options.indexOf(this.value)]",
        ),
    )
    bars = _bars(drawn)
    timed = any(table["median"].notna().any() for table in tables)
    times = [_times(drawn, bars.x_range)] if timed else []
    return column(choice, bars, *times, sizing_mode="stretch_width")


def _per_client(runs: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """A row a client, of each run's clients.csv."""
    rows = pd.concat([*runs], keys=range(len(runs)), names=["run"])
    good, seconds = rows["status"] == "ok", rows.get("seconds", np.nan)
    each = pd.DataFrame(
        {"client": rows["client"], "good": good, "dropped": ~good, "seconds": seconds}
    ).groupby(["run", "client"])
    per = each[["good", "dropped"]].sum()
    per = per.assign(asked=per["good"] + per["dropped"])
    times = each["seconds"].agg(["min", "median", "max"])
    table = per.join(times).reset_index("client")
    return [table.loc[[i]].head(SHOWN).reset_index(drop=True) for i in range(len(runs))]


def _times(source: ColumnDataSource, x_range: Any) -> Any:
    """Whiskers from the fastest to the slowest local round of a client, a point at the median."""
    plot = figure(height=220, sizing_mode="stretch_width", tools=TOOLS, x_range=x_range)
    plot.xaxis.axis_label, plot.yaxis.axis_label = "client", "seconds of a local round"
    plot.segment("client", "min", "client", "max", source=source, color="#0072b2")
    points = plot.scatter("client", "median", source=source, color="#0072b2", size=5)
    values = [("client", "@client"), ("median", "@median s"), ("slowest", "@max s")]
    plot.add_tools(HoverTool(renderers=[points], tooltips=values))
    return plot


def _bars(source: ColumnDataSource) -> Any:
    plot = figure(height=260, sizing_mode="stretch_width", tools=TOOLS)
    plot.xaxis.axis_label, plot.yaxis.axis_label = "client", "rounds"
    plot.vbar(x="client", top="good", source=source, width=0.9, color="#0072b2", line_color=None)
    plot.vbar(
        x="client",
        bottom="good",
        top="asked",
        source=source,
        width=0.9,
        color="#d55e00",
        line_color=None,
    )
    values = [("client", "@client"), ("good replies", "@good"), ("dropped", "@dropped")]
    plot.add_tools(HoverTool(tooltips=values))
    return plot


def sensitivity(groups: Sequence[Group], key: str, metric: str) -> Any:
    """The final value of a metric at every value of a setting: a point a group, a whisker its
    spread over seeds."""
    with_key = [group for group in groups if key in group.settings]
    values = {group.settings[key] for group in with_key}
    factors = [str(v) for v in sorted(values, key=lambda v: (isinstance(v, str), v))]
    plot = figure(
        height=300, sizing_mode="stretch_width", tools=TOOLS, x_range=factors, x_axis_label=key
    )
    plot.yaxis.axis_label = f"{METRIC[metric].title}, last 10"
    algos = [*dict.fromkeys(str(group.settings.get("algo")) for group in with_key)]
    for algo, (colour, _) in zip(algos, styles(len(algos)), strict=True):
        own = [group for group in with_key if str(group.settings.get("algo")) == algo]
        ends = [final(group, metric) for group in own]
        source = ColumnDataSource(
            {
                "x": [str(group.settings[key]) for group in own],
                "y": [end.mean for end in ends],
                "low": [end.mean - np.nan_to_num(end.std) for end in ends],
                "high": [end.mean + np.nan_to_num(end.std) for end in ends],
                "label": [group.label for group in own],
            }
        )
        plot.segment("x", "low", "x", "high", source=source, color=colour, line_width=2)
        points = plot.scatter("x", "y", source=source, color=colour, size=9, legend_label=algo)
        plot.add_tools(
            HoverTool(renderers=[points], tooltips=[("", "@label"), ("", "@y{0.[0000]}")])
        )
    plot.legend.click_policy = "hide"
    return plot
