"""Seconds per round of this package beside a plain PyTorch loop and beside the bare minimum.

    python benchmarks/rounds.py                  # the table
    python benchmarks/rounds.py --check          # exit 1 if a target is missed
    python benchmarks/rounds.py --clock cpu --threads 1      # on a machine that others use too

CIFAR-10, LeNet, 100 clients of 500 samples, 10 active a round, 50 local steps of batch 50, random
crops and mirrored images. The contestants take turns, each repetition in another order, and every
ratio is taken within a repetition, so that the noise of a machine falls on all of them alike.

    plain     a client loop as people write it: a DataLoader per client, torchvision transforms per
              sample, torch.optim.SGD with weight decay, clip_grad_norm_, averaged state dicts; the
              network in the usual order of layers, with the same parameters and the same function
    bare      batches already cut, augmented and normalised in memory; forward, backward, SGD step,
              on this package's network
    fedavg    a whole round of the in-process engine (augmentation, clipping, weight decay,
    scaffold  messages, checks, aggregation and metrics included; evaluation not)
    feddyn
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from itertools import chain, cycle, islice, repeat
from typing import Any

import data
import numpy as np
import timing
import torch
from PIL import Image
from timing import SETTING, OneRound, engine_round, seconds_of, spread
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision import transforms

from fedaccord.config import RunConfig
from fedaccord.data import datasets
from fedaccord.task import Clients, Task, load_task

ENGINE = ("fedavg", "scaffold", "feddyn")
CONTESTANTS = ("plain", "bare", *ENGINE)
# Contestant, the one it is compared with, and the ratio allowed.
TARGETS = [
    ("fedavg", "bare", 1.10),
    ("scaffold", "bare", 1.15),
    ("feddyn", "bare", 1.15),
    ("fedavg", "plain", 0.85),
]


def main() -> None:
    options = arguments().parse_args()
    if options.quick:
        options.active, options.repetitions = 2, 3
    names = options.contestants or list(CONTESTANTS)
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        sys.exit(f"unknown contestant {unknown[0]!r}; known: {', '.join(CONTESTANTS)}")
    if options.check and set(names) != set(CONTESTANTS):
        sys.exit("--check needs all contestants")

    timing.prepare(options)
    try:
        rounds = make(names, options)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
    seconds = measure(rounds, options)
    print(table(seconds, options))
    if options.out:
        options.out.write_text(json.dumps(facts(seconds, options), indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(page(seconds, options))
    if options.check and (missed := missed_targets(seconds)):
        sys.exit("\n".join(missed))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("contestants", nargs="*", help=f"default: {', '.join(CONTESTANTS)}")
    timing.add_options(parser)
    timing.add_device(parser)
    timing.add_out(parser)
    parser.add_argument("--active", type=int, default=10, help="clients a round")
    parser.add_argument("--steps", type=int, default=50, help="local steps of a client")
    parser.add_argument("--quick", action="store_true", help="2 clients a round, 3 repetitions")
    return parser


def make(names: list[str], options: argparse.Namespace) -> dict[str, OneRound]:
    settings = SETTING | {
        "data-dir": str(data.find()),
        "device": options.device,
        "local-steps": options.steps,
        "fraction-train": options.active / SETTING["num-clients"],
    }
    configs = {name: RunConfig.make(settings | {"algo": name}) for name in ENGINE}
    task = load_task(configs["fedavg"].task, num_clients=SETTING["num-clients"])
    makers: dict[str, Callable[[], OneRound]] = {
        "plain": lambda: plain(task, options.steps),
        "bare": lambda: bare(task, options.steps),
    }
    for name, config in configs.items():
        makers[name] = lambda config=config: engine_round(task, config)  # type: ignore[misc]
    return {name: makers[name]() for name in names}


# --- the contestants ------------------------------------------------------------------------------


class ClientImages(TorchDataset[tuple[Tensor, int]]):
    """A client's images, transformed one by one, as torchvision's CIFAR10 does it."""

    def __init__(self, x: np.ndarray, y: list[int]) -> None:
        mean, std = datasets.DATASETS["cifar10"].scale or ((), ())
        self.x, self.y = x, y  # (n, 32, 32, 3) uint8
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(mean, std),
            ]
        )

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.x[i])), self.y[i]


def plain(task: Task, steps: int) -> OneRound:
    """FedAvg as people write it."""
    device, batch_size = task.device, SETTING["batch-size"]
    model = usual_network().to(device)
    w = {name: p.clone() for name, p in model.state_dict().items()}
    clients = []
    assert isinstance(task.clients, Clients)
    for i in range(len(task.clients)):
        x, y = task.clients.samples(i)
        clients.append(ClientImages(x.permute(0, 2, 3, 1).contiguous().numpy(), y.tolist()))

    def one_round(cohort: list[int]) -> None:
        nonlocal w
        locals_ = []
        for i in cohort:
            model.load_state_dict(w)
            model.train()
            optimizer = torch.optim.SGD(
                model.parameters(), lr=SETTING["lr"], weight_decay=SETTING["weight-decay"]
            )
            loader = DataLoader(clients[i], batch_size=batch_size, shuffle=True, num_workers=0)
            for x, y in islice(chain.from_iterable(repeat(loader)), steps):
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), SETTING["clip-norm"])
                optimizer.step()
            locals_.append({name: p.clone() for name, p in model.state_dict().items()})
        w = {name: torch.stack([local[name] for local in locals_]).mean(0) for name in w}

    return one_round


def bare(task: Task, steps: int) -> OneRound:
    """The least that as many steps can cost: no data work, no federation, no clipping."""
    model = task.module().to(task.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=SETTING["lr"])
    batches = [
        (x.clone(), y.clone())
        for i in range(10)
        for x, y in task.train_batches(i, 0, SETTING["batch-size"], 0, torch.float32)
    ]
    model.train()

    def one_round(cohort: list[int]) -> None:
        for x, y in islice(cycle(batches), len(cohort) * steps):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return one_round


def usual_network() -> nn.Sequential:
    """LeNet as it is usually written."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, 10),
    )


