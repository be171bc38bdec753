"""Accuracy against epsilon: five methods on Fashion-MNIST with 1,000 clients.

python benchmarks/privacy.py DIR [--seeds 0 1 2] [--rounds 100]    # 45 runs; it resumes
python benchmarks/privacy.py DIR --write    # and docs/results/privacy.md, of the runs in DIR

A run that is completed in DIR is not repeated.
"""

import statistics
from itertools import product
from pathlib import Path
from typing import Any

import archive
import data

from fedaccord.runs import COMPLETED, reader

METHODS = ("fedavg", "fedinit", "scaffold", "feddyn", "afedpd")
BUDGETS: dict[str, dict[str, float]] = {
    "2": {"dp.epsilon": 2.0},
    "8": {"dp.epsilon": 8.0},
    "inf": {"dp.noise-multiplier": 0.0},
}
SETTINGS: dict[str, Any] = {
    "dataset": "fashion-mnist", "model": "mlp", "num-clients": 1000, "dirichlet-alpha": 0.3,
    "sampling": "bernoulli", "fraction-train": 0.1, "local-steps": 5, "batch-size": 20,
    "lr": 0.1, "dp.clip": 1.0, "dp.delta": 1e-4, "eval-every": 10, "vectorize": "on",
    "threads": 1,
}  # fmt: skip
PAGE = data.REPOSITORY / "docs" / "results" / "privacy.md"


def main() -> None:
    parser = data.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page(options.folder, options.rounds), encoding="utf-8")
        return
    for seed, algo, budget in product(options.seeds, options.methods, BUDGETS):
        name = f"{algo}-{budget}-{seed}-{options.rounds}"
        settings = SETTINGS | BUDGETS[budget] | {"algo": algo, "seed": seed, "name": name}
        data.complete(options.folder, settings | {"num-server-rounds": options.rounds})


def page(folder: Path, rounds: int) -> str:
    """The table of the runs that are completed; a dash where there is none."""
    lines = [
        "# Accuracy against epsilon",
        "",
        f"Fashion-MNIST, 1,000 clients, {rounds} rounds. Accuracy of the last evaluation in "
        "percent, mean ± standard deviation over the seeds, and in brackets their number; "
        f"epsilon at delta {SETTINGS['dp.delta']:g}; inf: clipped uploads without noise; -: not "
        "run. No setting was tuned: all methods have the same rate and the same clip.",
        "",
        "| method | " + " | ".join(f"epsilon {budget}" for budget in BUDGETS) + " |",
        "| --- |" + " ---: |" * len(BUDGETS),
    ]
    every: list[reader.StoredRun] = []
    for algo in METHODS:
        cells = []
        for budget in BUDGETS:
            runs = [reader.read(p) for p in folder.glob(f"{algo}-{budget}-*-{rounds}")]
            every += runs
            values = [
                100 * run.summary["test-accuracy-last"]
                for run in runs
                if run.summary["status"] == COMPLETED
            ]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(
                f"{statistics.mean(values):.1f}{spread} ({len(values)})" if values else "-"
            )
        lines.append(f"| [{algo}](../methods/{algo}.md) | {' | '.join(cells)} |")
    settings = " ".join(f"{key}={value}" for key, value in SETTINGS.items())
    command = f"python benchmarks/privacy.py DIR --rounds {rounds}"
    end = f"Settings: `{settings}`. Made by `{command}`, then with `--write`, on a CPU."
    lines += ["", end + archive.sentence("privacy", every), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
