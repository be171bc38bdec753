"""The result of a check, and its output."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import typer
from rich.filesize import decimal

from fedaccord.cli.console import make_console, print_json

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Check(NamedTuple):
    mark: str  # ok, warn or fail
    what: str
    text: str


ok, warn = partial(Check, "ok"), partial(Check, "warn")


def fail(what: str, text: object) -> Check:
    return Check("fail", what, str(text))


def show(checks: Sequence[Check], as_json: bool = False) -> None:
    """A line a check, or a JSON list; ends the process with exit code 1 if one fails."""
    console = make_console()
    if as_json:
        print_json([check._asdict() for check in checks])
    for check in () if as_json else checks:
        console.print(f"{check.mark:4}", style=COLOURS[check.mark], end="  ")
        text = f"{check.what + ':':15}{' '.join(check.text.split())}"
        console.print(text, soft_wrap=True)
    if any(check.mark == "fail" for check in checks):
        raise typer.Exit(1)


def size(count: float) -> str:
    """Bytes in words."""
    return decimal(int(count))
