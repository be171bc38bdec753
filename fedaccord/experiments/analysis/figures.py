"""Figures for papers, as PDF and PNG: curves by round, and accuracy against its costs."""

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import pandas as pd

from fedaccord.experiments.analysis.costs import COSTS, smoothed
from fedaccord.experiments.analysis.groups import Group, tested
from fedaccord.experiments.analysis.ranking import costs_of, has, main_metric, measured
from fedaccord.runs.metrics import EVALUATED, METRIC, column_of, is_share, own
from fedaccord.storage.files import replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedaccord.experiments.analysis.measures import Landscape

# Okabe and Ito's colours for the colour-blind, without yellow, which is pale on paper
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DASHES = ("solid", "dashed", "dotted", "dashdot")
MARKERS = dict(zip(COLOURS, "os^Dv<>", strict=True))  # distinguish colours in grey
PARTS = ("raw", "smooth", "low", "high")  # of a metric's curve


def styles(labels: Sequence[str]) -> list[tuple[str, str]]:
    """(colour, dashes) of the line of each label: unique up to 28 labels, none dashed up to 7.

    FedAvg is black. The checksum of another label determines its colour, so a method looks the
    same in every report, unless two labels collide: then the second in the alphabet gets the next
    free colour. Methods come before rows that are named with settings.
    """
    chosen: dict[str, tuple[str, str]] = {}
    free: list[tuple[str, str]] = []
    *others, black = COLOURS
    for name in sorted({*labels}, key=lambda name: (name != "fedavg", " " in name, name)):
        free = free or [(colour, dash) for dash in DASHES for colour in COLOURS]
        first, dash = crc32(name.encode()) % len(others), free[0][1]
        ring = [*others[first:], *others[:first], black]
        if name == "fedavg":
            ring = ring[::-1]
        chosen[name] = next((colour, dash) for colour in ring if (colour, dash) in free)
        free.remove(chosen[name])
    return [chosen[label] for label in labels]


