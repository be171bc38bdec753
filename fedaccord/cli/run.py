"""`fedaccord run`: a federation in this process, shown as it goes."""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedaccord.cli.console import make_console, stop
from fedaccord.cli.settings import ConfigFile, Pairs, read_settings

if TYPE_CHECKING:
    from fedaccord.config import RunConfig
    from fedaccord.federation.round import Round

SHOWN = {"train-loss": "{:.4f}", "test-accuracy": "{:.2%}", "personal-accuracy": "{:.2%}"}
MORE = {  # evaluations that only some runs have
    "personal-accuracy": "accuracy of personal models",
    "test-accuracy-nodes": "test accuracy of the nodes",
    "train-accuracy": "train accuracy",
    "generalisation-gap": "generalisation gap",
}


def run(
    pairs: Pairs = None,
    config: ConfigFile = None,
    list_keys: Annotated[
        bool, typer.Option("--list-keys", help="Print every key with its meaning, and exit.")
    ] = False,
) -> None:
    """Run a federation in this process and write its run directory.

    Settings are KEY=VALUE pairs with the keys of the run config; `fedaccord run --list-keys` lists
    them with defaults, ranges and meanings. Strings need no quotes. Two examples:

    fedaccord run algo=scaffold lr=0.05 num-server-rounds=50

    fedaccord run algo=fedavg relaxed-init.beta=0.1 dataset=cifar10 model=lenet download=true
    """
    from fedaccord import engine, runs, threads
    from fedaccord.config import RunConfig
    from fedaccord.engine.simulate import partition_report
    from fedaccord.federation.errors import FederationError
    from fedaccord.memory import keep_freed_memory
    from fedaccord.task import load_task

    console = make_console()
    if list_keys:
        console.print(_keys_table())
        return
    keep_freed_memory()  # this process is ours
    path: Path | None = None
    display: Display | None = None
    try:
        settings = RunConfig.make(read_settings(pairs or [], config))
        threads.check(settings.threads)
        with engine.quiet(), _warnings_on_stderr():
            with console.status("loading data"):
                # kept by load_task: the engine asks for the same task
                task = load_task(settings.task, num_clients=settings.num_clients)
            clients = str(partition_report(task)).splitlines()[0]
            chosen = str(threads.of_task(settings.threads, task, settings.strategy))
            path = runs.place(settings.out_dir, settings.name, settings.flat)
            settings = replace(settings, out_dir=str(path.parent), name=path.name)
            display = Display(console, settings, [clients, chosen, f"run directory: {path}"])
            with display.bar:
                engine.run(settings, on_round=display.on_round, on_client=display.on_client)
    except KeyboardInterrupt:
        begun = display is not None and display.begun
        rest = f"{path} holds what was done so far" if begun else "nothing was written"
        stop(f"interrupted: {rest}", 130)
    except (ValueError, FileNotFoundError) as error:
        stop(error, 2)
    except FederationError as error:
        stop(f"{error}; {path} holds what was done so far", 1)
    except OSError as error:
        stop(error, 1)
    console.print(_summary_table(settings.algo, json.loads((path / "summary.json").read_text())))
    console.print(f"run directory: {path}", soft_wrap=True)


class Display:
    """Shows a run as it goes: on a terminal by a bar, elsewhere by a line a round."""

    def __init__(self, console: Console, settings: "RunConfig", heading: list[str]) -> None:
        self.heading = heading  # lines to show once the run has begun
        self.begun = False
        self.rounds = settings.num_server_rounds
        self.cohort = settings.strategy.cohort_size(settings.num_clients)
        self.number = self.replies = 0
        self.shown: dict[str, str] = {}  # the latest of each metric: not every round has all
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=self.rounds, metrics="")

    def on_round(self, round: "Round") -> None:
        if not self.begun:
            self.begun = True
            for line in self.heading:
                self.bar.console.print(line, soft_wrap=True)
        self.number, self.replies = round.number, 0
        for name, form in SHOWN.items():
            if name in round.metrics:
                self.shown[name] = f"{name.replace('-', ' ')} {form.format(round.metrics[name])}"
        number, metrics = f"round {round.number}/{self.rounds}", "  ".join(self.shown.values())
        self.bar.update(self.task, completed=round.number, description=number, metrics=metrics)
        if self.bar.disable:
            print(number, metrics, sep="  ", flush=True)

    def on_client(self, client: int) -> None:
        self.replies += 1
        share = min(self.replies / self.cohort, 1)  # Bernoulli cohorts may be larger
        self.bar.update(self.task, completed=self.number + share)


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Flower's log as plain lines through sys.stderr, which a progress bar moves out of its way."""
    log = logging.getLogger("flwr")
    handlers = log.handlers
    log.handlers = [_Lines()]
    try:
        yield
    finally:
        log.handlers = handlers


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def _summary_table(algo: str, summary: Mapping[str, Any]) -> Table:
    def value(key: str, form: str) -> str:
        number = summary.get(key)
        return "none" if number is None else form.format(number)

    table = Table.grid(padding=(0, 2))
    table.add_row("method", algo)
    table.add_row("rounds", str(summary["rounds"]))
    for what in ("last", "mean-of-last-10", "best"):
        table.add_row(
            f"test accuracy, {what.replace('-', ' ')}", value(f"test-accuracy-{what}", "{:.2%}")
        )
    table.add_row("test loss, last", value("test-loss-last", "{:.4f}"))
    for key, what in MORE.items():
        if f"{key}-last" in summary:
            table.add_row(f"{what}, last", value(f"{key}-last", "{:.2%}"))
    table.add_row("MB down", f"{summary['down-bytes'] / 1e6:.1f}")
    table.add_row("MB up", f"{summary['up-bytes'] / 1e6:.1f}")
    if "peer-bytes" in summary:
        table.add_row("MB between peers", f"{summary['peer-bytes'] / 1e6:.1f}")
    table.add_row("seconds", f"{summary['seconds']:.1f}")
    return table


def _keys_table() -> Table:
    from fedaccord import config
    from fedaccord.core.options import meaning

    table = Table("key", "default", "allowed", "meaning", box=SIMPLE)
    for key, field in config.keys().items():
        default = config.default(field)
        text = default if isinstance(default, str) else json.dumps(default)
        table.add_row(key, text, config.allowed(key, field), meaning(field))
    return table
