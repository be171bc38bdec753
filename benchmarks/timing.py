"""What the speed benchmarks share: the setting, a round of the engine, the clock, the ratios."""

import argparse
import logging
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from fedaccord import recorded_run
from fedaccord.config import RunConfig
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.fleet import Fleet
from fedaccord.federation.run import Run
from fedaccord.process.allocator import keep_freed_memory
from fedaccord.task import Task

SETTING: dict[str, Any] = {
    "dataset": "cifar10",
    "model": "lenet",
    "partition": "dirichlet",
    "dirichlet-alpha": 0.1,
    "replacement": "cyclic",
    "num-clients": 100,
    "batch-size": 50,
    "lr": 0.1,
    "weight-decay": 0.001,
    "clip-norm": 10.0,
    "seed": 0,
}
REPOSITORY = Path(__file__).resolve().parents[1]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
OneRound = Callable[[list[int]], None]  # of the clients given


def parser(file: str, doc: str) -> argparse.ArgumentParser:
    """Of a script with its own ``__file__`` and ``__doc__``."""
    return argparse.ArgumentParser(prog=Path(file).name, description=doc.partition("\n")[0])


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every timing, on the CPU unless `add_device` follows."""
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch, for all contestants")
    parser.set_defaults(device="cpu")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="wall: elapsed time; cpu: CPU seconds, for one thread on a busy machine",
    )
    add_page(parser)


def add_page(parser: argparse.ArgumentParser) -> None:
    """What becomes of the results of a script with targets."""
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--markdown", type=Path, help="write setting and tables to this file")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")


def prepare(options: argparse.Namespace) -> None:
    """Set threads and logging; exits on options that do not fit together."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("--device: expected a GPU, found none: use --device cpu")
    if options.device != "cpu" and options.clock == "cpu":
        sys.exit(f"--clock cpu does not see the work of {options.device}: use --clock wall")
    if options.repetitions < 1:
        sys.exit(f"--repetitions: expected at least 1, got {options.repetitions}")
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as `fedaccord run` does
    logging.getLogger("flwr").setLevel(logging.WARNING)


def engine_round(task: Task, config: RunConfig, fleet: Fleet | None = None) -> OneRound:
    """What `Run.play` does in a round, without evaluation; fleet: by default in this process.

    Raises RuntimeError if a client fails: its steps would be missing in the seconds.
    """
    method, rounds = config.strategy, config.num_server_rounds
    fleet = fleet or LocalFleet(task, vectorize=config.vectorize == "on", home=task.device)
    cohorts = [[*range(fleet.num_clients)]] * rounds  # until they come
    initial = recorded_run.initial_arrays(task, method.model_settings, fleet.home)
    run = Run(method, fleet, initial, rounds, cohorts=cohorts)
    run.begin()

    def one_round(cohort: list[int]) -> None:
        t = run.state.t
        cohorts[t:] = [cohort]
        if (replies := run.train_round().metrics["replies"]) != len(cohort):
            raise RuntimeError(
                f"{config.algo}: expected {len(cohort)} replies in round {t + 1}, got {replies:g}"
            )

    return one_round


def seconds_of(one_round: OneRound, cohort: list[int], options: argparse.Namespace) -> float:
    clock = CLOCKS[options.clock]
    synchronise(options.device)
    began = clock()
    one_round(cohort)
    synchronise(options.device)
    return clock() - began


def turns(contestants: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """CPU seconds of each repetition, by contestant; they take turns in random order."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant()  # allocates, warms up
    order, shuffle = [*contestants], random.Random(0).shuffle
    for _ in range(repetitions):
        shuffle(order)
        for name in order:
            began = time.process_time()
            contestants[name]()
            seconds[name].append(time.process_time() - began)
    return seconds


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds_of_process(command: list[str], name: str) -> tuple[float, float]:
    """Wall and CPU seconds of a process that must end well; name: what it is called.

    It may keep its bytecode, as a user's does: some machines forbid it, and each start compiles.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{name} ended with {process.returncode}")
    return wall, used.ru_utime + used.ru_stime


def spread(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def conditions(clients: int, steps: int, options: argparse.Namespace) -> str:
    """The line above a table."""
    kind = "wall-clock" if options.clock == "wall" else "CPU"
    return (
        f"{options.device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}; "
        f"{clients} clients x {steps} steps of batch {SETTING['batch-size']}, "
        f"{options.repetitions} repetitions; {kind} seconds"
    )


def hardware(options: argparse.Namespace) -> str:
    return f"CPU, {os.cpu_count()} cores" if options.device == "cpu" else "GPU"


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on beside the setting."""
    return {
        "device": options.device,
        "clock": options.clock,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


# --- pages ----------------------------------------------------------------------------------------


def command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The command line that makes a page: every option that differs from its default.

    A path other than the page's own is the reader's choice, as in `--help`: `--out OUT`.
    """
    positional, named = [], []
    for action in parser._actions:  # argparse has no public list of them
        values = _values(getattr(options, action.dest, action.default))
        if action.help == argparse.SUPPRESS or values == _values(action.default):
            continue
        words = [_word(action, value) for value in values]
        if action.option_strings:
            named += [action.option_strings[-1], *(words if action.nargs != 0 else ())]
        else:
            positional += words
    return " ".join(["python", f"benchmarks/{parser.prog}", *positional, *named])


def _values(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _word(action: argparse.Action, value: Any) -> str:
    if isinstance(value, Path):
        if action.dest != "markdown":
            return str(action.metavar or action.dest.upper())
        path = value.absolute()
        value = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else value
    return shlex.quote(f"{value:.12g}" if isinstance(value, float) else str(value))


def rewrite(page: Path, text: str, own: Iterable[str] = ()) -> None:
    """Replace those sections of a page that ``text`` has, by their headings; others stay.

    own: headings that a script may write; those that ``text`` lacks are removed.
    """
    own = {*own}
    old, new = _sections(page.read_text("utf-8") if page.exists() else ""), _sections(text)
    kept = {head: section for head, section in old.items() if head in new or head not in own}
    parts = (section.strip() + "\n" for section in (kept | new).values())
    page.write_text("\n".join(parts), encoding="utf-8")


def _sections(text: str) -> dict[str, str]:
    """By the line of the heading."""
    parts = re.split(r"(?m)^(?=##? )", text)
    return {part.partition("\n")[0].rstrip(): part for part in parts if part.strip()}
