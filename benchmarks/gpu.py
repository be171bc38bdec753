"""The GPU path: its results beside the CPU's, its rounds beside bare steps.

    python benchmarks/gpu.py                                # one command, on a machine with a GPU
    python benchmarks/gpu.py --device cpu --quick           # the same path, tiny: does it work?
    python benchmarks/gpu.py --markdown docs/results/gpu.md

First every method takes three rounds in float64 on the device and on the CPU, its clients one at a
time and in one call. Then, for each model and precision, seconds of bare steps (autograd, batches
already on the device, w <- w - lr g) and of a round of the in-process engine with FedAvg, one
client at a time and in one call; then a round of every method; then the targets. Images are random
numbers: no data set is needed.

    python -m pytest tests -k gpu                           # the tests that need a GPU, and others
"""

import argparse
import logging
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timing
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import simulate
from fedaccord.config import RunConfig
from fedaccord.core.request import ModelSettings
from fedaccord.data.kind import Dataset
from fedaccord.data.transforms import augment, normalise
from fedaccord.data.vision import CIFAR10
from fedaccord.strategies import METHODS
from fedaccord.task import Clients, Task, models
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.solver import by_autograd, tf32_as

SHAPE, CLOSE = (3, 32, 32), 1e-8
MODELS = ("resnet18", "resnet18-cifar", "lenet", "cnn", "mlp")
TOGETHER = tuple(m for m in MODELS if m != "cnn")  # one call does not support the CNN's dropout
OWN_LENGTH = ("dpsgd", "scaffnew")  # have steps of their own
PRECISIONS = ("float32", "tf32", "bfloat16")


class Size(NamedTuple):
    """A federation of equal clients, all with whole batches."""

    clients: int
    active: int
    samples: int  # of a client
    batch: int
    steps: int
    classes: int = 10


USUAL = Size(10, 10, 500, 50, 50)
PFL = Size(1000, 50, 50, 10, 5)  # arXiv:2404.06430, CIFAR-10 i.i.d.
FLUTE = Size(500, 10, 100, 20, 5, classes=100)  # arXiv:2203.13789, fed-CIFAR100
TINY = Size(3, 2, 12, 4, 3)


def main() -> None:
    options = arguments().parse_args()
    options.threads, options.clock = 1, "wall"
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("--device: expected a GPU, found none; --device cpu --quick tries the path")
    timing.prepare(options)
    logging.getLogger("flwr").setLevel(logging.ERROR)  # of settings that a method does not read
    text = ""
    for part in parts(options):
        print(part, flush=True)
        text += f"{part}\n"
    if options.markdown:
        text += f"\nMade by `{timing.command(arguments(), options)}`.\n"
        options.markdown.write_text(text, encoding="utf-8")


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of the path")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    return parser


def parts(options: argparse.Namespace) -> Iterator[str]:
    cuda = options.device != "cpu"
    name = torch.cuda.get_device_name(options.device) if cuda else "the CPU, for a test"
    yield f"# Rounds on a GPU\n\nOn {name}, torch {torch.__version__}.\n"
    yield f"{checked(options)}\n"
    usual = TINY if options.quick else USUAL
    yield (
        f"FedAvg, {usual.active} clients x {usual.steps} steps of batch {usual.batch}, augmented; "
        f"median of {options.repetitions} rounds after two others, without evaluation. The ratio "
        "is that of the faster round to the bare steps, which autograd launches one by one.\n\n"
        "| model | precision | bare steps, s | a round, s | in one call, s | ratio |\n"
        "| --- | --- | --: | --: | --: | --: |"
    )
    best: dict[str, tuple[float, float]] = {}
    for model in options.models:
        for precision in options.precisions:
            bare, whole = compared(model, precision, usual, options)
            row, fastest = f"| {model} | {precision} | {bare:.3f} | {whole:.3f} |", whole
            if model in TOGETHER:
                together = rounds_of(model, precision, usual, options, together=True)
                row, fastest = f"{row} {together:.3f} |", min(whole, together)
            else:
                row += " |"
            best[model] = min(best.get(model, (fastest, math.inf)), (fastest, fastest / bare))
            yield f"{row} {fastest / bare:.3f} |"
    yield (
        "\ndpsgd takes one step a round, and scaffnew draws the number of its steps: their seconds "
        "are not those of equal work.\n\n"
        "| method, with LeNet, in one call | a round, s |\n| --- | --: |"
    )
    for method in METHODS:
        size = usual._replace(clients=usual.active)
        seconds = rounds_of("lenet", options.precisions[-1], size, options, method, together=True)
        yield f"| {method} | {seconds:.3f} |"
    yield "\n| target | measured | allowed | |\n| --- | --: | --: | --- |"
    for what, value, allowed in targets(best, options):
        yield f"| {what} | {value:.3g} | {allowed:g} | {'met' if value <= allowed else 'missed'} |"


