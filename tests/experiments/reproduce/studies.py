"""Studies that take a second."""

from pathlib import Path
from typing import Any

import pandas as pd

from fedaccord.experiments.reproduce import Cell, Study, Table
from fedaccord.experiments.reproduce.results import KEY, merged
from fedaccord.experiments.sweep.plan import SweepOptions

SETTINGS = {"model": "linear", "num-clients": 4, "num-server-rounds": 4, "local-epochs": 2}


def cell(row: str, column: str = "few", paper: float | None = None, **settings: Any) -> Cell:
    own = {key.replace("_", "-"): value for key, value in settings.items()}
    return Cell(row, column, {"algo": row, **SETTINGS, **own}, paper)


TABLE = Table(
    "small",
    "A small table",
    "nowhere",
    "None is open.",
    (
        cell("fedavg", paper=90.0),
        cell("fedinit"),
        cell("fedsam", paper=50.0),
        cell("fedavg", "many", 70.0, num_clients=8),
    ),
)


def finish(study: Study, folder: Path) -> pd.DataFrame:
    """Its results, without times."""
    results: list[dict[str, Any]] = []
    study.perform(folder, SweepOptions(workers=1), lambda run: results.append(study.result(run)))
    frame = merged(folder / "none.csv", results)
    assert [*frame.columns[: len(KEY)]] == KEY
    return frame.drop(columns=["hours", "seconds-a-round"])
