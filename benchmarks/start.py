"""Seconds until `fedaccord run` begins round 1, and of `fedaccord --help`.

    python benchmarks/start.py                                          # the table
    python benchmarks/start.py --markdown docs/results/start.md         # and the page

Every repetition starts each contestant once, in a process of its own, with compiled bytecode and
decoded data. CPU seconds are those of the process in all its threads.

    python      an interpreter that does nothing
    torch       import torch
    typer       import Typer and what it prints help with
    help        fedaccord --help
    round 1     fedaccord run with its defaults, ended where round 1 begins
"""

import argparse
import os
import statistics
import sys
import tempfile

import timing

CLI = "import sys; from fedaccord.cli import app; sys.argv = ['fedaccord', *sys.argv[1:]]; "
ROUND_1 = CLI + (
    "from fedaccord.cli.progress import Display; import os; "
    "Display.on_round = lambda *_: os._exit(0); app()"  # the first call is before round 1
)
CONTESTANTS = {
    "python": ("pass", ()),
    "torch": ("import torch", ()),
    "typer": ("import typer.rich_utils", ()),
    "help": (CLI + "app()", ("--help",)),
    "round 1": (ROUND_1, ("run",)),
}
TARGETS = {"help": 0.3, "round 1": 3.0}  # wall seconds


def main() -> None:
    options = arguments().parse_args()
    measurements: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(-1, options.repetitions):  # the first decodes and compiles
            for name in CONTESTANTS:
                pair = seconds(name, folder)
                if repetition >= 0:
                    measurements[name].append(pair)
    table = "\n".join(lines(measurements))
    print(table)
    if options.markdown:
        options.markdown.write_text(page(table, options))
    walls = {name: statistics.median(w for w, _ in measurements[name]) for name in TARGETS}
    missed = [
        f"missed: {n} takes {walls[n]:.2f} s" for n, most in TARGETS.items() if walls[n] > most
    ]
    if options.check and missed:
        sys.exit("\n".join(missed))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    timing.add_page(parser)
    return parser


def seconds(name: str, folder: str) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    code, words = CONTESTANTS[name]
    more = [f"out-dir={folder}"] if "run" in words else []
    return timing.seconds_of_process([sys.executable, "-c", code, *words, *more], name)


def lines(measurements: dict[str, list[tuple[float, float]]]) -> list[str]:
    rows = ["| process | wall seconds: median (min to max) | CPU seconds, likewise |"]
    rows.append("| --- | --: | --: |")
    for name, pairs in measurements.items():
        wall, cpu = ([*column] for column in zip(*pairs, strict=True))
        rows.append(f"| {name} | {timing.spread(wall, 2)} | {timing.spread(cpu, 2)} |")
    return rows


def page(table: str, options: argparse.Namespace) -> str:
    import torch

    return "\n".join(
        [
            "# Start",
            "",
            "The time until `fedaccord run` with its defaults (FedInit on the digits, 20 "
            "clients) begins round 1, and until `fedaccord --help` has printed. `python` is an "
            "interpreter that does nothing, `torch` one that imports PyTorch, which is most of the "
            "start, `typer` one that imports the library of the command line and the one that "
            "prints its help, which is most of the help. Each is a process of its own; bytecode is "
            "compiled, data are decoded and all files have been read beforehand.",
            "",
            f"CPU, {os.cpu_count()} cores, Python {sys.version.split()[0]}, torch "
            f"{torch.__version__}; {options.repetitions} repetitions.",
            "",
            table,
            "",
            f"Targets (medians, wall seconds): {TARGETS['help']} for help, {TARGETS['round 1']:g} "
            "for round 1.",
            "",
            f"Made by `{timing.command(arguments(), options)}`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