# --- measuring ------------------------------------------------------------------------------------


def measure(rounds: dict[str, OneRound], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every repetition, by contestant."""
    generator = random.Random(0)
    clients = range(SETTING["num-clients"])
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for one_round in rounds.values():
        one_round([0])  # connects, allocates, warms up
    for repetition in range(options.repetitions):
        cohort = sorted(generator.sample(clients, options.active))
        names = list(rounds)
        k = repetition % len(names)
        for name in names[k:] + names[:k]:
            seconds[name].append(seconds_of(rounds[name], cohort, options))
        print(f"repetition {repetition + 1}", {n: round(s[-1], 2) for n, s in seconds.items()})
    return seconds


def ratios(seconds: dict[str, list[float]], name: str, base: str) -> list[float]:
    """``name`` over ``base``, each taken within a repetition."""
    return [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]


def missed_targets(seconds: dict[str, list[float]]) -> list[str]:
    lines = []
    for name, base, allowed in TARGETS:
        ratio = statistics.median(ratios(seconds, name, base))
        if ratio > allowed:
            lines.append(f"missed: {name} takes {ratio:.3f} x {base}, allowed {allowed:.2f}")
    return lines


def table(seconds: dict[str, list[float]], options: argparse.Namespace) -> str:
    lines = [
        "",
        timing.conditions(options.active, options.steps, options),
        "",
        "| contestant | seconds a round: median (min to max) | ratio to bare, likewise |",
        "| --- | --: | --: |",
    ]
    for name, values in seconds.items():
        ratio = spread(ratios(seconds, name, "bare"), 3) if "bare" in seconds else "–"
        lines.append(f"| {name} | {spread(values, 2)} | {ratio} |")
    return "\n".join(lines)


def page(seconds: dict[str, list[float]], options: argparse.Namespace) -> str:
    """The table with what was measured, for docs/results."""
    missed = missed_targets(seconds) if set(seconds) == set(CONTESTANTS) else []
    lines = [
        "# Seconds per round",
        "",
        "CIFAR-10, LeNet, 100 clients of 500 samples, random crops and mirrored images. The "
        "contestants take turns and every ratio is taken within a repetition. "
        f"Hardware: {timing.hardware(options)}.",
        "",
        "- plain: a client loop as people write it, with a DataLoader per client, torchvision "
        "transforms per sample, `torch.optim.SGD`, `clip_grad_norm_` and averaged state dicts; "
        "LeNet in the usual order of layers",
        "- bare: batches cut, augmented and normalised beforehand; forward, backward and SGD step "
        "on this package's LeNet and nothing else",
        "- fedavg, scaffold, feddyn: a whole round of the in-process engine, without evaluation",
        table(seconds, options),
        "",
        "Targets (medians): "
        + ", ".join(f"{name} at most {allowed:.2f} x {base}" for name, base, allowed in TARGETS)
        + f": {'; '.join(missed) or 'all met'}.",
        "",
        f"fedavg takes {statistics.median(ratios(seconds, 'fedavg', 'plain')):.2f} x plain."
        if {"fedavg", "plain"} <= set(seconds)
        else "",
        "",
        f"Made by `{timing.command(arguments(), options)}`.",
        "",
    ]
    return "\n".join(lines)


def facts(seconds: dict[str, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is needed to read the numbers later."""
    return {
        "setting": SETTING | {"local-steps": options.steps, "active": options.active},
        **timing.machine(options),
        "seconds": seconds,
        "ratio-to-bare": {
            name: statistics.median(ratios(seconds, name, "bare"))
            for name in seconds
            if "bare" in seconds
        },
        "targets": [
            {"contestant": name, "of": base, "allowed": allowed} for name, base, allowed in TARGETS
        ],
    }


if __name__ == "__main__":
    main()
