"""The command line: `fedaccord run`, `fedaccord methods`, `fedaccord doctor`.

Bad input gives one line on stderr and exit code 2. A command imports what it needs when it runs:
PyTorch and Flower take seconds, which `--help` should not.
"""

import inspect
import json
import logging
import math
import os
import platform
import re
import shutil
import socket
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import click
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

if TYPE_CHECKING:
    from fedaccord.config import RunConfig
    from fedaccord.strategies.base import Cost, Round
    from fedaccord.task.datasets import Dataset

PATHS = ("data-dir", "partition-file", "out-dir")  # keys that hold a path
WIDE = 1000  # columns where no terminal limits them: a table keeps a line a row


class _Commands(TyperGroup):
    """The commands, with wrong options told in one line, as any other bad input."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except click.ClickException as error:
            code = _complain(f"{error.format_message()} See fedaccord --help.", error.exit_code)
        sys.exit(code or 0)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Pairs = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Settings, as lr=0.05.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file of settings; KEY=VALUE pairs win.", metavar="FILE"),
]


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Federated optimisation under client drift, for Flower."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# --- fedaccord run --------------------------------------------------------------------------------


@app.command()
def run(
    pairs: Pairs = None,
    config: ConfigFile = None,
    list_keys: Annotated[
        bool, typer.Option("--list-keys", help="Print every key with its meaning, and exit.")
    ] = False,
) -> None:
    """Run a federation in this process and write its run directory.

    Settings are KEY=VALUE pairs with the keys of the run config; `fedaccord run --list-keys` lists
    them with defaults, ranges and meanings. Text needs no quotes. Two examples:

    fedaccord run algo=scaffold lr=0.05 num-server-rounds=50

    fedaccord run algo=fedavg relaxed-init.beta=0.1 dataset=cifar10 model=lenet download=true
    """
    from fedaccord import engine, runs
    from fedaccord.config import RunConfig
    from fedaccord.strategies.base import FederationError
    from fedaccord.task import load_task, partition

    console = _console()
    if list_keys:
        console.print(_keys_table())
        return
    path: Path | None = None
    try:
        settings = RunConfig.make(read_settings(pairs or [], config))
        with engine.quiet(), _warnings_on_stderr():
            with console.status("loading data"):
                # kept by load_task: the engine asks for the same task
                task = load_task(**settings.task(), num_clients=settings.num_clients)
            held = partition.report(list(task.clients.parts or []), task.clients.y.numpy())  # type: ignore[union-attr]
            path = runs.place(settings.out_dir, settings.name, settings.flat)
            settings = replace(settings, out_dir=str(path.parent), name=path.name)
            heading = [str(held).splitlines()[0], f"run directory: {path}"]
            display = _Display(console, settings, heading)
            with display.bar:
                engine.run(settings, on_round=display.on_round, on_client=display.on_client)
    except KeyboardInterrupt:
        begun = path is not None and display.begun
        told = f"{path} holds what was done so far" if begun else "nothing was written"
        _stop(f"interrupted: {told}", 130)
    except (ValueError, FileNotFoundError) as error:
        _stop(error, 2)
    except FederationError as error:
        _stop(f"{error}; {path} holds what was done so far", 1)
    except OSError as error:
        _stop(error, 1)
    console.print(_summary_table(settings.algo, json.loads((path / "summary.json").read_text())))
    console.print(f"run directory: {path}", soft_wrap=True)


def read_settings(pairs: Sequence[str], file: Path | None) -> dict[str, Any]:
    """Run-config values from ``key=value`` pairs and a TOML file, whose values the pairs replace.

    A value is read as TOML, else taken as text. Paths are made absolute, from the current folder.
    Raises ValueError on a pair without ``=`` and on a file that cannot be read.
    """
    from fedaccord import config

    values = _read_file(file) if file else {}
    known = config.keys()
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals:
            raise ValueError(f"expected key=value, as lr=0.05, got {pair!r}")
        wants_text = key in known and isinstance(known[key].default, str)
        values[key] = _value(text, wants_text)
    for key in PATHS:
        if values.get(key) and isinstance(values[key], str):
            values[key] = os.path.abspath(os.path.expanduser(values[key]))
    return values


def _value(text: str, wants_text: bool) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    allowed = str if wants_text else (str, bool, int, float)
    return value if isinstance(value, allowed) and len(parsed) == 1 else text


def _read_file(file: Path) -> dict[str, Any]:
    """Overrides, or the settings of a run directory's config.toml, with dotted keys."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--config: cannot read {file} ({error.strerror}); check the path"
        ) from None
    except ValueError as error:
        raise ValueError(f"--config: expected TOML in {file}, got what is none: {error}") from None
    table = content.get("run")  # of a run directory's config.toml, beside versions and commit
    return _flatten(table if isinstance(table, Mapping) else content)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, Mapping)
        flat |= _flatten(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


class _Display:
    """Shows a run as it goes: on a terminal by a bar, elsewhere by a line a round."""

    def __init__(self, console: Console, settings: "RunConfig", heading: list[str]) -> None:
        self.heading = heading  # lines to show once the run has begun
        self.begun = False
        self.rounds = settings.num_server_rounds
        share: float = settings.strategy["fraction_train"]
        self.cohort = max(1, round(share * settings.num_clients))
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
        for name, form in (("train-loss", "{:.4f}"), ("test-accuracy", "{:.2%}")):
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
        found = summary.get(key)
        return "none" if found is None else form.format(found)

    table = Table.grid(padding=(0, 2))
    table.add_row("method", algo)
    table.add_row("rounds", str(summary["rounds"]))
    for what in ("last", "mean-of-last-10", "best"):
        table.add_row(
            f"test accuracy, {what.replace('-', ' ')}", value(f"test-accuracy-{what}", "{:.2%}")
        )
    table.add_row("test loss, last", value("test-loss-last", "{:.4f}"))
    table.add_row("MB down", f"{summary['down-bytes'] / 1e6:.1f}")
    table.add_row("MB up", f"{summary['up-bytes'] / 1e6:.1f}")
    table.add_row("seconds", f"{summary['seconds']:.1f}")
    return table


def _keys_table() -> Table:
    from fedaccord import config
    from fedaccord.strategies.options import range_text

    table = Table("key", "default", "allowed", "meaning", box=SIMPLE)
    for key, field in config.keys().items():
        default = config.default(field)
        text = default if isinstance(default, str) else json.dumps(default)
        allowed = ", ".join(field.metadata["choices"]) or range_text(field)
        table.add_row(key, text, allowed, field.metadata["doc"])
    return table


# --- fedaccord methods ----------------------------------------------------------------------------


class _Method(NamedTuple):
    name: str
    file: str
    title: str
    arxiv: str  # the paper's number; empty: none
    cost: "Cost"


@app.command()
def methods(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """List the methods, their papers and what a round of each costs.

    Costs are in vectors of d, the number of parameters: down and up per active client, gradients
    per local step, client and server state.
    """
    from fedaccord.strategies import PLUGINS

    if markdown:
        typer.echo(methods_markdown(), nl=False)
        return
    found = _methods()
    notes = _notes(found)
    table = Table("method", "paper", "arXiv", box=SIMPLE)
    for column in COSTS:
        table.add_column(column, justify="right")
    for method in found:
        mark = f" [{notes.index(method.cost.note) + 1}]" if method.cost.note else ""
        table.add_row(method.name + mark, method.title, method.arxiv, *_costs(method.cost))
    console = _console()
    console.print(table)
    for number, note in enumerate(notes, 1):
        console.print(f"  [{number}] {note}")
    told = "in vectors of d; gradients per local step, down and up per active client and round"
    console.print(f"  Costs {told}.")
    console.print(f"  Any method also takes the plug-ins {', '.join(PLUGINS)}.")


def methods_markdown() -> str:
    """The methods as a Markdown table, with notes below it; links start at the repository root."""
    found = _methods()
    notes = _notes(found)
    lines = [
        f"| method | file | paper | {' | '.join(COSTS)} |",
        "|---|---|---|" + "---:|" * len(COSTS),
    ]
    for method in found:
        note = method.cost.note
        mark = f" <sup>{notes.index(note) + 1}</sup>" if note else ""
        file = f"[{Path(method.file).name}]({method.file})"
        link = f"[{method.title}](https://arxiv.org/abs/{method.arxiv})"
        cells = [f"`{method.name}`{mark}", file, link if method.arxiv else method.title]
        lines.append(f"| {' | '.join([*cells, *_costs(method.cost)])} |")
    if notes:
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


COSTS = ("down", "up", "gradients", "client", "server")  # fields of Cost


def _methods() -> list[_Method]:
    from fedaccord.strategies import METHODS

    found = []
    for name, kind in METHODS.items():
        text = inspect.getdoc(sys.modules[kind.__module__]) or ""
        first = " ".join(text.partition("\n\n")[0].split()).rstrip(".")
        title = first.partition(": ")[2] or first
        arxiv = re.search(r"arXiv:(\d{4}\.\d{4,5})", text)
        file = kind.__module__.replace(".", "/") + ".py"
        found.append(_Method(name, file, title, arxiv[1] if arxiv else "", kind.cost))
    return found


def _notes(found: list[_Method]) -> list[str]:
    """The distinct notes on costs; a note's number is its place."""
    return list(dict.fromkeys(method.cost.note for method in found if method.cost.note))


def _costs(cost: "Cost") -> list[str]:
    return [f"{getattr(cost, column):g}" for column in COSTS]


# --- fedaccord doctor -----------------------------------------------------------------------------


class Check(NamedTuple):
    mark: str  # ok, warn or fail
    what: str
    text: str


@app.command()
def doctor(pairs: Pairs = None, config: ConfigFile = None) -> None:
    """Check versions, devices, Flower's daemon, space, and whether the settings fit here.

    Takes settings as `fedaccord run` does. Fetches and decodes no data. Exit code 1: something
    fails.
    """
    from fedaccord.config import RunConfig

    out_dir, settings = Path.home() / "fedaccord-runs", None
    found = [*_check_versions(), *_check_devices(), _check_daemon()]
    try:
        settings = RunConfig.make(read_settings(pairs or [], config))
        out_dir = Path(settings.out_dir or out_dir)
    except (ValueError, FileNotFoundError) as error:
        found.append(Check("fail", "settings", str(error)))
    found += _check_disks(out_dir)
    if settings:
        found += _check_settings(settings)
    console = _console()
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in found:
        console.print(f"{check.mark:4}", style=colours[check.mark], end="  ")
        text = f"{check.what + ':':15}{' '.join(check.text.split())}"
        console.print(text, soft_wrap=True)
    if any(check.mark == "fail" for check in found):
        raise typer.Exit(1)


def _check_versions() -> Iterator[Check]:
    yield Check("ok", "python", platform.python_version())
    for package in ("fedaccord", "flwr", "torch", "torchvision", "ray"):
        try:
            have = version(package)
        except PackageNotFoundError:
            advice = {
                "ray": "not installed: `flwr run` cannot simulate; pip install 'flwr[simulation]'",
                "fedaccord": "not installed as a package; pip install it",
            }
            yield Check("warn", package, advice.get(package, f"unknown; pip install {package}"))
            continue
        pin = _pinned_flower() if package == "flwr" else ""
        if pin and not f"{have}.".startswith(f"{pin}."):
            advised = f"{have}, but FedAccord is written for {pin}; pip install 'flwr~={pin}.0'"
            yield Check("warn", package, advised)
        else:
            yield Check("ok", package, have)


def _pinned_flower() -> str:
    """The minor release of Flower that FedAccord's metadata asks for; empty where there is none."""
    try:
        needs = requires("fedaccord") or []
    except PackageNotFoundError:
        return ""
    pin = re.search(r">=(\d+\.\d+)", next((line for line in needs if line.startswith("flwr")), ""))
    return pin[1] if pin else ""


def _check_devices() -> Iterator[Check]:
    import torch

    yield Check("ok", "cpu", f"{os.cpu_count()} cores, PyTorch uses {torch.get_num_threads()}")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield Check("ok", f"cuda:{i}", f"{gpu.name}, {_size(gpu.total_memory)}")
    if not torch.cuda.device_count():
        yield Check("ok", "cuda", "no GPU")


def _check_daemon() -> Check:
    """Whether Flower's local daemon runs: it keeps the folder and environment it was started in."""
    what, port = "flower daemon", os.environ.get("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "39091")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        advice = f"expected a port, got {port!r}; unset FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"
        return Check("fail", what, advice)
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
    except OSError:
        told = f"none on port {port}; the first `flwr run` starts it in its folder and environment"
        return Check("ok", what, told)
    return Check(
        "warn",
        what,
        f"listens on port {port}, perhaps started from another folder or environment, which "
        "`flwr run` would use; to start it afresh end the process flower-superlink",
    )


def _check_disks(out_dir: Path) -> Iterator[Check]:
    from fedaccord.task.datasets import cache_folder

    for what, folder in (("run folder", out_dir), ("cache folder", cache_folder())):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            yield Check("fail", what, f"{folder} cannot be written; choose another")
            continue
        free = shutil.disk_usage(there).free
        text = f"{_size(free)} free in {folder}"
        yield Check("ok", what, text) if free > 1e9 else Check("warn", what, f"only {text}")


def _check_settings(settings: "RunConfig") -> Iterator[Check]:
    """Whether the settings are valid and fit into memory in process."""
    import torch

    from fedaccord.task import find_device, load_task, models

    try:
        yield Check("ok", "device", str(find_device(settings.device)))
        strategy = settings.build_strategy()
    except ValueError as error:
        yield Check("fail", "settings", str(error))
        return

    facts = KNOWN.get(settings.dataset)
    try:
        cached = _cached(settings)
    except FileNotFoundError as error:
        cached = None
        fetch = settings.download and facts
        yield Check("warn", "data", "to be fetched") if fetch else Check("fail", "data", str(error))
        if facts is None:
            return
    except ValueError as error:
        yield Check("fail", "data", str(error))
        return
    if cached:
        arrays = (cached.x_train, cached.y_train, cached.x_test, cached.y_test)
        shape, samples = tuple(cached.x_train.shape[1:]), len(cached.y_train)
        facts = _Facts(shape, cached.classes, samples, sum(x.nbytes for x in arrays))
    if facts is None:
        advice = "unknown until it is decoded; run once to have it checked"
        yield Check("warn", "data", f"{settings.dataset}: {advice}")
        return
    where = "decoded" if cached else "not decoded yet"
    told = f"{settings.dataset}, {facts.samples:,} training samples, {_size(facts.size)}, {where}"
    yield Check("ok", "data size", told)
    clients = settings.num_clients
    if cached:
        try:
            load_task(**settings.task(), num_clients=clients)
            yield Check("ok", "partition", f"{settings.partition}, {clients} clients")
        except (ValueError, FileNotFoundError) as error:
            yield Check("fail", "partition", str(error))
    elif clients > facts.samples and settings.partition != "file":
        told = f"{clients:,} clients for {facts.samples:,} samples; use fewer clients"
        yield Check("fail", "partition", told)

    try:
        with torch.device("meta"):
            module = models.build(settings.model, facts.shape, facts.classes, stem=settings.stem)
    except ValueError as error:
        yield Check("fail", "model", str(error))
        return
    d = sum(parameter.numel() for parameter in module.parameters())
    vector = d * (8 if strategy.precision == "float64" else 4)
    told = f"{settings.model}, d = {d:,} parameters, {_size(vector)} a vector"
    yield Check("ok", "model", told)

    cost = strategy.cost
    w = torch.empty(d, device="meta")
    kept = max(cost.client, _elements(strategy.client_rule().init(w, w)) / d)  # with plug-ins
    active = max(1, round(strategy.fraction_train * clients))
    state = clients * kept * vector
    server = cost.server * vector
    messages = active * (cost.down + cost.up) * vector
    work = 4 * vector  # model, gradient, buffers
    need, free = state + server + messages + work + facts.size, _free_memory()
    yield Check("ok", "client state", f"{clients:,} x {kept:g} vectors, {_size(state)}")
    yield Check("ok", "server state", f"{cost.server:g} vectors, {_size(server)}")
    told = f"at most {active:,} x {cost.down + cost.up:g} vectors a round, {_size(messages)}"
    yield Check("ok", "messages", told)
    told = f"{_size(need)} needed in process, without activations, {_size(free)} free"
    if need > free:
        advice = (
            "too big: take fewer clients, a smaller model or a method with less client state, or "
            "spread the clients over machines by Flower's simulation or deployment"
        )
        yield Check("fail", "memory", f"{told}; {advice}")
    else:
        tight = need > 0.7 * free
        yield Check("warn" if tight else "ok", "memory", told + ("; tight" if tight else ""))


class _Facts(NamedTuple):
    shape: tuple[int, ...]  # of a sample
    classes: int
    samples: int  # for training
    size: int  # bytes once decoded, of training and test samples


def _images(shape: tuple[int, int, int], classes: int, train: int, test: int) -> _Facts:
    a_sample = shape[0] * shape[1] * shape[2] + 8  # uint8 pixels, int64 label
    return _Facts(shape, classes, train, (train + test) * a_sample)


KNOWN = {
    "digits": _images((1, 8, 8), 10, 1438, 359),
    "fashion-mnist": _images((1, 28, 28), 10, 60_000, 10_000),
    "cifar10": _images((3, 32, 32), 10, 50_000, 10_000),
    "cifar100": _images((3, 32, 32), 100, 50_000, 10_000),
}


def _cached(settings: "RunConfig") -> "Dataset | None":
    """The decoded data set, None if it is not decoded yet. Raises FileNotFoundError if missing."""
    from fedaccord.task import datasets

    folder, name, size = datasets.cache_folder(), settings.dataset, settings.image_size
    root = Path(settings.data_dir) if settings.data_dir else folder / "downloads"
    source = datasets.DATASETS[name](root.resolve(), False, size)
    path = folder / f"{name}-{datasets._fingerprint(source.paths, size)}.safetensors"
    return datasets._read(path, name) if path.exists() else None


def _elements(state: Any) -> int:
    """Numbers in the vectors of a state, whose fields may be states themselves."""
    if state is None:
        return 0
    return sum(map(_elements, state)) if isinstance(state, tuple) else int(state.numel())


def _free_memory() -> float:
    """Bytes of memory that this process may still take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024.0 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:  # a container's own limit
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        return min(free, int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError):  # no group, or no limit
        return free


def _size(count: float) -> str:
    """Bytes in words."""
    power = min(int(math.log10(max(count, 1))) // 3, 4)
    return f"{count / 1000**power:,.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


# --- output ---------------------------------------------------------------------------------------


def _console() -> Console:
    """Colours and bars on a terminal; elsewhere plain lines of any length."""
    terminal = sys.stdout.isatty()
    width = None if terminal else WIDE
    return Console(force_terminal=terminal, width=width, highlight=False, markup=False)


def _complain(problem: object, code: int) -> int:
    typer.echo(f"fedaccord: {' '.join(str(problem).split())}", err=True)
    return code


def _stop(problem: object, code: int) -> NoReturn:
    raise typer.Exit(_complain(problem, code))
