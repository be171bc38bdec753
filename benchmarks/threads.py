"""Seconds of a small run, alone and beside busy cores, by number of threads.

    python benchmarks/threads.py                 # the table
    python benchmarks/threads.py --check         # exit 1 if the target is missed
    python benchmarks/threads.py --markdown docs/results/threads.md

Every number of threads has a process of its own, whose OpenMP waits as that of `fedaccord run`.
Busy cores are processes that compute and never wait. A repetition goes through all runs, in another
order each time; ratios are taken within a repetition. CPU seconds hold what spinning wastes, also
where other work on the machine blurs the wall-clock seconds.
"""

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

RUNS = {  # one that corrects drift, one that relaxes the start
    "scaffold": "algo=scaffold relaxed-init.beta=0.05",
    "fedinit": "algo=fedinit num-server-rounds=10",
}
SPIN = "300000"  # turns before a thread of GNU OpenMP sleeps, its default
THREADS = {  # run config and environment
    "default": ("threads=0", {}),
    "1": ("threads=1", {}),
    "2": ("threads=2", {}),
    "2 spinning": ("threads=2", {"GOMP_SPINCOUNT": SPIN}),
}
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
TARGET = 1.5  # wall-clock seconds of the default beside one busy core, to those beside none


class Case(NamedTuple):
    run: str
    threads: str
    busy: int  # cores


class Seconds(NamedTuple):
    wall: float
    cpu: float


def main() -> None:
    options = arguments().parse_args()
    if options.worker:
        work()
        return
    if options.repetitions < 1:
        sys.exit(f"--repetitions: expected at least 1, got {options.repetitions}")
    load = os.getloadavg()[1]
    busy = sorted({0, 1, os.cpu_count() or 1})
    cases = [Case(*case) for case in product(RUNS, options.threads, busy)]
    measured = measure(cases, options.repetitions)
    print(table(measured))
    if options.markdown:
        options.markdown.write_text(page(measured, load, options))
    missed = missed_targets(measured)
    print(*missed, sep="\n")
    if options.check and missed:
        sys.exit(1)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", nargs="+", choices=THREADS, default=["default", "1", "2"])
    parser.add_argument("--check", action="store_true", help="exit 1 if the target is missed")
    parser.add_argument("--markdown", type=Path, help="write setting and table to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def measure(cases: list[Case], repetitions: int) -> dict[Case, list[Seconds]]:
    measured: dict[Case, list[Seconds]] = {case: [] for case in cases}
    workers = {name: start_worker(name) for name in dict.fromkeys(c.threads for c in cases)}
    for worker, run in product(workers.values(), RUNS):
        ask(worker, run)  # first runs load data
    for repetition in range(repetitions):
        for case in random.Random(repetition).sample(cases, len(cases)):
            with busy_cores(case.busy):
                measured[case].append(ask(workers[case.threads], case.run))
            print(repetition, *case, *measured[case][-1], file=sys.stderr, flush=True)
    for worker in workers.values():
        worker.communicate()  # no more lines: it ends
    return measured


def start_worker(threads: str) -> "subprocess.Popen[str]":
    pair, more = THREADS[threads]
    command = [sys.executable, __file__, "--worker"]
    environment = os.environ | more | {"SETTING": pair}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def ask(worker: "subprocess.Popen[str]", run: str) -> Seconds:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(RUNS[run], file=worker.stdin, flush=True)
    reply = worker.stdout.readline().split()
    if not reply:
        sys.exit(f"{RUNS[run]} failed")
    return Seconds(*map(float, reply))


def work() -> None:
    """Run the settings that come in lines, and answer each with its seconds."""
    from fedaccord.process.threads import wait_passively

    wait_passively()
    from fedaccord import engine
    from fedaccord.cli.settings import read_settings
    from fedaccord.config import RunConfig

    for number, line in enumerate(sys.stdin):
        with tempfile.TemporaryDirectory() as folder, engine.quiet():
            words = [*line.split(), os.environ["SETTING"], f"out-dir={folder}", f"name={number}"]
            config = RunConfig.make(read_settings(words, None))
            wall, cpu = time.perf_counter(), time.process_time()
            engine.run(config)
            print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", LOOP]
    # of sessions of their own, as other programs: Linux shares the cores among sessions first
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        time.sleep(0.2)  # they have started
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


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


def spread(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(measured: dict[Case, list[Seconds]]) -> str:
    lines = [
        "| run | threads | busy cores | wall seconds: median (min to max) | to none busy | "
        "CPU seconds |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for case, times in measured.items():
        wall, cpu = ([s.wall for s in times], [s.cpu for s in times])
        ratio = spread(ratios(measured, case)) if case.busy else "–"
        lines.append(
            f"| {case.run} | {case.threads} | {case.busy} | {spread(wall)} | {ratio} | "
            f"{spread(cpu)} |"
        )
    return "\n".join(lines)


def page(measured: dict[Case, list[Seconds]], load: float, options: argparse.Namespace) -> str:
    """The table with what was measured, for docs/results. load: of the machine beforehand."""
    from timing import command  # with PyTorch, which a worker imports after it has set up threads

    cores = os.cpu_count()
    spinning = "; `2 spinning` is `threads=2` with GNU OpenMP's default waiting"
    lines = [
        "# Threads under other load",
        "",
        f"Seconds of a run, {options.repetitions} repetitions; {cores} cores, torch "
        f"{version('torch')}, Python {platform.python_version()}. Busy cores are processes that "
        "compute and never wait; ratios are taken within a repetition. Other load on the machine "
        "slowed every run, also those without a busy core: the load average was "
        f"{load:.1f} in the five minutes before. CPU seconds depend on it less.",
        "",
        *(f"- {name}: `fedaccord run {words}`" for name, words in RUNS.items()),
        "- threads: `default` is `threads=0`, one thread for this model, so it computes as `1`: "
        "their difference is noise; threads wait passively"
        + (spinning if "2 spinning" in options.threads else ""),
        "",
        table(measured),
        "",
        f"Target (median): the default with one busy core at most {TARGET} x without: "
        f"{'; '.join(missed_targets(measured)) or 'met'}.",
        "",
        f"Made by `{command(arguments(), options)}`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
