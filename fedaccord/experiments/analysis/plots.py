"""The report's interactive plots, in Bokeh."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from bokeh import models as bk
from bokeh.layouts import column, row
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from fedaccord.experiments.analysis.costs import COSTS, Point
from fedaccord.experiments.analysis.figures import PARTS, curves, looks, styles
from fedaccord.experiments.analysis.groups import Group
from fedaccord.experiments.analysis.ranking import costs_of, final, up_to
from fedaccord.runs.metrics import METRIC, column_of, is_share
from fedaccord.runs.reader import StoredRun

AXES = ("linear", "log y", "log x", "log both")  # x by pairs, y in turn: see draw.js
PLOTTED_CLIENTS = 1000  # largest number
BLUE, ORANGE = "#0072b2", "#d55e00"

SHORT = """
const power = Math.min(Math.floor(Math.log10(Math.abs({value})) / 3), 6)
const prefixes = ["", "k", "M", "G", "T", "P", "E"]
if (!(power > 0)) return String(Number({value}.toPrecision(4)))
return Number(({value} / 1000 ** power).toPrecision(4)) + prefixes[power]
"""  # 12350000 as 12.35M, as in the summary
PERCENT = """
if (shares.includes(y.value)) return String(Number((100 * {value}).toPrecision(4))) + "%"
"""  # if the chosen metric is an accuracy
NOT_PRINTED = "@media print { :host { display: none } }"
WRAPPED = {"flex-wrap": "wrap"}
LINE = ("xs", "ys", "color", "dash", "width", "alpha", "label", "group")  # three of a band
LEGEND_WIDTH, LETTER, ENTRY = 1100, 7, 60  # pixels: of a row, of a letter, of the line before it
DRAW = Path(__file__).with_name("draw.js").read_text(encoding="utf-8")


def _plot(height: int, x: str, y: str, **more: Any) -> Any:
    """An empty plot as wide as the page; x, y: labels of its axes."""
    tools = "pan,box_zoom,wheel_zoom,reset,save"
    more |= {"x_axis_label": x, "y_axis_label": y, "tools": tools}
    more |= {"styles": {"break-inside": "avoid"}}
    plot = figure(height=height, sizing_mode="stretch_width", **more)
    plot.toolbar.autohide = True
    return plot


class Curves:
    """Charts of one or two metrics, chosen by the reader, and switches for all their lines.

    A chart has one glyph for all its lines and one for all bands, which draw.js fills: Bokeh needs
    milliseconds for each glyph.
    """

    def __init__(
        self, groups: Sequence[Group], titles: Mapping[str, str], leading: Sequence[int] = ()
    ) -> None:
        """leading: the groups that are shown at first; empty: all."""
        self.titles, self.costs = dict(titles), costs_of(groups)
        self.stores = [bk.ColumnDataSource(_store(group, titles)) for group in groups]
        self.labels = [group.label for group in groups]
        every = [*range(len(groups))]
        self.leading, self.chosen = [*leading] or every, []
        look_of: dict[int, tuple[str, str]] = {}
        for some in (self.leading, [i for i in every if i not in self.leading]):
            look_of |= dict(zip(some, looks([groups[i] for i in some]), strict=True))
        self.looks = [(self.labels[i], *look_of[i]) for i in every]
        self.groups = bk.CheckboxGroup(
            labels=self.labels, active=self.leading, inline=True, name="groups"
        )
        self.groups.stylesheets = [_keys(self.looks)]
        if self.leading != every:
            names = ["best of each", "all", "none"]
            which = bk.RadioButtonGroup(labels=names, active=0, name="which")
            args = {"groups": self.groups, "sets": [self.leading, every, []]}
            which.js_on_change(
                "active", bk.CustomJS(args=args, code="groups.active = sets[this.active]")
            )
            self.chosen = [which]
        self.draws: list[bk.CustomJS] = []  # of the charts, for a page that was just opened
        self.kinds = bk.CheckboxButtonGroup(labels=["raw", "smoothed", "spread"], active=[0, 1, 2])

    def switches(self) -> Any:
        """The switches of all charts: methods, and lines of each."""
        buttons = row(*self.chosen, self.kinds, styles=WRAPPED)
        return column(self.groups, buttons, sizing_mode="stretch_width")

    def chart(
        self, metric: str, over: str = "round", axes: str = "linear", of: Sequence[str] = ()
    ) -> Any:
        """of: the metrics to choose from; empty: all."""
        # lines without a point: a legend's size is fixed when the page is opened
        shown = [self.looks[i] for i in self.leading]
        empty = [([np.nan], [np.nan], c, dash, 2, 1, name, name) for name, c, dash in shown]
        columns = zip(LINE, zip(*empty, strict=True), strict=True)
        lines = bk.ColumnDataSource({name: [*values] for name, values in columns})
        bands = bk.ColumnDataSource({name: [] for name in LINE[:3]})
        suffix = f"{metric} {over}"
        lines.name, bands.name = f"lines {suffix}", f"bands {suffix}"
        options = [(n, t) for n, t in self.titles.items() if n in (of or self.titles)]
        y = bk.Select(title="measure", value=metric, options=options, width=260)
        x = bk.Select(title="over", value=over, options=[*self.costs.items()], width=160)
        switch = bk.RadioButtonGroup(
            labels=[*AXES], active=AXES.index(axes), margin=(24, 5, 5, 5), name=f"axes {suffix}"
        )
        plot, parts = _figure(axes, lines, bands, y, over)
        y.name, plot.name = f"measure {suffix}", f"plot {suffix}"
        parts |= _add_legend(plot, [name for name, _, _ in shown])
        draw = bk.CustomJS(
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
        choices = row(y, x, switch, stylesheets=[NOT_PRINTED], styles=WRAPPED)
        return column(choices, plot, sizing_mode="stretch_width")


def _figure(
    axes: str, lines: bk.ColumnDataSource, bands: bk.ColumnDataSource, y: bk.Select, over: str
) -> tuple[Any, dict[str, Any]]:
    """A chart and its linear and logarithmic parts, by direction; one pair is visible.
    y: chooses the metric."""
    plot = _plot(380, "", "", x_range=bk.Range1d(), y_range=bk.Range1d())
    is_log = {"x": AXES.index(axes) >= 2, "y": AXES.index(axes) % 2 == 1}
    plot.add_layout(bk.LogAxis(), "below")
    plot.add_layout(bk.LogAxis(), "left")
    sides = {"x": [*plot.xaxis], "y": [*plot.yaxis]}
    scales = {way: [bk.LinearScale(), bk.LogScale()] for way in sides}
    grids = {"x": plot.xgrid[0], "y": plot.ygrid[0]}
    shares = {"y": y, "shares": [name for name in METRIC if is_share(name)]}
    codes = {"x": (SHORT, {}), "y": (PERCENT + SHORT, shares)}
    for way, label in (("x", COSTS[over]), ("y", column_of(y.value).title)):
        code, args = codes[way]
        for i, axis in enumerate(sides[way]):
            axis.visible, axis.axis_label = i == is_log[way], label
            axis.formatter = bk.CustomJSTickFormatter(args=args, code=code.format(value="tick"))
        grids[way].axis = sides[way][is_log[way]]
        setattr(plot, f"{way}_scale", scales[way][is_log[way]])
    plot.patches("xs", "ys", source=bands, color="color", fill_alpha=0.15, line_alpha=0)
    look = {"color": "color", "line_dash": "dash", "line_width": "width", "line_alpha": "alpha"}
    values = [("", "@label"), ("at", "$snap_x{custom}"), ("value", "$snap_y{custom}")]
    forms = {
        f"$snap_{way}": bk.CustomJSHover(args=args, code=code.format(value="value"))
        for way, (code, args) in codes.items()
    }
    plot.add_tools(
        bk.HoverTool(
            renderers=[plot.multi_line("xs", "ys", source=lines, **look)],
            line_policy="nearest",
            tooltips=values,
            formatters=forms,
        )
    )
    return plot, {"sides": sides, "grids": grids, "scales": scales}


def _add_legend(plot: Any, labels: Sequence[str]) -> dict[str, Any]:
    """A legend of the drawn lines below the plot, which grows by its rows.

    Returns the arguments of the callback that reduces its columns in a narrow window.
    """
    (lines,) = (each for each in plot.renderers if "group" in each.data_source.data)
    width = LETTER * max(map(len, labels)) + ENTRY
    columns = max(1, LEGEND_WIDTH // width)
    item = bk.LegendItem(label={"field": "group"}, renderers=[lines])
    look = {"ncols": min(columns, len(labels)), "label_text_font_size": "12px"}
    legend = bk.Legend(items=[item], padding=4, margin=4, **look)
    plot.add_layout(legend, "below")
    plot.height += 24 * (1 + (len(labels) - 1) // columns)
    return {"legend": legend, "entry": {"width": width, "number": len(labels)}}


def _keys(lines: Sequence[tuple[str, str, str]]) -> str:
    """Style sheet: a label in its line's colour and dashes."""
    rules = [".bk-input-group.bk-inline { flex-wrap: wrap; }"]
    for i, (_, colour, dash) in enumerate(lines, 1):
        kind = "dashed" if dash == "dashdot" else dash
        rules.append(f"label:nth-of-type({i}) span {{ border-bottom: 3px {kind} {colour}; }}")
    return "\n".join(rules)


