"""Compressed uploads: accuracy against bytes, exact optima, and the time of encode and decode.

    python benchmarks/compression.py train DIR [--dataset cifar10] [--seeds 0 1 2] [--rounds 100]
    python benchmarks/compression.py exact DIR      # least squares in float64
    python benchmarks/compression.py time DIR       # encode and decode of 45 MB, one thread
    python benchmarks/compression.py write DIR      # docs/results/compression.md and .png
    python benchmarks/compression.py write DIR --dataset cifar10     # compression-cifar10.md, .png

Each but `write` resumes: what is completed in DIR is not repeated.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import archive
import data
import matplotlib
import pandas as pd
import torch
from timing import spread
from torch import Tensor

from fedaccord.core.client_half import GradientHook
from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import (
    Solution,
    broadcast,
    client_round,
    descend,
    first_state,
    server_round,
)
from fedaccord.core.rule import Direction, LocalConfig
from fedaccord.core.vectors import Vector
from fedaccord.plugins._compressors import BFloat16, Compressor, Levels, RandK, Sign, TopK
from fedaccord.plugins.compress import Compress
from fedaccord.process.allocator import keep_freed_memory
from fedaccord.runs import COMPLETED, reader, status
from fedaccord.strategies import METHODS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = data.REPOSITORY / "docs" / "results"
ALGOS = ("fedavg", "fedinit", "scaffold", "feddyn", "afedpd")
COMPRESSORS: dict[str, dict[str, Any]] = {
    "none": {"compress.method": "none"},
    "topk 5 %": {"compress.method": "topk", "compress.share": 0.05},
    "randk 5 %": {"compress.method": "randk", "compress.share": 0.05},
    "sign": {"compress.method": "sign"},
    "qsgd 4 bits": {"compress.method": "qsgd", "compress.bits": 4},
    "int8": {"compress.method": "int8"},
}
COMMON: dict[str, Any] = {
    "partition": "dirichlet", "dirichlet-alpha": 0.1, "replacement": "cyclic", "num-clients": 100,
    "fraction-train": 0.1, "local-steps": 10, "batch-size": 50, "lr": 0.1, "lr-decay": 0.998,
    "weight-decay": 0.001, "clip-norm": 10.0, "eval-every": 5, "threads": 1, "device": "cpu",
}  # fmt: skip
MODELS = {"fashion-mnist": "mlp", "cifar10": "lenet"}
TITLES = {"fashion-mnist": "Fashion-MNIST, an MLP", "cifar10": "CIFAR-10, LeNet"}
PAGES = {"fashion-mnist": "compression", "cifar10": "compression-cifar10"}
WINDOW = 3  # last evaluations behind a run's accuracy
COLOURS = ("#000000", "#d55e00", "#cc79a7", "#0072b2", "#009e73", "#e69f00")  # Okabe and Ito's
DASHES = ("solid", "dashed", "dotted", "dashdot", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))  # in grey


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "exact", "time", "write"))
    parser.add_argument("folder", type=Path, help="folder of the runs and numbers")
    parser.add_argument("--dataset", default="fashion-mnist", choices=MODELS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--exact-rounds", type=int, default=12_000)
    parser.add_argument("--repetitions", type=int, default=15, help="of each time")
    options = parser.parse_args()
    options.folder = options.folder.expanduser().resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    {"train": train, "exact": exact, "time": times, "write": write}[options.what](options)


# --- accuracy against bytes -----------------------------------------------------------------------


def name_of(dataset: str, algo: str, compressor: str, seed: int) -> str:
    return f"{dataset}-{algo}-{compressor.split('%')[0].strip().replace(' ', '-')}-{seed}"


def train(options: argparse.Namespace) -> None:
    """The runs of a dataset, one seed after the other."""
    completed(options)  # which checks those that are kept
    for seed, compressor, algo in product(options.seeds, COMPRESSORS, ALGOS):
        name = name_of(options.dataset, algo, compressor, seed)
        settings = COMMON | COMPRESSORS[compressor] | {"algo": algo, "seed": seed, "name": name}
        settings |= {"dataset": options.dataset, "model": MODELS[options.dataset]}
        data.complete(options.folder, settings | {"num-server-rounds": options.rounds})


class Trained(NamedTuple):
    """A completed run."""

    accuracy: float  # percent, mean of the last evaluations
    curve: pd.DataFrame  # an evaluation a row: megabytes uploaded until then, accuracy in percent
    bytes_up: float  # of a reply
    vectors: float  # the same in vectors of the model
    rounds: int


def read(path: Path) -> Trained:
    run = reader.read(path)
    rows = run.metrics
    sent = rows["up-bytes"].fillna(0).cumsum() / 1e6
    curve = pd.DataFrame({"mb": sent, "accuracy": 100 * rows["test-accuracy"]}).dropna()
    replies = rows["replies"].sum()
    return Trained(
        accuracy=float(curve["accuracy"].iloc[-WINDOW:].mean()),
        curve=curve,
        bytes_up=rows["up-bytes"].sum() / replies,
        vectors=rows["up-vectors"].sum() / replies,
        rounds=int(run.summary["rounds"]),
    )


Table = dict[tuple[str, str], list[Trained]]  # by method and compressor, of each seed


def completed(options: argparse.Namespace) -> Table:
    """Ends the script if a run has another number of rounds than ``options.rounds``."""
    folder, dataset, seeds, table = options.folder, options.dataset, options.seeds, Table()
    for algo, compressor in product(ALGOS, COMPRESSORS):
        paths = [folder / name_of(dataset, algo, compressor, seed) for seed in seeds]
        complete = [p for p in paths if reader.is_run(p) and status(p) == COMPLETED]
        if complete:
            table[algo, compressor] = [read(path) for path in complete]
    rounds = {trained.rounds for runs in table.values() for trained in runs}
    if rounds - {options.rounds}:
        sys.exit(
            f"{folder}: expected runs of --rounds {options.rounds}, found runs of "
            f"{', '.join(map(str, sorted(rounds)))}; name another folder, or their number"
        )
    return table


def accuracy_section(dataset: str, table: Table) -> Iterator[str]:
    rounds = {trained.rounds for runs in table.values() for trained in runs}
    yield f"## {TITLES[dataset]}"
    yield ""
    settings = " ".join(f"{key}={value}" for key, value in COMMON.items())
    yield (
        f"{', '.join(map(str, sorted(rounds)))} rounds: `{settings}`. Accuracy in percent, the "
        f"mean of the last {WINDOW} evaluations of a run, then of the seeds, ± standard deviation; "
        "in brackets: the number of seeds, and the bytes of an upload as a share of one model in "
        "float32; –: not run. Methods have their defaults, and nothing was tuned for a compressor. "
        "SCAFFOLD sends two vectors without compression and one with it."
    )
    yield ""
    yield "| method | " + " | ".join(COMPRESSORS) + " |"
    yield "| --- |" + " ---: |" * len(COMPRESSORS)
    for algo in ALGOS:
        yield row(algo, [cell(table.get((algo, compressor), [])) for compressor in COMPRESSORS])
    target = nine_tenths(table)
    yield ""
    yield (
        f"Megabytes that all clients together uploaded until the first evaluation of at least "
        f"{target:.0f} % (mean of the seeds; –: not run, or some seed did not reach it):"
    )
    yield ""
    yield "| method | " + " | ".join(COMPRESSORS) + " |"
    yield "| --- |" + " ---: |" * len(COMPRESSORS)
    for algo in ALGOS:
        cells = [until(table.get((algo, compressor), []), target) for compressor in COMPRESSORS]
        yield row(algo, cells)
    yield ""


def row(algo: str, cells: list[str]) -> str:
    return f"| [{algo}](../methods/{algo}.md) | {' | '.join(cells)} |"


def cell(runs: list[Trained]) -> str:
    if not runs:
        return "–"
    values = [trained.accuracy for trained in runs]
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation} ({len(runs)}; {runs[0].vectors:.1%})"


def nine_tenths(table: Table) -> float:
    """A target: nine tenths of FedAvg's accuracy without compression."""
    bare = table.get(("fedavg", "none")) or next(iter(table.values()))
    return round(0.9 * statistics.mean(trained.accuracy for trained in bare))


