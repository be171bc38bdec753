"""Comparison of runs from Python, as a table or a page; without PyTorch."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fedaccord.process.extras import install
from fedaccord.storage.files import replace

if TYPE_CHECKING:
    import pandas as pd

    from fedaccord.experiments.analysis.groups import Group

log = logging.getLogger("flwr")

LINES = 5  # of runs that are left out
Paths = str | Path | Iterable[str | Path]  # run directories, or folders that hold some


def read_groups(runs: Paths, warn: Callable[[str], None] = log.warning) -> "list[Group]":
    """The runs in groups, with warnings for unreadable and repeated ones, which do not count.
    Raises ValueError, in one line, if a path has no run."""
    from fedaccord.experiments.analysis.groups import groups_of
    from fedaccord.runs import reader

    paths = [runs] if isinstance(runs, (str, Path)) else runs
    every_run, lines = reader.read_all(Path(path).expanduser() for path in paths)
    for line in lines[:LINES]:
        warn(f"left out: {line}")
    if len(lines) > LINES:
        warn(f"{len(lines) - LINES} more that cannot be read are left out")
    groups = groups_of(every_run)
    if repeats := sum(len(group.repeats) for group in groups):
        warn(
            f"{repeats} of {len(every_run)} runs repeat the settings and the seed of another run: "
            "they are marked and not counted"
        )
    return groups


def compare(
    runs: Paths,
    target: float | None = None,
    at: float | str | None = None,
    metric: str = "",
) -> "pd.DataFrame":
    """The numbers of `fedaccord compare`, a row a method and setting, the best first.

    runs: run directories, or folders that hold some. target: the accuracy (for other metrics the
    loss) that costs are counted to; None: nine tenths of the best. at: simulated seconds, or
    a cost as "dp-epsilon=4", at which the rows are ranked; None: at the end. metric: that ranks
    them, as "personal-accuracy"; empty: the test accuracy, or what the runs have in its place.
    Trials on validation samples are left out if there are other runs. Raises ValueError, in
    one line, if a path holds no run.
    """
    from fedaccord.experiments.analysis.table import summary

    return summary(read_groups(runs), target, at, metric).numbers()


def report(
    runs: Paths,
    path: str | Path,
    target: float | None = None,
    at: float | str | None = None,
    metric: str = "",
) -> Path:
    """Write the page of `fedaccord report`, one HTML file, and return its path.

    runs, target, at, metric: as of `compare`. Raises as `compare`, and ImportError, in one line,
    without Bokeh.
    """
    return write_page(read_groups(runs), path, target, at, metric)


def write_page(
    groups: "list[Group]",
    path: str | Path,
    target: float | None,
    at: float | str | None = None,
    metric: str = "",
) -> Path:
    """Raises ImportError, in one line, without Bokeh, and OSError, which names the file."""
    try:
        from fedaccord.experiments.analysis.report import html
    except ImportError as error:
        raise ImportError(f"{error}: a report needs Bokeh: {install('report')}") from None
    path = Path(path).expanduser()
    replace(path, html(groups, target, at, metric).encode())
    return path.absolute()
