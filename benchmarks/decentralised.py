"""The page and picture of a sweep of methods over graphs: docs/results/decentralised.md.

fedaccord sweep benchmarks/decentralised.toml --out DIR    # stops and resumes
python benchmarks/decentralised.py DIR                     # from the runs that are completed
python benchmarks/decentralised.py DIR --gossip            # what gossip costs, 100 nodes, LeNet

DFedSAM's order of methods and of graphs (arXiv:2302.04083, Table 2) is tested on the differences
between runs of the same seed, which have the same partition, first model and batches.
"""

import argparse
import json
import math
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import archive
import data
import matplotlib
import pandas as pd
import torch
from accuracy import NAMES, augmentation
from scipy.stats import t as student

from fedaccord.engine import simulate
from fedaccord.plugins.gossip import Network
from fedaccord.runs import reader

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CIFAR10 = Path(__file__).with_name("decentralised-cifar10.toml")
SHOWN = ("dpsgd", "dfedavg", "dfedavgm", "dfedsam", "dfedsam-mgs")  # the paper's order
MARKERS = "os^Dv"
DASHES = ("solid", "dashed", "dotted", "dashdot", (0, (5, 1, 1, 1, 1, 1)))
LABELS = {"ring": "ring", "grid": "grid", "exponential": "exp", "full": "full"}
RESULTS = data.REPOSITORY / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    parser.add_argument("--page", default="decentralised", help="name of the page")
    parser.add_argument("--gossip", action="store_true", help="time gossip with 100 nodes")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, with --gossip")
    options = parser.parse_args()
    sweep = options.sweep.expanduser()
    try:
        if options.gossip:
            time_gossip(sweep, {"threads": options.threads, "data-dir": str(data.find())})
        else:
            report(sweep, options.results / options.page)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))


# --- the report -----------------------------------------------------------------------------------


class Run(NamedTuple):
    seed: int
    settings: dict[str, Any]
    used: dict[str, Any]
    consensus: pd.Series  # distance after gossip, by share of the rounds
    accuracy: float  # of the mean model on the test images
    nodes: tuple[float, float]  # mean and standard deviation of the nodes' test accuracies
    gap: float  # train less test accuracy of the mean model
    before: float  # consensus distance in the last round, before gossip
    after: float
    peer_bytes: float
    seconds: float  # of all rounds, without evaluation
    spectral_gap: float


def read(run: reader.StoredRun) -> Run:
    metrics = run.metrics.set_index("round")
    last = metrics.iloc[-1]
    consensus = metrics["consensus-after"].dropna()
    consensus.index = consensus.index / run.settings["num-server-rounds"]
    return Run(
        seed=run.settings["seed"],
        settings=run.settings,
        used=run.used,
        consensus=consensus,
        accuracy=last["test-accuracy"],
        nodes=(last["test-accuracy-nodes"], last["test-accuracy-nodes-std"]),
        gap=last["generalisation-gap"],
        before=last["consensus-before"],
        after=last["consensus-after"],
        peer_bytes=run.summary["peer-bytes"],
        seconds=metrics["seconds"].sum(),
        spectral_gap=run.summary["gossip.spectral-gap"],
    )


Runs = dict[tuple[str, str], list[Run]]  # by method and graph, in the order of the seeds


def report(sweep: Path, page: Path) -> None:
    """Write PAGE.md and PAGE.png from the completed runs of a sweep.

    Raises FileNotFoundError if there is none.
    """
    every_run = [*map(reader.read, reader.find([sweep]))]
    completed_runs = [read(run) for run in every_run if run.summary["status"] == "completed"]
    if not completed_runs:
        raise FileNotFoundError(f"{sweep} holds no completed run: sweep first")
    runs: Runs = {}
    for run in sorted(completed_runs, key=lambda run: run.seed):
        place = (run.settings["algo"], run.settings["gossip.topology"])
        runs.setdefault(place, []).append(run)
    timed = sweep / "gossip.json"
    gossip = json.loads(timed.read_text()) if timed.exists() else None
    page.parent.mkdir(parents=True, exist_ok=True)
    page.with_suffix(".md").write_text(table(runs, gossip, page.name, every_run))
    plot(runs, page.with_suffix(".png"))
    print(f"{len(completed_runs)} runs in {page}.md and {page.name}.png")


