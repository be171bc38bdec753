"""The page and picture of a sweep of methods over graphs: docs/results/decentralised.md.

fedaccord sweep benchmarks/decentralised.toml --out DIR    # it goes on
python benchmarks/decentralised.py DIR --gossip            # what gossip costs, 100 nodes; once
python benchmarks/decentralised.py DIR                     # from the runs that are completed
"""

import argparse
import json
import statistics
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import data
import matplotlib
import pandas as pd
import torch

from fedaccord.engine import simulate
from fedaccord.plugins.gossip import Network
from fedaccord.runs import reader

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SWEEP = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SHOWN: list[str] = SWEEP["space"]["algo"]
LABELS = {"ring": "ring", "grid": "grid", "exponential": "exp", "full": "full"}
RESULTS = data.REPOSITORY / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    parser.add_argument("--gossip", action="store_true", help="time gossip with 100 nodes")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, with --gossip")
    options = parser.parse_args()
    sweep = options.sweep.expanduser()
    try:
        if options.gossip:
            time_gossip(sweep, {"threads": options.threads, "data-dir": str(data.find())})
        else:
            report(sweep, options.results)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))


# --- the report -----------------------------------------------------------------------------------


class Run(NamedTuple):
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


def read(run: reader.Run) -> Run:
    metrics = run.metrics.set_index("round")
    last = metrics.iloc[-1]
    consensus = metrics["consensus-after"].dropna()
    consensus.index = consensus.index / run.settings["num-server-rounds"]
    return Run(
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


def report(sweep: Path, results: Path) -> None:
    """Write decentralised.md and .png from the completed runs of a sweep.

    Raises FileNotFoundError where there is none.
    """
    found = map(reader.read, reader.find([sweep]))
    done = [read(run) for run in found if run.summary["status"] == "completed"]
    if not done:
        raise FileNotFoundError(f"{sweep} holds no completed run: sweep first")
    runs = {(run.settings["algo"], run.settings["gossip.topology"]): run for run in done}
    timed = sweep / "gossip.json"
    gossip = json.loads(timed.read_text()) if timed.exists() else None
    results.mkdir(parents=True, exist_ok=True)
    (results / "decentralised.md").write_text(table(runs, gossip))
    plot(runs, results / "decentralised.png")
    print(f"{len(runs)} runs in {results / 'decentralised.md'} and decentralised.png")


def table(runs: dict[tuple[str, str], Run], gossip: dict[str, Any] | None) -> str:
    one = next(iter(runs.values()))
    common, own = SWEEP["run"], SWEEP["run"]["dpsgd"]
    methods = [m for m in SHOWN if any(method == m for method, _ in runs)]
    lines = [
        "# Without a server",
        "",
        f"CIFAR-10, LeNet, {common['num-clients']} nodes, Dirichlet partition with alpha "
        f"{common['dirichlet-alpha']:g}, {common['num-server-rounds']} rounds of "
        f"{common['local-steps']} local steps of batch {common['batch-size']}; rate "
        f"{common['lr']:g} with decay {common['lr-decay']:g} a round, weight decay "
        f"{common['weight-decay']:g}, gradient norms clipped at {common['clip-norm']:g}, random "
        f"crops and mirrored images, seed {one.settings['seed']}. D-PSGD takes one step a round, "
        f"so it gets {own['num-server-rounds']} rounds: as many gradients, ten times the gossip. "
        "DFedAvgM has momentum 0.9, DFedSAM radius 0.01, DFedSAM-MGS four gossip steps. All nodes "
        f"start from one model. {one.used['device']}, {one.used['threads']} PyTorch thread(s).",
        "",
        "Test accuracy of the mean model, in brackets mean and standard deviation of the nodes' "
        "own, after the last round; one seed, nothing tuned: a point or two say little.",
        "",
        *grid(runs, methods, lambda r: f"{r.accuracy:.2%} ({r.nodes[0]:.2%}, {r.nodes[1]:.2%})"),
        "",
        "Train less test accuracy of the mean model, in points (generalisation gap):",
        "",
        *grid(runs, methods, lambda r: f"{100 * r.gap:.2f}"),
        "",
        "Consensus distance `(1/m) sum ||x_i - x_bar||^2` in the last round, before and after "
        "gossip:",
        "",
        *grid(runs, methods, lambda r: f"{r.before:.3g} → {r.after:.3g}"),
        "",
        "What peers would exchange over all rounds, GB:",
        "",
        *grid(runs, methods, lambda r: f"{r.peer_bytes / 1e9:.2f}"),
        "",
        "Seconds of all rounds by the wall clock, without evaluation:",
        "",
        *grid(runs, methods, lambda r: f"{r.seconds:.0f}"),
        "",
        "![accuracies and consensus distances](decentralised.png)",
        "",
        "On the full graph gossip leaves no distance beyond rounding (below the picture), but for "
        "the step that D-PSGD takes beside it.",
        "",
    ]
    if gossip:
        lines += [
            "## What gossip costs",
            "",
            f"{gossip['nodes']} nodes, LeNet ({gossip['parameters']:,} parameters), exponential "
            f"graph, {gossip['steps']} gossip steps, {len(gossip['rounds'])} rounds of "
            f"{common['local-steps']} local steps, without evaluation, seconds with "
            f"{gossip['threads']} thread(s): a round took "
            f"{statistics.median(gossip['rounds']):.1f} (from {min(gossip['rounds']):.1f} to "
            f"{max(gossip['rounds']):.1f}), gossip alone {statistics.median(gossip['mix']):.2f} "
            f"(from {min(gossip['mix']):.2f} to {max(gossip['mix']):.2f}), which is "
            f"{statistics.median(gossip['mix']) / statistics.median(gossip['rounds']):.2%} of it. "
            "Target: at most 5 %.",
            "",
        ]
    made = (
        "Made by `fedaccord sweep benchmarks/decentralised.toml --out DIR` and `python "
        "benchmarks/decentralised.py DIR`, first with `--gossip`."
    )
    return "\n".join([*lines, made, ""])


def grid(runs: dict[tuple[str, str], Run], methods: list[str], cell: Any) -> list[str]:
    """A row a method, a column a topology; what is not completed is empty."""
    found = {t: next((r.spectral_gap for k, r in runs.items() if k[1] == t), None) for t in LABELS}
    head = [f"{LABELS[t]} (gap {g:.3f})" if g is not None else LABELS[t] for t, g in found.items()]
    rows = [[m, *(cell(runs[m, t]) if (m, t) in runs else "" for t in LABELS)] for m in methods]
    rule = ["---", *["--:"] * len(LABELS)]
    return [f"| {' | '.join(row)} |" for row in (["method", *head], rule, *rows)]


def plot(runs: dict[tuple[str, str], Run], path: Path) -> None:
    """Accuracies by topology, and the consensus distance over the run on each topology."""
    figure, axes = plt.subplots(
        *(1, 1 + len(LABELS)), figsize=(16, 4), width_ratios=[1.6, 1, 1, 1, 1], layout="constrained"
    )
    first, *others = axes
    for axis in others[1:]:
        axis.sharey(others[0])
    for k, method in enumerate(SHOWN):
        color = f"C{k}"
        first.plot([], [], "o", color=color, label=method)
        for x, (topology, axis) in enumerate(zip(LABELS, others, strict=True)):
            if run := runs.get((method, topology)):
                place = x + 0.1 * (k - 2)
                mean, spread = (100 * value for value in run.nodes)
                first.plot(place, 100 * run.accuracy, "o", color=color)
                first.errorbar(place, mean, spread, fmt="_", color=color, alpha=0.5)
                axis.plot(run.consensus, color=color)
    first.set(xticks=range(len(LABELS)), xticklabels=LABELS.values(), ylabel="test accuracy (%)")
    first.set_title("mean model (dot), nodes (bar: one std)")
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
    """Time ``rounds`` rounds with many nodes, and the mixing in them, by the wall clock."""
    mixed: list[float] = []
    mix = Network.mix

    def timed(self: Network, x: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        mix(self, x)
        mixed.append(time.perf_counter() - began)
        return x

    Network.mix = timed  # type: ignore[method-assign]
    common = {key: value for key, value in SWEEP["run"].items() if key != "dpsgd"}
    keys = common | more | {"num-clients": nodes, "eval-every": rounds, "eval-train": False}
    keys |= {"gossip.topology": "exponential", "gossip.steps": 4, "gossip.eval-nodes": False}
    del keys["num-server-rounds"]
    torch.set_num_threads(more["threads"])
    found = simulate("dfedavg", rounds=rounds, **keys)
    facts = {
        "nodes": nodes,
        "steps": keys["gossip.steps"],
        "parameters": sum(p.numel() for p in found.model.values()),
        "threads": more["threads"],
        "rounds": found.metrics["seconds"].dropna().tolist(),
        "mix": mixed,
    }
    sweep.mkdir(parents=True, exist_ok=True)
    (sweep / "gossip.json").write_text(json.dumps(facts))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
