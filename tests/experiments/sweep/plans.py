"""Sweeps that take a second."""

from pathlib import Path
from typing import Any

import pandas as pd

from fedaccord.experiments.sweep import Plan, Step, Sweep

RUN = {"model": "linear", "num-clients": 4, "num-server-rounds": 3, "local-epochs": 2}
SPACE = {"algo": ["fedavg", "fedprox"], "lr": [0.05, 0.1]}


def content(
    space: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **own: Any
) -> dict[str, Any]:
    """A sweep's file: ``own`` are keys of [sweep]."""
    sweep = {"workers": 1} | {key.replace("_", "-"): value for key, value in own.items()}
    space = SPACE if space is None else space
    usual = {key: value for key, value in RUN.items() if key not in space}
    return {"sweep": sweep, "run": usual | (run or {}), "space": space}


def make(
    space: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **own: Any
) -> Plan:
    return Plan.make(content(space, run, **own))


def finish(plan: Plan, folder: Path) -> list[Step]:
    """All steps of a sweep."""
    steps: list[Step] = []
    Sweep(plan, folder, steps.append).run()
    return steps


def table(folder: Path, name: str = "table.csv") -> pd.DataFrame:
    """A table without seconds, which differ from run to run."""
    frame = pd.read_csv(folder / name)
    return frame.drop(columns=[name for name in frame if name.startswith("seconds")])