def until(runs: list[Trained], target: float) -> str:
    reached = [trained.curve[trained.curve["accuracy"] >= target]["mb"] for trained in runs]
    if not runs or any(mb.empty for mb in reached):
        return "–"
    return f"{statistics.mean(float(mb.iloc[0]) for mb in reached):.0f}"


def plot(dataset: str, table: Table, path: Path) -> None:
    """Accuracy against megabytes uploaded, the first seed: a column a method."""
    figure, axes = plt.subplots(
        1, len(ALGOS), figsize=(14, 3.7), sharey="row", layout="constrained"
    )
    for ax, algo in zip(axes, ALGOS, strict=True):
        for compressor, colour, dash in zip(COMPRESSORS, COLOURS, DASHES, strict=True):
            if runs := table.get((algo, compressor)):
                curve = runs[0].curve.iloc[1:]
                ax.plot(
                    curve["mb"],
                    curve["accuracy"],
                    color=colour,
                    linestyle=dash,
                    label=compressor,
                )
        ax.set(xscale="log", title=algo)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"{TITLES[dataset].split(',')[0]}, test accuracy (%)")
    axes[2].set_xlabel("megabytes uploaded by all clients")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


# --- exact optima ---------------------------------------------------------------------------------

CLIENTS, ACTIVE, DIM, STEPS, LR = 8, 4, 20, 4, 0.05
EXACT_ALGOS: dict[str, dict[str, Any]] = {
    "scaffold": {},
    "feddyn": {"alpha": 1.0},
    "afedpd": {"rho": 1.0},
}
TRUE = "memories of the true model"
TOPK, FEEDBACK = {"method": "topk", "share": 0.1}, {"error_feedback": "true"}
EXACT: dict[str, dict[str, Any]] = {
    "topk 10 %": TOPK,
    "topk 10 %, error feedback": TOPK | FEEDBACK,
    f"topk 10 %, {TRUE}": TOPK,
    f"topk 10 %, {TRUE}, error feedback": TOPK | FEEDBACK,
    "randk 10 %": {"method": "randk", "share": 0.1},
    "sign": {"method": "sign"},
    "qsgd 2 bits": {"method": "qsgd", "bits": 2},
    "qsgd 4 bits": {"method": "qsgd", "bits": 4},
    "bf16": {"method": "bf16"},
    "int8": {"method": "int8"},
}
SLOW = ("afedpd", "randk 10 %")  # has not converged after the rounds of the others


