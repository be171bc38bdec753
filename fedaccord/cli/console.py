"""What the commands print with, and how they stop: one line on stderr."""

import sys
from typing import Any, NoReturn

import click
import typer
from rich.console import Console
from typer.core import TyperGroup

WIDE = 1000  # columns where no terminal limits them: a table keeps a line a row


class Commands(TyperGroup):
    """The commands; a wrong option is one line, as any other bad input."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except click.ClickException as error:
            code = _complain(f"{error.format_message()} See fedaccord --help.", error.exit_code)
        sys.exit(code or 0)


def make_console() -> Console:
    """Colours and bars on a terminal; elsewhere plain lines of any length."""
    terminal = sys.stdout.isatty()
    width = None if terminal else WIDE
    return Console(force_terminal=terminal, width=width, highlight=False, markup=False)


def stop(problem: object, code: int) -> NoReturn:
    raise typer.Exit(_complain(problem, code))


def warn(text: str) -> None:
    typer.echo(f"warning: {text}", err=True)


def _complain(problem: object, code: int) -> int:
    typer.echo(f"fedaccord: {' '.join(str(problem).split())}", err=True)
    return code
