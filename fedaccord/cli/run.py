"""`fedaccord run`: a federation in this process, with its progress."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedaccord.cli.baseline import comparison
from fedaccord.cli.columns import columns_tables
from fedaccord.cli.console import make_console, print_json, print_warning, stop, warn
from fedaccord.cli.keys import keys_json, keys_text
from fedaccord.cli.progress import Display, summary_table
from fedaccord.cli.settings import ConfigFile, Pairs, Preset, read_begun, read_settings, unread
from fedaccord.process.allocator import keep_freed_memory, uncollected
from fedaccord.process.interrupts import exit_code, interruptible

if TYPE_CHECKING:
    from fedaccord.config import RunConfig


@interruptible()
def run(
    pairs: Pairs = None,
    config: ConfigFile = None,
    preset: Preset = None,
    list_keys: Annotated[
        bool, typer.Option("--list-keys", help="Print every key with its meaning, and exit.")
    ] = False,
    list_columns: Annotated[
        bool,
        typer.Option(
            "--list-columns", help="Print the meaning of every number of a run directory, and exit."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list-keys: print JSON.")] = False,
) -> None:
    """Run a federation in this process and write its run directory.

    Settings are KEY=VALUE pairs with the keys of the run config; `fedaccord run --list-keys` lists
    them with defaults, ranges and meanings. Strings need no quotes. Two examples:

    fedaccord run algo=scaffold lr=0.05 num-server-rounds=50

    fedaccord run algo=fedavg relaxed-init.beta=0.1 dataset=cifar10 model=lenet download=true

    With the settings of a paper's experiment: fedaccord run --preset scaffold num-server-rounds=50
    """
    console = make_console()
    if as_json and not list_keys:
        stop("--json: expected --list-keys with it; a run writes its numbers to files", 2)
    if list_keys:
        print_json(keys_json()) if as_json else typer.echo(keys_text())
        return
    if list_columns:
        console.print(*columns_tables())
        return
    arguments, begun = pairs or [], cache(lambda: read_begun(config, preset))
    federate(
        console,
        lambda: read_settings(arguments, begun()),
        lambda settings: unread(settings, arguments, begun()),
        preset=preset,
    )


def federate(
    console: Console,
    read: Callable[[], dict[str, Any]],
    warnings: Callable[["RunConfig"], list[str]] = lambda _: [],
    at: int | None = None,
    preset: str | None = None,
) -> None:
    """Start or resume the run with the settings that ``read`` returns; a failure ends the process
    with one line. at: the checkpoint to resume from; None: the last. preset: its name, if the
    settings begin with one."""
    with uncollected():
        import psutil  # noqa: F401  of the extra `run`: fail early without it

        from fedaccord import engine, runs
        from fedaccord.config import RunConfig
        from fedaccord.engine.run import partition_report
        from fedaccord.federation.errors import FederationError
        from fedaccord.process import threads
        from fedaccord.runs.logbook import check_directory
        from fedaccord.task import load_task
        from fedaccord.task.multiplications import threads_of_task

    keep_freed_memory()  # this process is ours
    path: Path | None = None
    try:
        settings = RunConfig.make(read())
        settings.strategy.check_clients(settings.num_clients)
        check_directory(settings)  # before Ray starts, as an interrupt then names the folder
        for line in warnings(settings):
            warn(line)
        threads.check(settings.threads)
        with engine.quiet(), _warnings_on_stderr():
            with console.status("loading data"):
                # load_task caches it: the engine loads the same task
                task = load_task(settings.task, num_clients=settings.num_clients)
            clients = str(partition_report(task)).splitlines()[0]
            chosen = threads_of_task(settings.threads, task, settings.strategy, settings.workers)
            is_new = not Path(settings.out_dir).is_dir()
            place = runs.place if settings.name else runs.make  # a name of its own, at once
            path = place(settings.out_dir, settings.name, settings.flat)
            settings = replace(settings, out_dir=str(path.parent), name=path.name)
            display = Display(console, settings, [clients, str(chosen), f"run directory: {path}"])
            try:
                with display.bar:
                    engine.run(
                        settings, on_round=display.on_round, on_client=display.on_client, at=at
                    )
            finally:
                with suppress(OSError):  # if nothing was written
                    path.rmdir()
                    if is_new:
                        path.parent.rmdir()
    except KeyboardInterrupt as error:
        stop(f"interrupted{_rest(path)}", exit_code(error))
    except (ValueError, FileNotFoundError) as error:
        stop(error, 2)
    except FederationError as error:
        if path is not None:
            console.print(summary_table(settings.algo, path))
        stop(f"{error}; {path} has the finished rounds", 1)
    except OSError as error:
        stop(f"{error}{_rest(path)}", 1)
    assert path is not None
    console.print(summary_table(settings.algo, path))
    console.print(f"run directory: {path}", soft_wrap=True)
    if other := comparison(settings, preset):
        console.print(f"compare: {other}", soft_wrap=True)


def _rest(path: Path | None) -> str:
    """The end of the line of a run that ended early: what is left of it."""
    from fedaccord.runs.checkpoint import Checkpoints
    from fedaccord.runs.logbook import FOLDER

    if path is None or not path.exists():
        return ": nothing was written"
    if not Checkpoints(path / FOLDER).numbers():
        return (
            f" before its first checkpoint; remove {path} or choose another name, and start again"
        )
    return f": {path} has the finished rounds; fedaccord resume {quote(str(path))} continues it"


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Flower's log as plain lines on sys.stderr, which a progress bar prints above itself."""
    log = logging.getLogger("flwr")
    handlers = log.handlers
    log.handlers = [_Lines()]
    try:
        yield
    finally:
        log.handlers = handlers


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_warning(f"{record.levelname.lower()}: {record.getMessage()}")
