"""Run directories as tables, without PyTorch, for reports, comparisons and sweeps."""

import io
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedaccord.runs.directory import COMPLETED, CONTENTS, flatten, status
from fedaccord.runs.naming import is_run as is_run
from fedaccord.storage.files import read_bytes, read_json

WORDS = ("status", "repair", "evaluation")  # columns of clients.csv
OK = "ok"  # status of an accepted reply
UNREADABLE = (KeyError, ValueError, TypeError, AttributeError, RecursionError)  # TOML, JSON, CSV
DEPTH = 3  # folders between the given path and a run: SWEEP_DIR/runs/RUN


class StoredRun(NamedTuple):
    """The contents of a run directory; docs/metrics.md explains every column."""

    path: Path
    settings: dict[str, Any]  # the run-config keys in use
    used: dict[str, Any]  # the values of those that were "auto", and the machine
    versions: dict[str, str]
    commit: str
    summary: dict[str, Any]  # by dotted key
    metrics: pd.DataFrame  # a row a round, the untrained model's first
    clients: pd.DataFrame  # a row a client a round
    classes: pd.DataFrame | None  # a row a client; None: unknown

    @property
    def contents(self) -> dict[str, str]:
        """Hashes, by key, of the data, files and code that settings name; empty if unknown."""
        return {k.removeprefix(CONTENTS): v for k, v in self.used.items() if k.startswith(CONTENTS)}


def read_all(paths: Iterable[Path]) -> tuple[list[StoredRun], list[str]]:
    """The runs at and below ``paths``, and a line for each run that cannot be read.

    Raises ValueError, in one line, for a path that does not exist, and if no run can be read.
    """
    folders: dict[Path, None] = {}
    runs, lines = [], []
    for path in paths:
        try:
            folders |= dict.fromkeys(find([path]))
        except (OSError, ValueError) as error:
            if not path.exists():
                raise
            lines.append(str(error))
    for path in folders:
        try:
            runs.append(read(path))
        except ValueError as error:
            lines.append(str(error))
    if not runs:
        raise ValueError(lines[0] if lines else "expected run directories, got none")
    return runs, lines


def read(path: Path) -> StoredRun:
    """Raises ValueError, in one line, if it is not a run directory, or damaged."""
    if not is_run(path):
        is_closed = path.is_dir() and not os.access(path, os.R_OK | os.X_OK)
        found = "a folder without permission to read it" if is_closed else "none"
        raise ValueError(f"{path}: expected a run directory with config.toml, found {found}")
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8-sig"))
        summary = read_json(path / "summary.json")
        if not isinstance(summary["status"], str):
            raise ValueError("summary.json: expected a text as status")
        summary["status"] = status(path)  # dead: running without a process that writes it
        metrics = _table(path / "metrics.csv", ["round"])
        rounds, ended = int((metrics["round"] > 0).sum()), int(summary.get("rounds", 0))
        if summary["status"] == COMPLETED and rounds < ended:
            raise ValueError(f"metrics.csv: expected {ended} rounds, found {rounds}")
        clients = _table(path / "clients.csv", ["round", "client", "status"], WORDS)
        good, replies = int((clients["status"] == OK).sum()), int(summary.get("replies", 0))
        if summary["status"] == COMPLETED and (path / "clients.csv").exists() and good < replies:
            raise ValueError(f"clients.csv: expected {replies} replies, found {good}")
        settings, facts = _scalars(config["run"]), _scalars(summary)
        if "clients" in facts:  # under Flower the nodes decide, not the setting
            settings["num-clients"] = facts["clients"]
        return StoredRun(
            path,
            settings,
            _scalars(config["used"]),
            _scalars(config["versions"]),
            str(config["commit"]),
            facts,
            metrics,
            clients,
            _table(path / "classes.csv", []) if (path / "classes.csv").exists() else None,
        )
    except (*UNREADABLE, OSError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError):
            reason = f"its config.toml, summary.json or metrics.csv is cut short: no {reason}"
        raise ValueError(
            f"{path}: expected a run directory, got a damaged one ({reason})"
        ) from None


def _scalars(table: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key. Raises ValueError if one is not a text, number or truth value."""
    flat = flatten(table)
    for key, value in flat.items():
        if value is not None and not isinstance(value, (str, int, float)):
            raise ValueError(f"{key}: expected a text or a number, got {str(value)[:40]!r}")
    return flat


def _table(path: Path, columns: list[str], words: Iterable[str] = ()) -> pd.DataFrame:
    """A table of numbers, except for the columns ``words``; before round 1 it has no rows."""
    if not path.exists():
        return pd.DataFrame(columns=columns)
    table = pd.read_csv(io.BytesIO(read_bytes(path)))
    if missing := [name for name in columns if name not in table or table[name].hasnans]:
        raise ValueError(f"{path.name}: expected the column {missing[0]} in every row")
    for name in table.columns.difference([*words]):
        if not pd.api.types.is_numeric_dtype(table[name]):
            raise ValueError(f"{path.name}: expected numbers in the column {name}")
    return table


def find(paths: Iterable[Path]) -> list[Path]:
    """The run directories at or below ``paths``, sorted, each once.

    Raises ValueError, in one line, for a path without any.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        here = sorted(_below(path, DEPTH))
        if not here:
            raise ValueError(f"{path}: expected a run directory or a folder with some, found none")
        folders |= dict.fromkeys(run.resolve() for run in here)
    return list(folders)


def _below(path: Path, depth: int) -> Iterator[Path]:
    if is_run(path):
        yield path
    elif depth > 0 and os.path.isdir(path):
        if not os.access(path, os.R_OK | os.X_OK):  # it may be a run: `read` raises the reason
            yield path
            return
        for folder in path.iterdir():
            yield from _below(folder, depth - 1)
