"""Simulated time to an accuracy: synchronous, over-selected and buffered rounds.

python benchmarks/asynchronous.py DIR [--seeds 0 1 2]    # 60 runs and 3 of ACE; it resumes
python benchmarks/asynchronous.py DIR --write            # docs/results/asynchronous.md and .png

Seed by seed; a run that is completed in DIR is not repeated. It needs the extra `report`.
"""

import csv
import random
import statistics
from collections.abc import Iterable
from itertools import chain, product
from pathlib import Path
from typing import Any

import archive
import data
import pandas as pd
from ace import Ace

from fedaccord.config import method_keys
from fedaccord.engine import simulate
from fedaccord.federation.device_profiles import lognormal
from fedaccord.runs import COMPLETED, reader, status

METHODS = ("fedavg", "fedinit", "scaffold", "feddyn", "afedpd")
ROUNDS, TARGET, SLOW = 80, 0.70, 10
SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {"num-server-rounds": ROUNDS, "eval-every": 2},
    "over-selected": {"num-server-rounds": ROUNDS, "eval-every": 2, "over-selection": 0.3},
    "buffered": {
        "num-server-rounds": 2 * ROUNDS, "eval-every": 4,
        "schedule": "buffered", "concurrency": 10, "buffer-size": 5,
    },
    "rounds of 5": {"num-server-rounds": 2 * ROUNDS, "eval-every": 4, "fraction-train": 0.05},
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "dataset": "fashion-mnist", "model": "mlp", "num-clients": 100, "fraction-train": 0.1,
    "partition": "dirichlet", "dirichlet-alpha": 0.1, "replacement": "cyclic", "local-steps": 10,
    "batch-size": 50, "lr": 0.1, "lr-decay": 0.998, "weight-decay": 0.001, "clip-norm": 10.0,
    "threads": 1, "device": "cpu",
}  # fmt: skip
# An update is in the mean of 100 for about 100 steps: it counts a tenth in all, as in FedAvg. The
# rate falls with each of 800 steps, as far as FedAvg's in 80 rounds.
ACE: dict[str, Any] = {
    "schedule": "buffered", "concurrency": 10, "buffer-size": 1, "server-lr": 0.1, "eval-every": 20,
    "lr-decay": SETTINGS["lr-decay"] ** 0.1,
}  # fmt: skip
PAGE = data.REPOSITORY / "docs" / "results" / "asynchronous.md"
Tables = dict[tuple[str, str], list[pd.DataFrame]]  # the evaluated rounds, as `Runs`
Runs = dict[tuple[str, str], list[reader.StoredRun]]  # by method and schedule, one a seed


def main() -> None:
    options = data.arguments(__doc__).parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.write:
        runs = completed(folder, SCHEDULES)
        tables = {of: [_evaluated(run.metrics) for run in each] for of, each in runs.items()}
        tables["ace", "buffered"] = [
            _evaluated(pd.read_csv(path)) for path in sorted(folder.glob("ace-[0-9].csv"))
        ]
        origin = archive.sentence(PAGE.stem, chain(*runs.values()))
        PAGE.write_text(page(tables, origin), encoding="utf-8")
        draw(tables)
        return
    for seed in options.seeds:
        run_ace(folder, seed)
    for seed, algo, schedule in product(options.seeds, METHODS, SCHEDULES):
        name = name_of(algo, schedule, seed)
        settings = SETTINGS | SCHEDULES[schedule] | {"algo": algo, "seed": seed, "name": name}
        data.complete(folder, settings | {"device-profile": str(profile(folder, seed))})


def run_ace(folder: Path, seed: int) -> None:
    """As many replies as the other runs have, into a table."""
    path = folder / f"ace-{seed}.csv"
    if path.exists():
        return
    settings = SETTINGS | ACE | {"seed": seed, "device-profile": str(profile(folder, seed))}
    settings |= {"data-dir": str(data.find())}
    own = {key.replace("-", "_"): value for key, value in settings.items()}
    of_method = {key.replace("-", "_") for key in method_keys()} | {"server_lr"}
    method = Ace(**{key: value for key, value in own.items() if key in of_method})
    rest = {key: value for key, value in own.items() if key not in of_method}
    replies = ROUNDS * int(SCHEDULES["buffered"]["concurrency"])
    simulate(method, rounds=replies, **rest).metrics.to_csv(path, index=False)


def name_of(algo: str, schedule: str, seed: int | str) -> str:
    return f"{algo}-{schedule.replace(' ', '-')}-{seed}"