def targets(
    best: dict[str, tuple[float, float]], options: argparse.Namespace
) -> Iterator[tuple[str, float, float]]:
    """What, measured, allowed; of the fastest precision."""
    if "resnet18" in best:
        yield "ResNet-18-GN, 10 clients x 50 steps of batch 50, s a round", best["resnet18"][0], 1.0
        yield "its ratio to bare steps", best["resnet18"][1], 1.05
    fastest = options.precisions[-1]
    pfl, flute = (TINY, TINY) if options.quick else (PFL, FLUTE)
    one = rounds_of("cnn", fastest, pfl, options)
    evaluated = evaluation("cnn", fastest, pfl, options)
    yield "pfl's setting, s for 1,500 rounds and 150 evaluations", 1500 * one + 150 * evaluated, 60
    yield "FLUTE's ResNet-18-GN, s a round", rounds_of("resnet18", fastest, flute, options), 0.15


# --- results --------------------------------------------------------------------------------------


def checked(options: argparse.Namespace) -> str:
    """Every method on the device and on the CPU, in float64, with a small convolutional network."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(36, 3)),
    )
    data = [
        (torch.randn(n, 1, 8, 8, dtype=torch.float64), torch.randint(3, (n,))) for n in (12, 9, 12)
    ]
    far, worst = 0.0, ""
    for name in METHODS:
        length: dict[str, Any] = {} if name in OWN_LENGTH else {"local_epochs": 2}
        run = partial(
            simulate, name, clients=data, model=model, rounds=3, batch_size=4, **length,
            participation=1.0, dtype=torch.float64, record="weights",
        )  # fmt: skip
        exact = run(device="cpu").weights
        assert exact is not None
        for vectorize in ("off", "on"):
            ours = run(device=options.device, vectorize=vectorize).weights
            assert ours is not None
            error = float((ours - exact).norm() / exact.norm())
            far, worst = max((far, worst), (error, f"{name}, vectorize={vectorize}"))
    verdict = "met" if far <= CLOSE else "MISSED"
    return (
        f"{len(METHODS)} methods, three rounds in float64 compared with the CPU: relative distance "
        f"of all w^t at most {far:.1e} ({worst}), allowed {CLOSE:g}: {verdict}."
    )


# --- seconds --------------------------------------------------------------------------------------


def task_of(model: str, size: Size, options: argparse.Namespace) -> Task:
    g = torch.Generator().manual_seed(0)
    n = size.clients * size.samples
    x = torch.randint(256, (n, *SHAPE), generator=g, dtype=torch.uint8)
    y = torch.randint(size.classes, (n,), generator=g)
    tested = min(n, 100 if options.quick else 10_000)
    name, _, stem = model.partition("-")
    data = Dataset("random", x[:0], y[:0], x[:0], y[:0], size.classes, *(CIFAR10.scale or ()))
    return Task(
        partial(models.build, name, SHAPE, size.classes, stem=stem or "imagenet"),
        Clients([*x.split(size.samples)], [*y.split(size.samples)]),
        (x[:tested], y[:tested]),
        device=torch.device(options.device),
        prepare=lambda x, dtype: normalise(x, data, dtype),
        augment=augment,
    )


def config_of(
    size: Size, precision: str, method: str = "fedavg", together: bool = False
) -> RunConfig:
    settings: dict[str, Any] = {"algo": method, "precision": precision, "num-clients": size.clients}
    settings |= {"local-steps": size.steps, "batch-size": size.batch}
    settings |= {"vectorize": "on" if together else "off"}
    if method == "dpsgd":
        settings["local-steps"] = 1
    return RunConfig.make(settings | {"fraction-train": size.active / size.clients})


def rounds_of(
    model: str,
    precision: str,
    size: Size,
    options: argparse.Namespace,
    method: str = "fedavg",
    together: bool = False,
) -> float:
    """The median round after two, in which libraries choose and clients begin."""
    config = config_of(size, precision, method, together)
    one = timing.engine_round(task_of(model, size, options), config)
    active = [*range(size.active)]
    seconds = [timing.seconds_of(one, active, options) for _ in range(2 + options.repetitions)]
    return statistics.median(seconds[2:])


def evaluation(model: str, precision: str, size: Size, options: argparse.Namespace) -> float:
    task = task_of(model, size, options)
    w = task.model(ModelSettings(precision)).w.clone()
    seconds = []
    for _ in range(1 + options.repetitions):
        began = time.perf_counter()
        task.evaluate(w, ModelSettings(precision))  # which waits for its numbers
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def compared(
    model: str, precision: str, size: Size, options: argparse.Namespace
) -> tuple[float, float]:
    """Seconds of the bare steps of a round, and of the round."""
    task = task_of(model, size, options)
    flat = FlatModel(task.module(), device=options.device)
    batches: list[tuple[Tensor, Tensor]] = []
    passes = task.train_batches(0, 0, size.batch, 0, torch.float32)
    while len(batches) < size.steps:
        batches += [*passes]
    del batches[size.steps :]

    def bare(_: list[int]) -> None:
        with tf32_as(precision, flat.w.device):
            for x, y in batches:
                by_autograd(flat, x, y, F.cross_entropy, precision)
                flat.w.add_(flat.g, alpha=-0.01)

    active = [*range(size.active)]
    one = timing.engine_round(
        replace(task, _of_thread=threading.local()), config_of(size, precision)
    )
    steps, rounds = [], []
    for _ in range(2 + options.repetitions):
        steps.append(timing.seconds_of(bare, active, options))
        rounds.append(timing.seconds_of(one, active, options))
    return size.active * statistics.median(steps[2:]), statistics.median(rounds[2:])


if __name__ == "__main__":
    main()