def looks(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """The `styles` of groups: by the method if no other group has it, else by the label."""
    methods = [str(group.settings.get("algo")) for group in groups]
    each = zip(methods, groups, strict=True)
    return styles([name if methods.count(name) == 1 else group.label for name, group in each])


def metrics_of(groups: Sequence[Group]) -> dict[str, str]:
    """The metrics that some run has, with their titles."""
    tables = [table for group in groups for table in group.tables]
    names = dict.fromkeys([*METRIC, *(name for table in tables for name in own(table.columns))])
    titled = (column for column in map(column_of, names) if column.title)
    drawn = sorted(titled, key=lambda column: column.kind != EVALUATED)
    titles = {c.name: c.title for c in drawn if any(has(group, c.name) for group in groups)}
    if not any("dropped" in table and (table["dropped"] > 0).any() for table in tables):
        titles.pop("dropped", None)
    return titles


def curves(group: Group, metrics: Iterable[str]) -> pd.DataFrame:
    """By round, means over the group's completed runs, or if there are none over those that did not
    fail, up to their last common round: the columns of `COSTS`, and of each
    metric that some run has "raw METRIC" and "smooth METRIC", in which round 0 stands alone; for
    several runs also "low" and "high", smooth minus and plus the standard deviation (NaN in rounds
    of a single run)."""
    each = []
    for table in measured(group) or group.tables:
        lines = {cost: table[cost] for cost in COSTS}
        for metric in metrics:
            raw = table[metric].dropna() if metric in table else pd.Series(dtype=float)
            if len(raw):
                trained = table["round"][raw.index] > 0
                smooth = pd.concat([raw[~trained], smoothed(raw[trained])])
                lines |= {f"raw {metric}": raw, f"smooth {metric}": smooth}
        each.append(pd.DataFrame(lines).set_index("round", drop=False))
    each = [table for table in each if len(table)] or each[:1]
    if len(each) == 1:
        return each[0]
    last = min(table.index.max() for table in each)
    by_round = pd.concat(table.loc[:last] for table in each).groupby(level=0)
    middle = by_round.mean()
    smooth = middle.filter(regex="^smooth ")
    band = by_round[[*smooth]].std(ddof=1)
    low, high = (
        end.set_axis([str(name).replace("smooth", part, 1) for name in end], axis=1)
        for part, end in (("low", smooth - band), ("high", smooth + band))
    )
    return pd.concat([middle, low, high], axis=1)


def curve(group: Group, metric: str, over: str = "round") -> pd.DataFrame:
    """x, raw, smooth and perhaps low and high of one metric, by round; x: a column of `COSTS`."""
    names = {over: "x"} | {f"{part} {metric}": part for part in PARTS}
    table = curves(group, [metric])
    if f"raw {metric}" not in table:
        return pd.DataFrame(columns=[*names.values()][:3], dtype=float)
    return table[table[f"raw {metric}"].notna()].filter([*names]).rename(columns=names)


def save(groups: Sequence[Group], folder: Path, metric: str = "") -> list[Path]:
    """A PDF and a PNG of every metric by round and of one by every cost, see `main_metric`; without
    trials, see `tested`."""
    groups = tested(groups)
    folder.mkdir(parents=True, exist_ok=True)
    metric, titles = main_metric(groups, metric), metrics_of(groups)
    drawn = [(name, "round") for name in titles] + [
        (metric, cost) for cost in costs_of(groups) if cost != "round"
    ]
    written = []
    for name, over in drawn:
        figure = draw(groups, name, over)
        stem = name if over == "round" else f"{name}-by-{over}"
        for ending in ("pdf", "png"):
            written.append(folder / f"{stem}.{ending}")
            _write(figure, written[-1], dpi=200)
    return written


def save_landscapes(path: Path, landscapes: "Mapping[str, Landscape]") -> None:
    """Contours of the losses around each model, at the centre, with its label above; all on one
    scale, that of the finite losses; the suffix is the format."""
    from matplotlib.figure import Figure

    number = len(landscapes)
    columns = min(number, 3)
    rows = -(-number // columns)
    figure = Figure(figsize=(3 * columns + 1, 3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    losses = np.stack([each.losses.numpy() for each in landscapes.values()])
    finite = losses[np.isfinite(losses)]
    low, high = (finite.min(), finite.max()) if len(finite) else (1.0, 1.0)
    if low < 0:  # no logarithm, as of a likelihood
        levels, norm = np.linspace(low, max(high, low + 1e-6), 20), "linear"
    else:
        levels, norm = np.geomspace(max(low, 1e-6), max(high, 1.01 * low, 2e-6), 20), "log"
    panels = zip(grid.flat, landscapes.items(), losses, strict=False)
    for axes, (label, (at, _)), heights in panels:
        heights = np.ma.masked_invalid(heights)
        drawn = axes.contourf(at, at, heights, levels=levels, norm=norm, cmap="viridis")
        axes.contour(at, at, heights, levels=levels, colors="white", linewidths=0.4)
        axes.plot(0, 0, "+", color="white")
        axes.set_aspect("equal")
        axes.set_title(fill(label, 36) if number > 1 else "", fontsize="medium")
    for axes in grid.flat[number:]:
        axes.set_visible(False)
    figure.supxlabel("first direction", fontsize="medium")
    figure.supylabel("second direction", fontsize="medium")
    figure.colorbar(drawn, ax=grid, label="train loss", format="%.3g")
    _write(figure, path, dpi=120)


def _write(figure: "Figure", path: Path, dpi: int) -> None:
    """Save atomically; the suffix is the format. Raises OSError, which names the file."""
    content = BytesIO()
    figure.savefig(content, format=path.suffix[1:], bbox_inches="tight", dpi=dpi)
    replace(path, content.getvalue())


def draw(groups: Sequence[Group], metric: str, over: str = "round") -> "Figure":
    """A metric by a cost; its axis has the range after round 0, the untrained model, and is
    logarithmic if a distance or another positive number has values more than fivefold apart."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    figure = Figure(figsize=(4.2, 3.0))
    axes = figure.subplots()
    lines, heights = [curve(group, metric, over) for group in groups], []
    for line, group, look in zip(lines, groups, looks(groups), strict=True):
        _add(axes, line[line["x"].notna() & line["smooth"].notna()], group.label, look)
        heights.append(line.filter(PARTS[1:])[line.index > 0].to_numpy().ravel())
    drawn = np.concatenate(heights)
    if not is_share(metric) and _is_wide(lines):
        axes.set_yscale("log")
        drawn = drawn[drawn > 0]
        axes.set_ylim(np.nanmin(drawn) / 1.1, 1.1 * np.nanmax(drawn))
    elif np.isfinite(drawn).any() and np.nanmin(drawn) < np.nanmax(drawn):
        margin = 0.05 * (np.nanmax(drawn) - np.nanmin(drawn))
        axes.set_ylim(np.nanmin(drawn) - margin, np.nanmax(drawn) + margin)
    axes.set_xlabel(COSTS[over])
    axes.set_ylabel(fill(column_of(metric).title, 36))
    if over in ("bytes", "gradients"):  # 20M, as in the report
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if is_share(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="x-small")
    return figure


def _is_wide(lines: Sequence[pd.DataFrame]) -> bool:
    """Whether the lines after round 0 are positive and more than fivefold apart."""
    drawn = np.concatenate([line["smooth"][line.index > 0].to_numpy() for line in lines])
    drawn = drawn[np.isfinite(drawn)]
    return len(drawn) > 0 and bool(drawn.min() > 0 and drawn.max() > 5 * drawn.min())


def _add(axes: Any, line: pd.DataFrame, label: str, look: tuple[str, str]) -> None:
    """A curve with eight markers, and its band."""
    if not len(line):
        return
    colour, dash = look
    mark = {"marker": MARKERS[colour], "markersize": 4, "markevery": max(1, len(line) // 8)}
    axes.plot(line["x"], line["smooth"], color=colour, linestyle=dash, label=label, **mark)
    if "low" in line:
        axes.fill_between(line["x"], line["low"], line["high"], color=colour, alpha=0.12, lw=0)
