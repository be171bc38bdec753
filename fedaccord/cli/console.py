"""The commands' output, and their errors: one line on stderr."""

import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, get_type_hints

import click
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperGroup

from fedaccord.process.extras import extra_of, install
from fedaccord.process.interrupts import exit_code

WIDE = 1000  # columns if there is no terminal: a row of a table stays one line
NO_HOME = "Could not determine home directory"  # begins pathlib's error


class Commands(TyperGroup):
    """The group of commands; a wrong option gives one line, as any bad input."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        _open_streams()
        if sys.platform == "win32":  # without fork, flock and pwrite
            sys.exit(_complain("needs Linux or macOS; on Windows use WSL", 2))
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except click.ClickException as error:
            # typer and click each add a suggestion to an unknown command: the first is enough
            text = re.sub(r"(Did you mean .*) \(?Did you mean.*$", r"\1", error.format_message())
            code = error.exit_code  # without a text: the help was printed
            if text:
                context = getattr(error, "ctx", None)
                command = context.command_path if context else "fedaccord"
                if isinstance(error, click.NoSuchOption):
                    text = text.removesuffix(" Did you mean '--help'?")
                    parameters = context.command.params if context else []
                    if any(parameter.name == "pairs" for parameter in parameters):
                        text += " Settings have no dashes: lr=0.1."
                _complain(f"{text} See {command} --help.", code)
        except ModuleNotFoundError as error:
            if (extra := extra_of(error.name or "")) is None:
                raise
            code = _complain(f"expected the package {error.name}, found none; {install(extra)}", 2)
        except RuntimeError as error:
            if not str(error).startswith(NO_HOME):
                raise
            what = "no home directory for a path that begins with ~"
            advice = "write the whole path (the cache's is FEDACCORD_CACHE), or set HOME"
            code = _complain(f"{what}; {advice}", 2)
        except OSError as error:  # of its output, such as a full disk
            code = _complain(error, 1)
        sys.exit(code or 0)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt as error:  # while a command loads, or in one that only reads
            return _complain("interrupted", exit_code(error))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """A command that refuses empty paths, and whose arguments have their help, which click 8.5
        takes from those of typer."""
        command = super().get_command(context, name)
        if command is not None and command.callback is not None:
            hints = get_type_hints(command.callback, include_extras=True)
            for argument in command.params:
                if isinstance(argument.type, click.Path):
                    argument.callback = _refuse_empty
                if isinstance(argument, TyperArgument) and argument.name in hints:
                    argument.help = hints[argument.name].__metadata__[0].help
        return command


def _refuse_empty(context: click.Context, argument: click.Parameter, value: Any) -> Any:
    """Refuse an empty path, such as of a variable that is not set: it would be this folder."""
    if "" in (value if isinstance(value, tuple) else (value,)):
        raise click.BadParameter("expected a path, got an empty one.", context, argument)
    return value


def _open_streams() -> None:
    """Streams that take every text: a character that their encoding lacks is escaped, and text for
    a stream that was closed, whose number the next file would get, is lost."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for the process
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Console(Console):
    """A console on which texts cannot move the cursor or change colours or the title. Its output
    may be closed, for which Rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _drop_if_lost(sys.__stdout__)

    def render_str(self, text: str, *args: Any, **kwargs: Any) -> Text:
        return super().render_str(printable(text), *args, **kwargs)


def printable(text: str) -> str:
    r"""Control characters and the like as escapes, as \x1b; newlines stay.

    For texts of run directories, sweeps and messages, which may come from other people.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def print_json(value: object) -> None:
    """Print JSON; numbers that are not finite must be None."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def make_console() -> Console:
    """Colours and bars on a terminal, else plain lines of any length."""
    terminal = sys.stdout.isatty()
    width = None if terminal else WIDE
    return _Console(
        force_terminal=terminal, width=width, highlight=False, markup=False, emoji=False
    )


@contextmanager
def even_unread() -> Iterator[None]:
    """A block that prints without ending the command: a stream that cannot be written, because of
    `head`, a closed terminal or a full disk, is ignored."""
    try:
        yield
    except OSError:
        for stream in (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr):  # Rich has proxies
            _drop_if_lost(stream)


def _drop_if_lost(stream: TextIO | None) -> None:
    """Redirect a stream to the null device if it cannot be written."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_progress(line: str) -> None:
    """Print a line; the command continues if that fails."""
    with even_unread():
        print(printable(line), flush=True)


