"""The folder of a new run: its name, and why it cannot be made."""

import errno
import os
import time
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def place(out_dir: str, name: str, settings: Mapping[str, Any]) -> Path:
    """The folder of a new run; if ``name`` is empty, one that does not exist yet.

    Raises ValueError, in one line, for a relative ``out_dir``, for a name outside of it and, of a
    run that does not resume, for a folder in another run's, for a name hard to type or taken and
    for a path that is not UTF-8.
    """
    folder = Path(out_dir) if out_dir else Path.home() / "fedaccord-runs"
    if not folder.is_absolute():
        raise ValueError(
            f"out-dir: expected an absolute path, got {out_dir!r}: "
            f"a run may execute in a folder other than yours; try {str(folder.absolute())!r}"
        )
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"name: expected a folder below out-dir, got {name!r}; move it by out-dir")
    if not settings.get("resume"):
        _check_new(folder / name, name)
    if name:
        return folder / name
    stamp = time.strftime("%Y%m%d-%H%M%S")
    data = settings["dataset"].replace(":", ".")  # of a function; rsync takes a colon for a host
    first = folder / f"{settings['algo']}-{data}-seed{settings['seed']}-{stamp}"
    path, number = first, 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{first.name}-{number}"
    return path


def _check_new(path: Path, name: str) -> None:
    if any(part != part.strip() for part in Path(name).parts) or any(
        unicodedata.category(character) in ("Cc", "Cs") for character in name
    ):
        raise ValueError(
            f"name: expected no control characters, and no spaces at the ends, got {name!r}"
        )
    if any(unicodedata.category(character) == "Cs" for character in str(path)):
        raise ValueError(
            f"out-dir: expected a path in UTF-8, got {str(path)!r}; choose another folder"
        )
    for folder in path.parents if name else (path, *path.parents):
        if is_run(folder):
            raise ValueError(
                f"name: {path} is inside the run {folder}, where `fedaccord compare` would not "
                "find it; choose another name or out-dir"
            )
    if name:
        _check_free(path)


def is_run(path: Path) -> bool:
    return os.path.isfile(path / "config.toml") and os.path.isfile(path / "summary.json")


def make(out_dir: str, name: str, settings: Mapping[str, Any]) -> Path:
    """Make the folder of `place`: an empty one that no other run has.

    Raises ValueError, in one line, if it cannot be made or has files.
    """
    while True:
        path = place(out_dir, name, settings)
        try:
            path.mkdir(parents=True)  # fails if it exists: two runs never share a folder
        except FileExistsError:
            if not name:
                continue  # another run has just made it
            _check_free(path)
        except OSError as error:
            raise unwritable(path, error) from error
        return path


def _check_free(path: Path) -> None:
    """Raises ValueError, in one line, if a path exists and is not an empty folder."""
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise taken(path) from None


def taken(path: Path) -> ValueError:
    return ValueError(f"name: {path} exists already; choose another name or move it away")


class UnwritableError(OSError, ValueError):
    """A run's folder that cannot be written, because a setting is wrong or the disk is full."""


def unwritable(path: Path, error: OSError) -> ValueError:
    if error.errno == errno.ENAMETOOLONG:
        return ValueError(f"name: {path} is too long; shorten it, or out-dir")
    return UnwritableError(
        f"out-dir: cannot write to {path} ({error.strerror}); choose another folder"
    )
