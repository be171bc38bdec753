"""Accuracy of runs with bfloat16 passes beside float32, over seeds.

    python benchmarks/precision.py --out ~/precision                        # digits, the model cnn
    python benchmarks/precision.py --out ~/precision dataset=fashion-mnist model=lenet

Each method runs in both precisions from the same seeds: the same initial model, partition, cohorts
and batches. KEY=VALUE pairs replace settings of all runs. Runs that are complete below --out are
not done again; the tables hold what is there. With --markdown only the section of the table is
written again.
"""

import argparse
import logging
import statistics
import sys
from pathlib import Path
from typing import Any

import timing

from fedaccord import engine, runs
from fedaccord.cli.settings import read_settings
from fedaccord.config import RunConfig, affecting
from fedaccord.runs import reader

METHODS = ("fedavg", "fedinit", "feddyn", "afedpd")
PRECISIONS = ("float32", "bfloat16")
SETTING: dict[str, Any] = {
    "dataset": "digits",
    "model": "cnn",
    "num-clients": 20,
    "fraction-train": 0.25,
    "num-server-rounds": 100,
    "local-steps": 5,
    "batch-size": 20,
    "eval-every": 10,
    "threads": 1,
    "vectorize": "off",
}
LAST = 3  # evaluations whose mean accuracy counts


def main() -> None:
    options = arguments().parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    out = options.out.expanduser().absolute()
    accuracies: dict[str, dict[str, list[float]]] = {
        m: {p: [] for p in PRECISIONS} for m in METHODS
    }
    try:
        setting = SETTING | read_settings(options.pairs, None) | {"out-dir": str(out)}
        for seed in range(options.seeds):
            for method in METHODS:
                for precision in PRECISIONS:
                    own = {"algo": method, "precision": precision, "seed": seed}
                    accuracies[method][precision].append(accuracy(setting | own))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
    text = table(setting, accuracies)
    print(text)
    if options.markdown:
        timing.rewrite(options.markdown, page(text, options))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("pairs", nargs="*", metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write setting and table to this file")
    return parser


def accuracy(settings: dict[str, Any]) -> float:
    """Test accuracy in percent, the mean of a run's last evaluations."""
    keys = ("dataset", "model", "algo", "precision", "seed")
    name = "-".join(str(settings[key]) for key in keys)
    path = Path(settings["out-dir"]) / name
    config = RunConfig.make(settings | {"name": name})
    if not (path.exists() and runs.status(path) == "completed"):
        engine.run(config)
    run = reader.read(path)
    before, free = RunConfig.make(run.settings).flat, affecting("speed", "place")
    for key, value in config.flat.items():
        if key not in free and before[key] != value:
            raise ValueError(
                f"{path}: expected a run with {key}={value}, got {before[key]}: use another --out"
            )
    accuracies = run.metrics["test-accuracy"].dropna()
    return 100 * float(accuracies.tail(LAST).mean())


def page(table: str, options: argparse.Namespace) -> str:
    """The head of the page and its first section; the others are written by hand."""
    return "\n".join(
        [
            "# bfloat16 beside float32",
            "",
            "## Accuracy",
            "",
            table,
            "",
            f"Made by `{timing.command(arguments(), options)}`.",
            "",
        ]
    )


def table(setting: dict[str, Any], accuracies: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: mean and range over the seeds, and the differences seed by seed."""
    settings = ", ".join(f"{key}={value}" for key, value in setting.items() if key != "out-dir")
    lines = [
        f"Test accuracy in %, mean of the last {LAST} evaluations, over the seeds: mean (min to "
        f"max). {settings}.",
        "",
        f"| method | {' | '.join(PRECISIONS)} | bfloat16 - float32, seed by seed |",
        "| --- | --: | --: | --: |",
    ]
    for method, of in accuracies.items():
        cells = [f"{statistics.mean(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in of.values()]
        gaps = [b - a for a, b in zip(*of.values(), strict=True)]
        shown = ", ".join(f"{gap:+.2f}" for gap in gaps)
        lines.append(f"| {method} | {' | '.join(cells)} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