def print_warning(line: str) -> None:
    """Print a line on stderr, above a progress bar; the command continues if that fails."""
    with even_unread():
        print(printable(line), file=sys.stderr, flush=True)


def print_table(console: Console, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without truncated cells: columns that do not fit into the console follow in tables
    below, each with the first column repeated."""
    columns = [[name, *cells] for name, *cells in zip(heading, *rows, strict=True)]
    for block in _blocks([*map(_wrapped, columns, _widths(columns, console.width))], console.width):
        table = Table(box=SIMPLE)
        for name, *cells in block:
            is_word = any(cell[:1].isalpha() for cell in cells)
            table.add_column(name, justify="left" if is_word else "right", no_wrap=True)
        for row in zip(*(cells for _, *cells in block), strict=True):
            table.add_row(*row)
        console.print(table)


GAP = 3  # columns of a terminal between two of a table, and one more in all


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Full widths if all columns fit. Otherwise the first column gets the space beside the widest
    other one, and the others the width of their cells and of their heading's longest word."""
    whole = [max(map(len, cells)) for cells in columns]
    if 1 + sum(GAP + width for width in whole) <= room:
        return whole
    widths = [
        max(len(text) for text in [*cells, *heading.split()] or [""]) for heading, *cells in columns
    ]
    most = room - 2 * GAP - 1
    longest = max((len(word) for text in columns[0] for word in text.split()), default=0)
    others = [min(width, most - min(longest, most // 2)) for width in widths[1:]]
    first = min(widths[0], max(longest, most - max(others, default=0)), most)
    return [first, *others]


def _wrapped(cells: Sequence[str], width: int) -> list[str]:
    return [textwrap.fill(cell, max(width, 1), break_on_hyphens=False) for cell in cells]


def _blocks(columns: Sequence[list[str]], room: int) -> Iterator[list[list[str]]]:
    """The columns, as many in a block as fit, the first one in each."""

    def width(cells: Sequence[str]) -> int:
        return GAP + max(len(line) for cell in cells for line in cell.splitlines() or [""])

    first, *others = columns
    block = [first]
    for column in others:
        if len(block) > 1 and 1 + sum(map(width, [*block, column])) > room:
            yield block
            block = [first]
        block.append(column)
    yield block


def stop(problem: object, code: int) -> NoReturn:
    raise typer.Exit(_complain(problem, code))


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """End the command with one line and exit code 2 if the block raises one of ``kinds``."""
    try:
        yield
    except kinds as error:
        stop(error, 2)


def check_output(option: str, file: Path) -> None:
    """End the command if the ``file`` cannot be written, or is one of a run directory's own."""
    from fedaccord.runs.directory import FILES
    from fedaccord.storage.files import is_special

    path = file.expanduser().resolve()
    if path.name in FILES and (path.parent / "summary.json").is_file():
        stop(f"{option}: expected a new file, got {file}, which is the run's own; name another", 2)
    given = file.expanduser().absolute()
    if given.is_dir() or not given.parent.is_dir():
        stop(f"{option}: expected a file in an existing folder, got {file}", 2)
    if not os.access(given if is_special(given) else path.parent, os.W_OK):  # as `replace` writes
        stop(f"{option}: expected a file that can be written, got {file}; name another", 2)


def warn(text: str) -> None:
    print_warning(f"warning: {_line(text)}")


def _complain(problem: object, code: int) -> int:
    print_warning(f"fedaccord: {_line(problem)}")
    return code


def _line(problem: object) -> str:
    return " ".join(str(problem).split())
