"""Runs that are made once: a completed one is kept, an unfinished one made anew.

Several processes may work on one folder of runs: each run is locked by the process that makes it.
"""

import fcntl
import json
import os
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedaccord import engine
from fedaccord.config import RunConfig


def run(folder: Path, settings: dict[str, Any], deciding: Iterable[str]) -> bool:
    """Whether ``folder`` now holds the completed run of ``settings``; no: another process is at it.

    deciding: the keys, beside the method's own, that must agree with a run that is there already.
    Raises ValueError where they do not.
    """
    config = RunConfig.make(settings | {"out-dir": str(folder.parent), "name": folder.name})
    with lock(folder) as mine:
        if not mine:
            return False
        if completed(folder):
            check_same(folder, config, deciding)
            return True
        shutil.rmtree(folder, ignore_errors=True)
        began = time.process_time()
        with engine.quiet():
            engine.run(config)
        machine = {
            "cores": os.cpu_count(),
            "threads": config.threads,
            "cpu-seconds": round(time.process_time() - began, 1),
        }
        (folder / "machine.json").write_text(json.dumps(machine))
        return True


@contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Whether this process alone works on ``folder``; a process that dies lets go of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def completed(folder: Path) -> bool:
    try:
        status: str = json.loads((folder / "summary.json").read_text())["status"]
    except (FileNotFoundError, NotADirectoryError):
        return False
    return status == "completed"


def check_same(folder: Path, config: RunConfig, deciding: Iterable[str]) -> None:
    """Raise ValueError where the run in ``folder`` differs in what decides its numbers."""
    before = settings_of(folder)
    wanted = [*deciding, *(key for key in config.flat if key.startswith(f"{config.algo}."))]
    for key in wanted:
        if before.get(key) != config.flat[key]:
            raise ValueError(
                f"{folder} holds a run with {key} {before.get(key)}, not {config.flat[key]}: "
                "choose another --out, or move that run away"
            )


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings of a run by their keys, without the tables of other methods."""
    return _flatten(tomllib.loads((folder / "config.toml").read_text())["run"])


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as keys with dots."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
