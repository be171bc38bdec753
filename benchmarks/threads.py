"""Seconds of a small run, alone and beside busy cores, by number of threads.

    python benchmarks/threads.py                 # the table
    python benchmarks/threads.py --check         # exit 1 where the target is missed
    python benchmarks/threads.py --markdown docs/results/threads.md

Each run is a `fedaccord run` in a process of its own, as a user types it. Busy cores are processes
of this script that compute and never wait. A repetition goes through all runs, in another order
each time; ratios are taken within a repetition. CPU seconds hold what spinning would waste, also
where other work on the machine blurs the wall-clock seconds.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

RUNS = {  # the README's digits runs
    "scaffold": ("algo=scaffold", "relaxed-init.beta=0.05"),
    "fedinit": ("algo=fedinit", "num-server-rounds=10"),
}
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
THREADS = ("default", "1", "2", "2 spinning")
SPIN = "300000"  # turns before a thread of GNU OpenMP sleeps, where nothing else is said
TARGET = 1.5  # wall-clock seconds of the default beside one busy core, to those beside none


class Case(NamedTuple):
    run: str
    threads: str
    busy: int  # cores


class Seconds(NamedTuple):
    wall: float  # of the rounds
    cpu: float  # of the whole command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", nargs="+", choices=THREADS, default=THREADS[:3])
    parser.add_argument("--check", action="store_true", help="exit 1 where the target is missed")
    parser.add_argument("--markdown", type=Path, help="write setting and table to this file")
    options = parser.parse_args()
    if options.repetitions < 1:
        sys.exit(f"--repetitions: expected at least 1, got {options.repetitions}")
    cores = os.cpu_count() or 1
    cases = [Case(*c) for c in product(RUNS, options.threads, sorted({0, 1, cores}))]
    measured = measure(cases, options.repetitions)
    print(table(measured))
    if options.markdown:
        options.markdown.write_text(page(measured, options))
    missed = missed_targets(measured)
    print(*missed, sep="\n")
    if options.check and missed:
        sys.exit(1)


def measure(cases: list[Case], repetitions: int) -> dict[Case, list[Seconds]]:
    measured: dict[Case, list[Seconds]] = {case: [] for case in cases}
    for repetition in range(repetitions):
        for case in random.Random(repetition).sample(cases, len(cases)):
            with busy(case.busy):
                measured[case].append(seconds_of(case))
            print(repetition, *case, *measured[case][-1], file=sys.stderr, flush=True)
    return measured


@contextmanager
def busy(cores: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds_of(case: Case) -> Seconds:
    number, *spinning = case.threads.split()
    words = [*RUNS[case.run], *([] if number == "default" else [f"threads={number}"])]
    env = os.environ | ({"GOMP_SPINCOUNT": SPIN} if spinning else {})
    code = "from fedaccord.cli import app; app()"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, "run", *words, f"out-dir={folder}", "name=run"]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(words)} ended with {process.returncode}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return Seconds(summary["seconds"], used.ru_utime + used.ru_stime)


def ratios(measured: dict[Case, list[Seconds]], case: Case) -> list[float]:
    """Wall-clock seconds to those beside no busy core, a repetition each."""
    quiet = measured[case._replace(busy=0)]
    return [a.wall / b.wall for a, b in zip(measured[case], quiet, strict=True)]


def missed_targets(measured: dict[Case, list[Seconds]]) -> list[str]:
    lines = []
    for case in measured:
        if case.threads == "default" and case.busy == 1:
            ratio = statistics.median(ratios(measured, case))
            if ratio > TARGET:
                lines.append(f"missed: {case.run} takes {ratio:.2f} x, allowed {TARGET}")
    return lines


def spread(values: list[float], digits: int = 1) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(measured: dict[Case, list[Seconds]]) -> str:
    lines = [
        "| run | threads | busy cores | wall seconds: median (min to max) | to none busy | "
        "CPU seconds |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for case, found in measured.items():
        wall, cpu = ([s.wall for s in found], [s.cpu for s in found])
        ratio = spread(ratios(measured, case), 2) if case.busy else "–"
        lines.append(
            f"| {case.run} | {case.threads} | {case.busy} | {spread(wall)} | {ratio} | "
            f"{spread(cpu)} |"
        )
    return "\n".join(lines)


def page(measured: dict[Case, list[Seconds]], options: argparse.Namespace) -> str:
    """The table with what was measured, for docs/results."""
    lines = [
        "# Threads beside other work",
        "",
        f"Each run in a process of its own, {options.repetitions} repetitions, {os.cpu_count()} "
        f"cores, torch {version('torch')}, Python {platform.python_version()}. Wall-clock seconds "
        "are those of the rounds, CPU seconds those of the whole command, of which loading PyTorch "
        "and Flower is the larger part. Busy cores are processes that compute and never wait; the "
        "ratios are taken within a repetition.",
        "",
        *(f"- {name}: `fedaccord run {' '.join(words)}`" for name, words in RUNS.items()),
        "- threads: `default` is `threads=0`, one thread for these models; `2 spinning` is "
        "`threads=2` as GNU OpenMP waits where nothing else is said; the others wait passively",
        "",
        table(measured),
        "",
        f"Target (median): the default beside one busy core at most {TARGET} x beside none: "
        f"{'; '.join(missed_targets(measured)) or 'met'}.",
        "",
        "Made by `python benchmarks/threads.py --markdown docs/results/threads.md` with "
        f"`--repetitions {options.repetitions} --threads "
        f"{' '.join(repr(t) if ' ' in t else t for t in options.threads)}`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