def _store(group: Group, titles: Mapping[str, str]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Every metric of a group by round, and its costs: columns "raw test-loss", "bytes"."""
    table = curves(group, titles)
    for name in (f"{end} {metric}" for end in PARTS[2:] for metric in titles):
        if name in table:  # a band has no width in rounds of a single run
            table[name] = table[name].fillna(table[f"smooth {name.partition(' ')[2]}"])
    return _arrays(table)


def _arrays(table: pd.DataFrame) -> dict[str, "np.ndarray[Any, Any]"]:
    return {str(name): values.to_numpy(np.float32) for name, values in table.items()}


def stacked(plots: Sequence[Any]) -> Any:
    return column(*plots, sizing_mode="stretch_width")


def classes(counts: pd.DataFrame, title: str) -> Any:
    """Heat map of the training samples of each class at each client."""
    names, values = [*map(str, counts.columns[1:])], counts.iloc[:, 1:].to_numpy().T
    (high, wide), height = values.shape, max(180, min(420, 60 + 24 * len(values)))
    ranges = {"x_range": (-0.5, wide - 0.5), "y_range": (-0.5, high - 0.5)}
    plot = _plot(height, "client", "class", title=title, **ranges)
    mapper = bk.LinearColorMapper(palette=Viridis256, low=0, high=max(1, int(values.max())))
    place = {"x": -0.5, "y": -0.5, "dw": wide, "dh": high}
    plot.image(image=[values.astype(np.float32)], color_mapper=mapper, **place)
    if high <= 20:
        plot.yaxis.ticker = [*range(high)]
        plot.yaxis.major_label_overrides = dict(enumerate(names))
    bar = bk.ColorBar(color_mapper=mapper, ticker=bk.BasicTicker(), title="samples")
    plot.add_layout(bar, "right")
    shown = [("client, class", "$x{0}, $y{0}"), ("samples", "@image")]
    plot.add_tools(bk.HoverTool(tooltips=shown))
    return plot


def clients(groups: Sequence[Group]) -> Any:
    """The number of rounds in which each client's reply was accepted or dropped, and the seconds of
    its local rounds, for a chosen run."""
    runs = [(group.label, run) for group in groups for run in group.runs if len(visits(run))]
    names = [f"{name} seed={run.settings.get('seed', 0)} ({run.path.name})" for name, run in runs]
    tables = _per_client([visits(run) for _, run in runs])
    source = bk.ColumnDataSource(tables[0])
    choice = bk.Select(title="run", value=names[0], options=names, width=700)
    code = "drawn.data = tables[this.options.indexOf(this.value)]"
    args = {"tables": [*map(_arrays, tables)], "drawn": source}
    choice.js_on_change("value", bk.CustomJS(args=args, code=code))
    bars = _bars(source)
    timed = any(table["median"].notna().any() for table in tables)
    times = [_times(source, bars.x_range)] if timed else []
    return stacked([choice, bars, *times])


def visits(run: StoredRun) -> pd.DataFrame:
    """The rows of clients.csv without those of clients that only evaluated."""
    rows = run.clients
    return rows[rows["status"] != "evaluated"] if len(rows) else rows


def _per_client(runs: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """A row a client, of each run's `visits`."""
    rows = pd.concat([*runs], keys=range(len(runs)), names=["run"])
    good, seconds = rows["status"] == "ok", rows.get("seconds", np.nan)
    each = pd.DataFrame(
        {"client": rows["client"], "good": good, "dropped": ~good, "seconds": seconds}
    ).groupby(["run", "client"])
    per = each[["good", "dropped"]].sum()
    per = per.assign(asked=per["good"] + per["dropped"])
    table = per.join(each["seconds"].agg(["min", "median", "max"])).reset_index("client")
    return [table.loc[[i]].head(PLOTTED_CLIENTS).reset_index(drop=True) for i in range(len(runs))]


def _bars(source: bk.ColumnDataSource) -> Any:
    plot = _plot(260, "client", "rounds")
    bar: dict[str, Any] = {"x": "client", "source": source, "width": 0.9, "line_color": None}
    plot.vbar(top="good", color=BLUE, legend_label="good replies", **bar)
    plot.vbar(bottom="good", top="asked", color=ORANGE, legend_label="dropped", **bar)
    return _finished(plot, [("good replies", "@good"), ("dropped", "@dropped")])


def _times(source: bk.ColumnDataSource, x_range: Any) -> Any:
    """Whiskers from the fastest to the slowest local round of a client, a point at the median."""
    plot = _plot(220, "client", "seconds of a local round", x_range=x_range)
    look: dict[str, Any] = {"source": source, "color": BLUE}
    plot.segment("client", "min", "client", "max", legend_label="fastest to slowest", **look)
    points = plot.scatter("client", "median", size=5, legend_label="median", **look)
    values = [("median", "@median s"), ("slowest", "@max s")]
    return _finished(plot, values, renderers=[points])


def _finished(plot: Any, values: list[tuple[str, str]], **more: Any) -> Any:
    """A plot of clients with its legend above it, and tooltips."""
    plot.add_layout(plot.legend[0], "above")
    plot.legend.orientation = "horizontal"
    plot.add_tools(bk.HoverTool(tooltips=[("client", "@client"), *values], **more))
    return plot


def sensitivity(groups: Sequence[Group], key: str, metric: str, at: Point | None = None) -> Any:
    """The final value of a metric, or that of `up_to`, at every value of a setting: a point a
    group, a whisker its spread over seeds."""
    with_key = [group for group in groups if key in group.settings]
    values = {group.settings[key] for group in with_key}
    factors = [str(v) for v in sorted(values, key=lambda v: (isinstance(v, str), v))]
    when = f"after {at.value:g} rounds" if at else "last 10"
    plot = _plot(300, key, f"{column_of(metric).title}, {when}", x_range=factors)
    value = "@y{0.[0000]}"
    if is_share(metric):
        plot.yaxis.formatter, value = bk.NumeralTickFormatter(format="0.[00]%"), "@y{0.00%}"
    rows = [(g, up_to(g, metric, at) if at else final(g, metric)) for g in with_key]
    table = pd.DataFrame(
        {"algo": str(group.settings.get("algo")), "x": str(group.settings[key]), "y": end.mean}
        | {"std": np.nan_to_num(end.std), "label": group.label}
        for group, end in rows
    )
    table = table.assign(low=table["y"] - table["std"], high=table["y"] + table["std"])
    by_algo = {str(algo): own for algo, own in table.groupby("algo", sort=False)}
    for (algo, own), (colour, _) in zip(by_algo.items(), styles([*by_algo]), strict=True):
        source = bk.ColumnDataSource(own)
        plot.segment("x", "low", "x", "high", source=source, color=colour, line_width=2)
        points = plot.scatter("x", "y", source=source, color=colour, size=9, legend_label=algo)
        plot.add_tools(bk.HoverTool(renderers=[points], tooltips=[("", "@label"), ("", value)]))
    plot.legend.click_policy = "hide"
    plot.add_layout(plot.legend[0], "right")
    return plot
