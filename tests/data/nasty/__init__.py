"""Unusual and invalid data, with the expected result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Settings = dict[str, Any]  # of the run config
Maker = Callable[[Path], Settings]  # writes the data into an empty folder


class Case(NamedTuple):
    make: Maker
    says: str  # is in the one line of an error, or of a warning; empty: there is none
    holds: str = ""  # the loaded data, samples + tests of shape in classes; empty: refused


Cases = dict[str, tuple[Any, ...]]  # by name the values of a Case


def alike(says: str, holds: str, makers: dict[str, Maker]) -> Cases:
    return {name: (make, says, holds) for name, make in makers.items()}
