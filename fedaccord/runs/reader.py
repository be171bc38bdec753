"""Run directories as tables, without PyTorch: what reports, comparisons and sweeps read."""

import json
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedaccord.runs.directory import flatten, status

DEPTH = 3  # folders between what is asked for and a run: SWEEP_DIR/runs/RUN


class Run(NamedTuple):
    """What a run directory says; docs/metrics.md explains every column."""

    path: Path
    settings: dict[str, Any]  # by run-config key, those in use
    used: dict[str, Any]  # what they came to, and on which machine
    versions: dict[str, str]
    commit: str
    summary: dict[str, Any]  # by dotted key
    metrics: pd.DataFrame  # a row a round, the untrained model's first
    clients: pd.DataFrame  # a row a client a round
    classes: pd.DataFrame | None  # a row a client; None: not known


def read(path: Path) -> Run:
    """Raises ValueError, in one line, where that is no run directory or a damaged one."""
    if not is_run(path):
        raise ValueError(f"{path}: expected a run directory with config.toml, found none")
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        summary["status"] = status(path)  # dead, where it says running and nobody does
        return Run(
            path,
            flatten(config["run"]),
            flatten(config["used"]),
            config["versions"],
            config["commit"],
            flatten(summary),
            _table(path / "metrics.csv", ["round"]),
            _table(path / "clients.csv", ["round", "client", "status"]),
            _table(path / "classes.csv", []) if (path / "classes.csv").exists() else None,
        )
    except (OSError, KeyError, ValueError, TypeError) as error:  # of TOML, JSON and CSV too
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path}: expected a run directory, got a damaged one ({reason})"
        ) from None


def _table(path: Path, columns: list[str]) -> pd.DataFrame:
    """Empty, with these columns, before the first round."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)


def is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() and (path / "summary.json").is_file()


def find(paths: Iterable[Path]) -> list[Path]:
    """The run directories among ``paths`` and in those that are none, sorted, each once.

    Raises ValueError, in one line, for a path without any.
    """
    found: dict[Path, None] = {}
    for path in paths:
        here = [path] if is_run(path) else sorted(_below(path, DEPTH))
        if not here:
            raise ValueError(
                f"{path}: expected a run directory or a folder that holds some, found none"
            )
        found |= dict.fromkeys(run.resolve() for run in here)
    return list(found)


def _below(path: Path, depth: int) -> Iterator[Path]:
    folders = [folder for folder in path.iterdir() if folder.is_dir()] if path.is_dir() else []
    for folder in folders:
        if is_run(folder):
            yield folder
        elif depth > 1:
            yield from _below(folder, depth - 1)