def table(
    runs: Runs, gossip: dict[str, Any] | None, name: str, every: Sequence[reader.StoredRun] = ()
) -> str:
    """The page; every: the runs behind it."""
    methods = [method for method in SHOWN if any(method == other for other, _ in runs)]
    settings = next(iter(runs.values()))[0].settings
    lines = [
        f"# Without a server: {NAMES[settings['dataset']]}",
        "",
        *setup(runs),
        "",
        "Test accuracy of the mean model after the last round, mean ± standard deviation over the "
        "seeds:",
        "",
        *grid(runs, methods, lambda run: run.accuracy),
        "",
        "Mean of the nodes' own test accuracies, likewise:",
        "",
        *grid(runs, methods, lambda run: run.nodes[0]),
        "",
        *claims(runs, methods),
        "",
        "## Also measured",
        "",
        "Train less test accuracy of the mean model (generalisation gap):",
        "",
        *grid(runs, methods, lambda run: run.gap),
        "",
        "Consensus distance `(1/m) sum ||x_i - x_bar||^2` in the last round after gossip:",
        "",
        *grid(runs, methods, lambda run: run.after, "{:.2g}"),
        "",
        "What peers would exchange over all rounds, GB:",
        "",
        *grid(runs, methods, lambda run: run.peer_bytes / 1e9, "{:.2f}"),
        "",
        f"![accuracies and consensus distances]({name}.png)",
        "",
        "The lines are means over the seeds. On the full graph gossip leaves no distance beyond "
        "rounding (below the picture), except for D-PSGD's step, which gossip does not mix.",
        "",
    ]
    if gossip:
        lines += [
            "## What gossip costs",
            "",
            f"{gossip['nodes']} nodes, LeNet ({gossip['parameters']:,} parameters), exponential "
            f"graph, {gossip['steps']} gossip steps, {len(gossip['rounds'])} rounds of 10 local "
            "steps, without evaluation, seconds with "
            f"{gossip['threads']} thread(s): a round took "
            f"{statistics.median(gossip['rounds']):.1f} (from {min(gossip['rounds']):.1f} to "
            f"{max(gossip['rounds']):.1f}), gossip alone {statistics.median(gossip['mix']):.2f} "
            f"(from {min(gossip['mix']):.2f} to {max(gossip['mix']):.2f}), which is "
            f"{statistics.median(gossip['mix']) / statistics.median(gossip['rounds']):.2%} of it. "
            "Target: at most 5 %.",
            "",
        ]
    command = f"Made by `fedaccord sweep benchmarks/{name}.toml --out DIR` and `python "
    command += f"benchmarks/decentralised.py DIR --page {name}`.{archive.sentence(name, every)}"
    return "\n".join([*lines, command, ""])


def setup(runs: Runs) -> list[str]:
    """What was run, from the runs' own settings."""
    every = [run for same in runs.values() for run in same]
    one = next(run for run in every if run.settings["algo"] != "dpsgd")
    common, seeds = one.settings, sorted({run.seed for run in every})
    text = (
        f"{common['dataset']}, {common['model']}, {common['num-clients']} nodes, Dirichlet "
        f"partition with alpha {common['dirichlet-alpha']:g}, {common['num-server-rounds']} rounds "
        f"of {common['local-steps']} local steps of batch {common['batch-size']}; rate "
        f"{common['lr']:g} with decay {common['lr-decay']:g} a round, weight decay "
        f"{common['weight-decay']:g}, gradient norms clipped at {common['clip-norm']:g}"
        f"{augmentation(common['dataset'])}; seeds "
        f"{', '.join(map(str, seeds))}. DFedAvgM has momentum 0.9, DFedSAM radius 0.01, "
        "DFedSAM-MGS four gossip steps; nothing is tuned. All nodes start from the same model. "
    )
    for own in [run.settings for run in every if run.settings["algo"] == "dpsgd"][:1]:
        text += (
            f"D-PSGD takes {own['local-steps']} step a round, so it gets "
            f"{own['num-server-rounds']} rounds with decay {own['lr-decay']:g}: as many gradients "
            "as DFedAvg and DFedAvgM, half as many as the two others, which take two a step, and "
            "more gossip. "
        )
    return [f"{text}{one.used['device']}, {one.used['threads']} PyTorch thread(s)."]


