"""The README's first command over several seeds, method against FedAvg.

    python benchmarks/quickstart.py                  # writes docs/results/quickstart.md

Every run is that of the command but for method and seed; all of them take a few minutes.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import data
import pandas as pd

from fedaccord import engine
from fedaccord.config import RunConfig

SETTING: dict[str, Any] = {"dirichlet-alpha": 0.1, "fraction-train": 0.1}
METHODS = ("fedavg", "fedinit", "scaffold", "feddyn", "afedpd")
BASELINE = "fedavg"
SHOWN = "afedpd"  # the README's
RESULT = data.REPOSITORY / "docs" / "results" / "quickstart.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="so many, from 0")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for method in METHODS:
            for seed in range(options.seeds):
                runs[method, seed] = accuracies(Path(folder), method, seed)
            print(f"{method} done", flush=True)
    options.result.write_text(text(pd.DataFrame(runs).T))
    print(options.result)


def accuracies(folder: Path, method: str, seed: int) -> dict[str, float]:
    """Test accuracy in percent at rounds 10 and 30, and the mean of the last 10 rounds."""
    name = f"{method}-{seed}"
    more = {"algo": method, "seed": seed, "threads": 1, "device": "cpu"}
    config = RunConfig.make(SETTING | more | {"out-dir": str(folder), "name": name})
    with engine.quiet():
        engine.run(config)
    curve = 100 * pd.read_csv(folder / name / "metrics.csv", index_col="round")["test-accuracy"]
    return {"round 10": curve[10], "round 30": curve[30], "rounds 21 to 30": curve[21:].mean()}


def text(table: pd.DataFrame) -> str:
    """The page. table: a row a method and seed, a column a measure, in percent."""
    pairs = " ".join(f"{key}={value}" for key, value in SETTING.items())
    config = RunConfig.make(SETTING)
    seeds = table.index.unique(1)
    lines = [
        "# The quickstart over several seeds",
        "",
        "    " + f"fedaccord run algo={SHOWN} {pairs}",
        "    " + f"fedaccord run algo={BASELINE} {pairs}",
        "",
        f"The embedded digits, {config.num_clients} clients of Dirichlet-"
        f"{SETTING['dirichlet-alpha']:g} class priors (a client holds few of the ten digits), "
        f"{config.strategy.cohort_size(config.num_clients)} clients a round, "
        f"{config.num_server_rounds} rounds; all other settings, also the methods', are the "
        f"defaults. {len(seeds)} seeds, from 0: a seed decides the partition, the first model, the "
        "cohorts and the batches, which are the same for every method. Test accuracy in percent: "
        "mean, and lowest to highest seed.",
        "",
        f"| method | {' | '.join(table.columns)} | seeds ahead of {BASELINE} in the last column |",
        "| --- |" + " --: |" * len(table.columns) + " --: |",
    ]
    last = table.columns[-1]
    for method in table.index.unique(0):
        own = table.loc[method]
        cells = [f"{own[c].mean():.1f} ({own[c].min():.1f} to {own[c].max():.1f})" for c in own]
        ahead = int((own[last] > table.loc[BASELINE][last]).sum())
        cells.append("–" if method == BASELINE else f"{ahead} of {len(seeds)}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    lines += [
        "",
        "Two clients a round hold few of the ten digits, and FedAvg's model drifts towards those. "
        "The other methods counter the drift, each in its own way.",
        "",
        "Made by `python benchmarks/quickstart.py`, on a CPU with one thread.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
