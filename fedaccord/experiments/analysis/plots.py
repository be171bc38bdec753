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
    HoverTool,
    Legend,
    LegendItem,
    LinearColorMapper,
    LinearScale,
    LogAxis,
    LogScale,
    NumeralTickFormatter,
    RadioButtonGroup,
    Range1d,
    Select,
)
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from fedaccord.experiments.analysis.figures import PARTS, curves, styles
from fedaccord.experiments.analysis.groups import COSTS, Group, final
from fedaccord.runs.metrics import METRIC, is_share

AXES = ("linear", "log y", "log x", "log both")  # x by pairs, y in turn: see `DRAW`
TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
SHOWN = 1000  # clients

SHORT = """
const power = Math.min(Math.floor(Math.log10(Math.abs({value})) / 3), 6)
const prefixes = ["", "k", "M", "G", "T", "P", "E"]
if (!(power > 0)) return String(Number({value}.toPrecision(4)))
return Number(({value} / 1000 ** power).toPrecision(4)) + prefixes[power]
"""  # 12350000 as 12.35M, as in the summary
PERCENT = """
if (shares.includes(y.value)) return String(Number((100 * {value}).toPrecision(4))) + "%"
"""  # where the metric that is shown is an accuracy
LINE = ("xs", "ys", "color", "dash", "width", "alpha", "label", "group")  # three of a band
LEGEND_WIDTH, LETTER, ENTRY = 1100, 7, 60  # pixels: of a row, of a letter, of the line before it
DRAW = """
const metric = y.value, cost = x.value
const line = {xs: [], ys: [], color: [], dash: [], width: [], alpha: [], label: [], group: []}
const band = {xs: [], ys: [], color: []}
for (const g of groups.active) {
  const data = stores[g].data, [label, color, dash] = looks[g]
  const [raw, smooth, low, high] = parts.map((part) => data[part + " " + metric] ?? [])
  const there = [...raw.keys()].filter((i) => isFinite(raw[i]))
  if (!there.length) continue
  const pick = (values) => there.map((i) => values[i])
  const at = pick(data[cost])
  for (const [kind, ys] of [[1, smooth], [0, raw]]) {  // the legend shows the first
    if (!kinds.active.includes(kind)) continue
    line.xs.push(at)
    line.ys.push(pick(ys))
    line.color.push(color)
    line.dash.push(dash)
    line.width.push(kind ? 2 : 1)
    line.alpha.push(kind ? 1 : 0.3)
    line.label.push(label + (kind ? ", smoothed" : ""))
    line.group.push(label)
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
        labels = [str(label) for label, *_ in self.looks]
        # lines without a point: a legend has the size that it takes when the page is opened
        looks = [([np.nan], [np.nan], c, dash, 2, 1, name, name) for name, c, dash in self.looks]
        columns = zip(LINE, zip(*looks, strict=True), strict=True)
        lines = ColumnDataSource({name: [*values] for name, values in columns})
        bands = ColumnDataSource({name: [] for name in LINE[:3]})
        lines.name, bands.name = f"lines {metric} {over}", f"bands {metric} {over}"
        choices = [(name, t) for name, t in self.titles.items() if not of or name in of]
        y = Select(
            name=f"measure {metric} {over}",
            title="measure",
            value=metric,
            options=choices,
            width=260,
        )
        plot, parts = _figure(axes, lines, bands, y, over)
        plot.name = f"plot {metric} {over}"
        _add_legend(plot, labels)
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
    axes: str, lines: ColumnDataSource, bands: ColumnDataSource, y: Select, over: str
) -> tuple[Any, dict[str, Any]]:
    """A chart and its linear and logarithmic parts, by direction, of which one pair is shown.
    y: chooses the metric."""
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
    for way, label in (("x", COSTS[over]), ("y", METRIC[y.value].title)):
        for i, axis in enumerate(sides[way]):
            axis.visible, axis.axis_label = i == is_log[way], label
        grids[way].axis = sides[way][is_log[way]]
        setattr(plot, f"{way}_scale", scales[way][is_log[way]])
    shares = {"y": y, "shares": [name for name in METRIC if is_share(name)]}
    percent = PERCENT + SHORT
    for axis in sides["x"]:
        axis.formatter = CustomJSTickFormatter(code=SHORT.format(value="tick"))
    for axis in sides["y"]:
        axis.formatter = CustomJSTickFormatter(args=shares, code=percent.format(value="tick"))
    plot.patches("xs", "ys", source=bands, color="color", fill_alpha=0.15, line_alpha=0)
    drawn = plot.multi_line(
        *("xs", "ys"),
        source=lines,
        color="color",
        line_dash="dash",
        line_width="width",
        line_alpha="alpha",
    )
    values = [("", "@label"), ("at", "$snap_x{custom}"), ("value", "$snap_y{custom}")]
    forms = {
        "$snap_x": CustomJSHover(code=SHORT.format(value="value")),
        "$snap_y": CustomJSHover(args=shares, code=percent.format(value="value")),
    }
    plot.add_tools(
        HoverTool(renderers=[drawn], line_policy="nearest", tooltips=values, formatters=forms)
    )
    return plot, {"sides": sides, "grids": grids, "scales": scales}


def _add_legend(plot: Any, labels: Sequence[str]) -> None:
    """Below the plot, which grows by its rows; the lines that are drawn, not all that could be."""
    (lines,) = (each for each in plot.renderers if "group" in each.data_source.data)
    columns = max(1, LEGEND_WIDTH // (LETTER * max(map(len, labels)) + ENTRY))
    legend = Legend(
        items=[LegendItem(label={"field": "group"}, renderers=[lines])],
        ncols=min(columns, len(labels)),
        label_text_font_size="12px",
        padding=4,
        margin=4,
    )
    plot.add_layout(legend, "below")
    plot.height += 24 * (1 + (len(labels) - 1) // columns)


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
    ends = ("client", "min", "client", "max")
    plot.segment(*ends, source=source, color="#0072b2", legend_label="fastest to slowest")
    look = {"color": "#0072b2", "size": 5, "legend_label": "median"}
    points = plot.scatter("client", "median", source=source, **look)
    plot.add_layout(plot.legend[0], "above")
    plot.legend.orientation = "horizontal"
    values = [("client", "@client"), ("median", "@median s"), ("slowest", "@max s")]
    plot.add_tools(HoverTool(renderers=[points], tooltips=values))
    return plot


def _bars(source: ColumnDataSource) -> Any:
    plot = figure(height=260, sizing_mode="stretch_width", tools=TOOLS)
    plot.xaxis.axis_label, plot.yaxis.axis_label = "client", "rounds"
    bar: dict[str, Any] = {"x": "client", "source": source, "width": 0.9, "line_color": None}
    plot.vbar(top="good", color="#0072b2", legend_label="good replies", **bar)
    plot.vbar(bottom="good", top="asked", color="#d55e00", legend_label="dropped", **bar)
    plot.add_layout(plot.legend[0], "above")
    plot.legend.orientation = "horizontal"
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
    value = "@y{0.[0000]}"
    if is_share(metric):
        plot.yaxis.formatter, value = NumeralTickFormatter(format="0.[00]%"), "@y{0.00%}"
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
        plot.add_tools(HoverTool(renderers=[points], tooltips=[("", "@label"), ("", value)]))
    plot.legend.click_policy = "hide"
    plot.add_layout(plot.legend[0], "right")
    return plot
