"""Seconds and bytes of `fedaccord report` for 30 runs of 500 rounds.

    python benchmarks/report.py                                         # the table
    python benchmarks/report.py --markdown docs/results/report.md       # and the page

The runs are made up: 6 methods with 5 seeds each, 10 of 100 clients a round, 18 columns a round,
evaluated every round. Every repetition starts each command once, in a process of its own; CPU
seconds are those of the process in all its threads.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import timing

from fedaccord import config
from fedaccord.config import RunConfig
from fedaccord.runs import RunDirectory

METHODS = ("fedavg", "fedinit", "scaffold", "afedpd", "feddyn", "fedcm")
SEEDS, ROUNDS, CLIENTS, COHORT = 5, 500, 100, 10
CLI = (sys.executable, "-c", "from fedaccord.cli import app; app()")
MOST_SECONDS, MOST_MB = 3.0, 5.0  # of the report


def main() -> None:
    options = arguments().parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs, page = folder / "runs", folder / "report.html"
        for number, method in enumerate(METHODS):
            for seed in range(SEEDS):
                write(runs, method, seed, np.random.default_rng([number, seed]))
        commands = {"report": (runs, "--out", page), "compare": (runs,)}
        measurements: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for repetition in range(-1, options.repetitions):  # the first compiles
            for name, words in commands.items():
                pair = seconds([name, *map(str, words)])
                if repetition >= 0:
                    measurements[name].append(pair)
        size = page.stat().st_size / 1e6
    table = "\n".join(lines(measurements, size))
    print(table)
    if options.markdown:
        options.markdown.write_text(markdown(table, options))
    cpu = statistics.median(cpu for _, cpu in measurements["report"])
    if options.check and (cpu > MOST_SECONDS or size > MOST_MB):
        sys.exit(f"missed: the report takes {cpu:.2f} CPU seconds and {size:.2f} MB")


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    timing.add_page(parser)
    return parser


def write(folder: Path, method: str, seed: int, rng: np.random.Generator) -> None:
    """A run that looks like one of ten clients a round."""
    settings = RunConfig.make({"algo": method, "seed": seed, "dataset": "cifar10"})
    used = {"device": "cpu", "gradients-per-step": 1}
    run = RunDirectory(str(folder), f"{method}-{seed}", config.in_use(settings), used)
    run.save_classes([f"class {i}" for i in range(10)], rng.integers(0, 99, (CLIENTS, 10)).tolist())
    for number in range(1, ROUNDS + 1):
        row: dict[str, Any] = {"round": number}
        loss = float(2.3 * np.exp(-number / 200) + 0.02 * rng.random())
        row |= {"test-loss": loss, "test-accuracy": 1 - loss / 2.5, "train-loss": loss - 0.01}
        row |= {"test-loss-broadcast": loss, "test-accuracy-broadcast": 1 - loss / 2.5}
        row |= {"replies": COHORT, "dropped": 0, "counted": 1}
        row |= {"down-vectors": 10.0, "down-bytes": 31918480}
        row |= {"up-vectors": 10.0, "up-bytes": 31918480}
        row |= dict(zip(("drift", "consistency", "spread", "seconds"), rng.random(4), strict=True))
        cohort = [
            {"round": number, "client": int(client), "status": "ok", "num-examples": 500}
            | {"train-loss": rng.random(), "steps": 50, "up-vectors": 1.0, "up-bytes": 3191848}
            | {"seconds": rng.random()}
            for client in np.sort(rng.choice(CLIENTS, COHORT, replace=False))
        ]
        run.record(row, cohort)
    run.summarise("completed")


def seconds(words: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command."""
    return timing.seconds_of_process([*CLI, *words], f"fedaccord {words[0]}")


def lines(measurements: dict[str, list[tuple[float, float]]], size: float) -> list[str]:
    rows = ["| command | wall seconds: median (min to max) | CPU seconds, likewise | MB |"]
    rows.append("| --- | --: | --: | --: |")
    for name, pairs in measurements.items():
        wall, cpu = ([*column] for column in zip(*pairs, strict=True))
        file = f"{size:.2f}" if name == "report" else ""
        times = f"{timing.spread(wall, 2)} | {timing.spread(cpu, 2)}"
        rows.append(f"| fedaccord {name} | {times} | {file} |")
    return rows


def markdown(table: str, options: argparse.Namespace) -> str:
    return "\n".join(
        [
            "# Reports",
            "",
            f"`fedaccord report` and `fedaccord compare` of {len(METHODS) * SEEDS} runs of "
            f"{ROUNDS} rounds ({len(METHODS)} methods, {SEEDS} seeds, {COHORT} of {CLIENTS} "
            "clients a round, evaluated every round), the start of the process included. The runs "
            "are made up.",
            "",
            f"CPU, {os.cpu_count()} cores, Python {sys.version.split()[0]}; "
            f"{options.repetitions} repetitions.",
            "",
            table,
            "",
            f"Targets of the report: {MOST_SECONDS:g} CPU seconds (median) and {MOST_MB:g} MB.",
            "",
            f"Made by `{timing.command(arguments(), options)}`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