class TrueMemory(Compress):
    """Clients remember what they computed, and not what the server reads, for comparison."""

    loses = False


def exact(options: argparse.Namespace) -> None:
    path = options.folder / "exact.json"
    distances = json.loads(path.read_text()) if path.exists() else {}
    for compressor, algo in product(EXACT, EXACT_ALGOS):
        name = f"{algo}, {compressor}"
        if distances.get(name, {}).get("rounds") != options.exact_rounds:
            began = time.process_time()
            distance = distance_to_optimum(algo, compressor, options.exact_rounds)
            distances[name] = {"distance": distance, "rounds": options.exact_rounds}
            print(f"{name}: {distance:.1e}, {time.process_time() - began:.0f} s", flush=True)
            path.write_text(json.dumps(distances, indent=1))

    for rounds in (2 * options.exact_rounds, 4 * options.exact_rounds):
        name = f"{SLOW[0]}, {SLOW[1]}, {rounds}"
        if name not in distances:
            distances[name] = {"distance": distance_to_optimum(*SLOW, rounds), "rounds": rounds}
            path.write_text(json.dumps(distances, indent=1))


def distance_to_optimum(algo: str, compressor: str, rounds: int) -> float:
    """||w - w*|| at the end, of ||w*|| in brackets of the page; inf: it diverged."""
    A, b, optimum = least_squares()
    plugin = (TrueMemory if TRUE in compressor else Compress)(**EXACT[compressor])
    method: Any = METHODS[algo](
        precision="float64", lr=LR, lr_decay=1.0, local_steps=STEPS, weight_decay=0.0,
        clip_norm=0.0, plugins=(plugin,), **EXACT_ALGOS[algo],
    )  # fmt: skip
    half, w0 = method.client_half(), torch.zeros(DIM, dtype=torch.float64)
    s, states = first_state(method, w0, CLIENTS), dict[int, Any]()
    draws = torch.Generator().manual_seed(1)
    for t in range(rounds):
        replies = []
        for i in sorted(torch.randperm(CLIENTS, generator=draws)[:ACTIVE].tolist()):
            down = broadcast(method, s, i)
            config = LocalConfig(t, rounds, LR, 0.0, 0.0, i, 0, ((DIM,),), STEPS)
            if i not in states:
                states[i] = half.init(down.w, w0, config)
            visit = client_round(half, down, states[i], config, Steps(A[i], b[i]))
            states[i] = visit.state
            received = half.decode(visit.up, down, w0)
            replies.append(Reply(i, received.up, STEPS, 1, received.w_i0))
        s = server_round(method, half, s, replies).state
        if not s.w.norm() < 1e6:
            return float("inf")
    return float((method.output_model(s.w, s.server) - optimum).norm())