def profile(folder: Path, seed: int) -> Path:
    """Devices as `lognormal` draws them, of which a tenth computes ten times as slowly."""
    path, number = folder / f"devices-{seed}.csv", int(SETTINGS["num-clients"])
    slow = set(random.Random(seed).sample(range(number), number // 10))
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["client", "ms_per_sample", "up_kbps", "down_kbps", "latency_ms"])
        for i in range(number):
            device = lognormal(seed, i)
            speed = 1000 * device.seconds_per_sample * (SLOW if i in slow else 1)
            links = (device.up * 8 / 1000, device.down * 8 / 1000)
            rows.writerow([i, speed, *links, 1000 * device.latency])
    return path


def completed(folder: Path, schedules: Iterable[str]) -> Runs:
    runs: Runs = {}
    for algo, schedule in product(METHODS, schedules):
        paths = sorted(folder.glob(name_of(algo, schedule, "*")))
        runs[algo, schedule] = [reader.read(p) for p in paths if status(p) == COMPLETED]
    return runs


def _evaluated(metrics: pd.DataFrame) -> pd.DataFrame:
    """With the visits and megabytes so far."""
    metrics = metrics.assign(
        visits=metrics["replies"].fillna(0).cumsum(),
        megabytes=(metrics["up-bytes"].fillna(0).cumsum()) / 1e6,
    )
    return metrics[metrics["test-accuracy"].notna()]


def to_target(table: pd.DataFrame) -> float | None:
    """Simulated seconds until the first evaluation of at least `TARGET`; None: never."""
    reached = table[table["test-accuracy"] >= TARGET]
    return None if reached.empty else float(reached["clock"].iloc[0])


def page(tables: Tables, origin: str) -> str:
    rounds = SCHEDULES["buffered"]
    lines = [
        "# Asynchronous rounds",
        "",
        "![accuracy over simulated seconds](asynchronous.png)",
        "",
        "Fashion-MNIST, an MLP, 100 clients on simulated devices: speeds and links as "
        f"`device-profile=lognormal` draws them, a tenth of the devices {SLOW} times as slow. "
        "Synchronous rounds ask 10 clients; over-selected ones ask 13 and use the first 10 "
        f"replies; buffered ones train {rounds['concurrency']} clients at a time and step after "
        f"{rounds['buffer-size']} replies, with `staleness=constant`. {ROUNDS} rounds, or twice "
        "as many buffered steps: the same number of replies. Rounds of 5 are synchronous rounds "
        "with as many replies a step as buffered ones: they separate the effect of smaller steps "
        "from that of stale replies. A "
        "method has the same settings in all four, and nothing was tuned.",
        "",
        f"Simulated minutes until the first evaluation of at least {TARGET:.0%} (after every 20 "
        "replies): median over the seeds, least and most, and in brackets how many of the seeds "
        "that were run reached it.",
        "",
        _table(tables, _time_cell),
        "",
        "Test accuracy in percent, mean of the last 10 evaluations of a run, then mean of the "
        "seeds ± standard deviation; the simulated minutes of the whole run, mean of the seeds.",
        "",
        _table(tables, final_cell),
        "",
        "Over-selected and buffered rounds both save the wait for slow devices. Buffered ones lose "
        "no accuracy with FedAvg, SCAFFOLD and FedDyn. FedInit falls as far in synchronous rounds "
        "of 5: its relaxed start, at this beta, does not tolerate steps of so few replies, stale "
        "or not. A-FedPD loses little in rounds of 5, so most of its loss in buffered rounds is "
        "due to stale replies. Over-selected rounds, which drop late replies, give slow clients' "
        "data less weight; buffered ones do not.",
        "",
        "ACE (arXiv:2511.19066) steps at every arrival, by the mean of all clients' last updates, "
        "and is [written](../../benchmarks/ace.py) from its abstract: the paper's listing could "
        "not be read. With its server rate of 0.1 an update has the same total weight as in "
        "FedAvg's rounds of 10, and with `lr-decay=0.998^0.1` the clients' rate falls as far over "
        "the same number of replies. It ends a little below FedAvg, by no more than the seeds "
        "differ, and sooner, because no reply waits for another.",
        "",
        f"Settings: `{' '.join(f'{key}={value}' for key, value in SETTINGS.items())}`. "
        "[benchmarks/asynchronous.py](../../benchmarks/asynchronous.py) makes the runs, the "
        "picture and this page. See also: [CIFAR-10, 8 clients](asynchronous-cifar10.md)."
        f"{origin}",
        "",
    ]
    return "\n".join(lines)


def _table(tables: Tables, cell: Any) -> str:
    lines = [f"| method | {' | '.join(SCHEDULES)} |", "| --- |" + " ---: |" * len(SCHEDULES)]
    for algo in METHODS:
        cells = [cell(tables[algo, schedule]) for schedule in SCHEDULES]
        lines.append(f"| [{algo}](../methods/{algo}.md) | {' | '.join(cells)} |")
    cells = [cell(tables["ace", it]) if it == "buffered" else "" for it in SCHEDULES]
    lines.append(f"| ACE, a buffer of 1 | {' | '.join(cells)} |")
    return "\n".join(lines)


def _time_cell(runs: list[pd.DataFrame]) -> str:
    minutes = [seconds / 60 for table in runs if (seconds := to_target(table)) is not None]
    if not minutes:
        return f"– (0 of {len(runs)})"
    spread = f", {min(minutes):.0f} to {max(minutes):.0f}" if len(minutes) > 1 else ""
    return f"{statistics.median(minutes):.0f}{spread} ({len(minutes)} of {len(runs)})"


def final_cell(runs: list[pd.DataFrame], window: int = 10) -> str:
    if not runs:
        return "–"
    values = [100 * float(table["test-accuracy"].tail(window).mean()) for table in runs]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    minutes = statistics.mean(float(table["clock"].iloc[-1]) / 60 for table in runs)
    return f"{statistics.mean(values):.1f}{spread} ({minutes:.0f} min)"


def draw(tables: Tables) -> None:
    """A panel a method, a line a schedule: the mean over seeds against the mean clock."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    panels = figure.subplots(1, len(METHODS), sharey=True)
    styles = dict(zip(SCHEDULES, ("o-", "s--", "^:", "x-."), strict=True))
    for algo, panel in zip(METHODS, panels, strict=True):
        for schedule, style in styles.items():
            if runs := tables[algo, schedule]:
                clock = sum(t["clock"].to_numpy() for t in runs) / len(runs) / 60
                mean = sum(100 * t["test-accuracy"].to_numpy() for t in runs) / len(runs)
                panel.plot(clock, mean, style, label=schedule, markersize=3, markevery=5, lw=1)
        panel.set(title=algo, xlabel="simulated minutes", ylim=(30, 90))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy in percent")
    panels[-1].legend(fontsize=7, loc="lower right")
    figure.savefig(PAGE.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