def grid(
    runs: Runs, methods: Sequence[str], value: Callable[[Run], float], form: str = "{:.2%}"
) -> list[str]:
    """A row a method, a column a topology; what is not completed is empty."""

    def cell(same: list[Run]) -> str:
        values = [value(run) for run in same]
        mean = form.format(statistics.mean(values)) if values else ""
        return f"{mean} ± {form.format(statistics.stdev(values))}" if len({*values}) > 1 else mean

    gaps = {graph: run.spectral_gap for (_, graph), (run, *_) in runs.items()}
    head = [f"{LABELS[t]} (gap {gaps[t]:.3f})" if t in gaps else LABELS[t] for t in LABELS]
    rows = [[m, *(cell(runs.get((m, t), [])) for t in LABELS)] for m in methods]
    return markdown(["method", *head], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def claims(runs: Runs, methods: Sequence[str]) -> list[str]:
    """DFedSAM's order of methods on each graph, and of graphs for each method."""
    graphs = [*LABELS]
    lines = [
        "## The order of DFedSAM's Table 2",
        "",
        "The paper (arXiv:2302.04083; CIFAR-10, one number a cell) has dpsgd < dfedavg < dfedavgm "
        "< dfedsam < dfedsam-mgs on every graph, and ring < grid < exp < full for every method. A "
        "cell has the difference in points between runs of the same seed, mean ± standard "
        "deviation, and whether it is above 0 (yes), below (no) or neither (open) with 95% "
        "confidence by Student's t, without a correction for multiple tests: if nothing differed, "
        "one cell of twenty would be yes or no by chance. The settings are not the paper's, so a "
        "verdict is valid only for these runs.",
    ]
    for title, value in (
        ("the mean model", lambda run: run.accuracy),
        ("the nodes' own models", lambda run: run.nodes[0]),
    ):
        lines += ["", f"Methods, by the accuracy of {title}:", ""]
        lines += verdicts(runs, methods, graphs, value)
        lines += ["", f"Graphs, by the accuracy of {title}:", ""]
        turned = {(graph, method): same for (method, graph), same in runs.items()}
        lines += verdicts(turned, graphs, methods, value)
    return lines


def verdicts(
    runs: Runs, order: Sequence[str], columns: Sequence[str], value: Callable[[Run], float]
) -> list[str]:
    """A row for each two neighbours of the claimed order; the verdict of all columns is the last.

    runs: by (place in the order, column).
    """
    rows = []
    for low, high in pairwise(order):
        cells, words = [], []
        for column in columns:
            pairs = [runs.get((place, column), []) for place in (low, high)]
            less, more = ({run.seed: value(run) for run in same} for same in pairs)
            gains = [100 * (more[seed] - less[seed]) for seed in sorted({*less} & {*more})]
            words.append(verdict(gains))
            cells.append(f"{difference(gains)} {words[-1]}")
        counts = [f"{words.count(word)} {word}" for word in dict.fromkeys(words)]
        names = [LABELS.get(name, name) for name in (low, high)]
        rows.append([" < ".join(names), *cells, ", ".join(counts)])
    head = ["claim", *(LABELS.get(name, name) for name in columns), "verdict"]
    return markdown(head, rows)


def difference(gains: Sequence[float], digits: int = 2) -> str:
    if len(gains) < 2:
        return ""
    mean, std = (round(value, 9) for value in (statistics.mean(gains), statistics.stdev(gains)))
    return f"{mean:+.{digits}f} ± {std:.{digits}f}"  # of exact ties, not of their last bits


def verdict(gains: Sequence[float]) -> str:
    """yes: above 0 with 95% confidence; no: below; equal: each is 0; else open."""
    if len(gains) >= 2 and not any(gains):
        return "equal"
    if chance(gains) >= 0.05:
        return "open"
    return "yes" if statistics.mean(gains) > 0 else "no"


def chance(gains: Sequence[float]) -> float:
    """The p-value of Student's t test, on both sides, that their mean is 0; of fewer than two 1."""
    if len(gains) < 2 or not any(gains):
        return 1.0
    spread = statistics.stdev(gains) / len(gains) ** 0.5
    far = abs(statistics.mean(gains)) / spread if spread else math.inf
    return float(2 * student.sf(far, len(gains) - 1))


def plot(runs: Runs, path: Path) -> None:
    """Accuracies by topology, and the consensus distance over the run on each topology."""
    figure, axes = plt.subplots(
        *(1, 1 + len(LABELS)), figsize=(16, 4), width_ratios=[1.6, 1, 1, 1, 1], layout="constrained"
    )
    first, *others = axes
    for axis in others[1:]:
        axis.sharey(others[0])
    for k, method in enumerate(SHOWN):
        color = f"C{k}"
        first.plot([], [], MARKERS[k], color=color, linestyle=DASHES[k], label=method)
        for x, (topology, axis) in enumerate(zip(LABELS, others, strict=True)):
            if same := runs.get((method, topology)):
                place = x + 0.1 * (k - 2)
                for run in same:
                    first.plot(place, 100 * run.accuracy, MARKERS[k], color=color, alpha=0.6)
                mean = 100 * statistics.mean(run.nodes[0] for run in same)
                spread = 100 * statistics.mean(run.nodes[1] for run in same)
                first.errorbar(place, mean, spread, fmt="_", color=color, alpha=0.5)
                axis.plot(
                    pd.concat([run.consensus for run in same]).groupby(level=0).mean(),
                    color=color,
                    linestyle=DASHES[k],
                )
    first.set(xticks=range(len(LABELS)), xticklabels=LABELS.values(), ylabel="test accuracy (%)")
    first.set_title("mean model (a mark a seed), nodes (bar: one std)")
    others[-1].legend(*first.get_legend_handles_labels(), fontsize="small", loc="lower right")
    for axis, label in zip(others, LABELS.values(), strict=True):
        axis.set(title=label, xlabel="share of the gradient steps", yscale="log")
    others[0].set(ylabel="consensus distance after gossip", ylim=(1e-5, None))
    for axis in axes:
        axis.grid(alpha=0.3)
    for axis in others[1:]:
        axis.label_outer()
    figure.savefig(path, dpi=100)
    plt.close(figure)


# --- gossip alone ---------------------------------------------------------------------------------


def time_gossip(sweep: Path, more: dict[str, Any], nodes: int = 100, rounds: int = 3) -> None:
    """Time rounds of LeNet with many nodes, and the mixing in them, by the wall clock."""
    seconds: list[float] = []
    mix = Network.mix

    def timed(self: Network, x: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        mean = mix(self, x)
        seconds.append(time.perf_counter() - began)
        return mean

    Network.mix = timed  # type: ignore[method-assign]
    sweep_file = tomllib.loads(CIFAR10.read_text(encoding="utf-8"))
    common = {key: value for key, value in sweep_file["run"].items() if key != "dpsgd"}
    keys = common | more | {"num-clients": nodes, "eval-every": rounds, "eval-train": False}
    keys |= {"model": "lenet", "gossip.topology": "exponential", "gossip.steps": 4}
    keys["gossip.eval-nodes"] = False
    del keys["num-server-rounds"]
    torch.set_num_threads(more["threads"])
    history = simulate("dfedavg", rounds=rounds, **keys)
    facts = {
        "nodes": nodes,
        "steps": keys["gossip.steps"],
        "parameters": sum(p.numel() for p in history.model.values()),
        "threads": more["threads"],
        "rounds": history.metrics["seconds"].dropna().tolist(),
        "mix": seconds,
    }
    sweep.mkdir(parents=True, exist_ok=True)
    (sweep / "gossip.json").write_text(json.dumps(facts))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