def least_squares() -> tuple[Tensor, Tensor, Tensor]:
    """A (C, n, d), b (C, n) with Hessians of eigenvalues from 0.8 to 4, and the optimum (d,)."""
    draws = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    u, _, vt = torch.linalg.svd(normal(CLIENTS, 2 * DIM, DIM), full_matrices=False)
    values = 0.8 + 3.2 * torch.rand(CLIENTS, DIM, generator=draws, dtype=torch.float64)
    A = (u * values.sqrt()[:, None]) @ vt
    near = 0.3 * normal(DIM) + 0.3 * normal(CLIENTS, DIM)
    b = (A @ near[..., None]).squeeze(-1) + 0.3 * normal(CLIENTS, 2 * DIM)
    H, right = (A.mT @ A).sum(0), (A.mT @ b[..., None]).sum(0).squeeze(-1)
    return A, b, torch.linalg.solve(H, right)


class Steps(NamedTuple):
    """Local steps along exact gradients of ||A w - b||^2 / 2."""

    A: Tensor
    b: Tensor

    def __call__(self, w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
        w, g = w_i0.clone(), torch.empty_like(w_i0)

        def at(point: Vector) -> Tensor:
            g.copy_(self.A.T @ (self.A @ point - self.b))
            return g.new_zeros(())

        return descend(w, g, [at] * STEPS, direction, hook)


def exact_section(distances: dict[str, Any]) -> Iterator[str]:
    rounds = min(value["rounds"] for value in distances.values())
    norm = float(least_squares()[2].norm())
    yield "## Exact optima"
    yield ""
    yield (
        f"Least squares in float64: {CLIENTS} clients of which {ACTIVE} take part in a round, "
        f"{DIM} parameters, {STEPS} local steps of rate {LR}, {rounds:,} "
        f"rounds; FedDyn with alpha 1, A-FedPD with rho 1. Distance to the optimum, which has the "
        f"norm {norm:.2f}. Without error feedback unless stated otherwise, as with `auto`."
    )
    yield ""
    yield "| compressor | " + " | ".join(EXACT_ALGOS) + " |"
    yield "| --- |" + " ---: |" * len(EXACT_ALGOS)
    for compressor in EXACT:
        cells = [distances.get(f"{algo}, {compressor}") for algo in EXACT_ALGOS]
        yield f"| {compressor} | {' | '.join(map(shown, cells))} |"
    yield ""
    slow = [distances[name] for name in distances if name.startswith(f"{SLOW[0]}, {SLOW[1]}")]
    yield (
        f"{SLOW[0]} with {SLOW[1]} is slow but exact: "
        + ", ".join(f"{shown(value)} after {value['rounds']:,} rounds" for value in slow)
        + ". Each upload has two of 20 numbers, from which the other clients' virtual steps are "
        "computed. Error feedback on top of memories that follow the uploads diverges: "
        "[why](../compression.md#error-feedback)."
    )
    yield ""


def shown(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    return "diverges" if entry["distance"] == float("inf") else f"{entry['distance']:.0e}"


# --- time -----------------------------------------------------------------------------------------

LENGTH = 11_200_000  # 45 MB in float32
TIMED: dict[str, Compressor] = {
    "topk 1 %": TopK(0.01),
    "topk 10 %": TopK(0.1),
    "randk 10 %": RandK(0.1, scaled=False),
    "sign": Sign(),
    "qsgd 2 bits": Levels(2, drawn=True),
    "qsgd 4 bits": Levels(4, drawn=True),
    "qsgd 8 bits": Levels(8, drawn=True),
    "int8": Levels(8, drawn=False),
    "bf16": BFloat16(torch.float32),
}


def times(options: argparse.Namespace) -> None:
    """Milliseconds of the processor, which other programs disturb less than wall-clock ones."""
    keep_freed_memory()  # as `fedaccord run` does
    x, seconds = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0)), {}
    for name, compressor in TIMED.items():
        measurements: dict[str, Any] = {"encode": [], "decode": []}
        for repetition in range(options.repetitions + 1):
            draws = torch.Generator().manual_seed(repetition)
            began = time.process_time()
            packed = compressor.pack(x, draws)
            encoded = time.process_time()
            compressor.unpack(packed, LENGTH)
            decoded = time.process_time()
            if repetition:  # the first one allocates
                measurements["encode"].append(1e3 * (encoded - began))
                measurements["decode"].append(1e3 * (decoded - encoded))
        measurements["share"] = sum(t.nbytes for t in packed) / x.nbytes
        seconds[name] = measurements
        print(name, *(f"{spread(measurements[k], 0)} ms" for k in ("encode", "decode")), flush=True)
    (options.folder / "times.json").write_text(json.dumps(seconds))


def time_section(measurements: dict[str, Any]) -> Iterator[str]:
    yield "## Time of encode and decode"
    yield ""
    yield (
        f"A vector of {LENGTH / 1e6:.1f} million numbers in float32 (45 MB), one thread of an "
        f"{platform.machine()} CPU, torch {torch.__version__}: milliseconds of processor time, "
        f"median (min to max) of {len(next(iter(measurements.values()))['encode'])}, with other "
        "load on the machine."
    )
    yield ""
    yield "| compressor | share of the bytes | encode | decode |"
    yield "| --- | ---: | ---: | ---: |"
    for name, values in measurements.items():
        encode, decode = (spread(values[key], 0) for key in ("encode", "decode"))
        yield f"| {name} | {values['share']:.2%} | {encode} | {decode} |"
    yield ""


# --- the page -------------------------------------------------------------------------------------


def write(options: argparse.Namespace) -> None:
    """The page of a data set; that of Fashion-MNIST also has the exact optima and the times."""
    dataset = options.dataset
    table, stem = completed(options), PAGES[dataset]
    if not table:
        sys.exit(f"{options.folder}: expected completed runs on {dataset}, found none; train first")
    plot(dataset, table, RESULTS / f"{stem}.png")
    lines = ["# Compressed uploads", "", f"![accuracy against megabytes uploaded]({stem}.png)", ""]
    lines += accuracy_section(dataset, table)
    links = [f"[{TITLES[other]}]({page}.md)" for other, page in PAGES.items() if other != dataset]
    lines += [f"See also: {', '.join(links)}.", ""]
    if stem == "compression":
        for name, section in (("exact", exact_section), ("times", time_section)):
            path = options.folder / f"{name}.json"
            if path.exists():
                lines += section(json.loads(path.read_text()))
    script = "[benchmarks/compression.py](../../benchmarks/compression.py)"
    found = (path for path in reader.find([options.folder]) if path.name.startswith(dataset))
    origin = archive.sentence(stem, map(reader.read, found))
    lines += [f"{script} makes these numbers and this page.{origin}", ""]
    (RESULTS / f"{stem}.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
