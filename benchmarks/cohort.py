"""Milliseconds of a client's local step in a whole round, one client at a time and many at once.

    python benchmarks/cohort.py                        # the table
    python benchmarks/cohort.py mlp64 --cohorts 100    # one model, one size
    python benchmarks/cohort.py --check                # exit 1 if a target is missed
    python benchmarks/cohort.py --markdown docs/results/cohort.md

CPU time with one thread. The contestants take turns, each repetition in another order, and every
ratio is taken within a repetition.

    bare      one client at a time: forward, backward and an SGD step in plain PyTorch
    round     a round of the in-process engine with `vectorize=off`
    bare n    n clients: torch.vmap over stacks of the parameters, torch.func.grad, an SGD step
    round n   a round of the in-process engine with `vectorize=on`

Bare steps have their batches prepared in memory. A round is all of it but the evaluation: messages,
batches cut and shuffled, checks, the server's step, metrics. FedAvg without clipping or decay.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import timing
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedaccord.config import RunConfig
from fedaccord.engine.vectorize import MAX_MODEL_BYTES, MAX_MULTIPLICATIONS, MIN_CLIENTS, choose
from fedaccord.task import Clients, Task

LR, ALONE = 0.001, 20  # clients at most that a repetition takes one at a time
POOL, HELD = 2000, 100  # samples in all, and of each client, drawn with replacement
FLAT = (64,)  # numbers of an image of the digits


def dense(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions() -> nn.Module:
    """A small network for 8x8 images: 6,090 parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


MODELS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": ("linear 64-10", partial(dense, 64, 10), FLAT),
    "linear784": ("linear 784-10", partial(dense, 784, 10), (784,)),
    "mlp64": ("MLP 64-64-10", partial(dense, 64, 64, 10), FLAT),
    "cnn": ("CNN, 8x8 images", convolutions, (1, 8, 8)),
    "mlp200": ("MLP 64-200-200-10", partial(dense, 64, 200, 200, 10), FLAT),
    "mlp784-64": ("MLP 784-64-10", partial(dense, 784, 64, 10), (784,)),
    "mlp784": ("MLP 784-200-200-10", partial(dense, 784, 200, 200, 10), (784,)),
}
Times = dict[str, list[float]]  # milliseconds of a client's step in each repetition, by contestant
Contestants = dict[str, tuple[Callable[[], object], int]]  # what to run, and its client-steps
MOST = 1.5  # of the bare steps
GAINS = {("mlp64", 8, 100): 4.0, ("mlp64", 50, 100): 2.5}  # at least


def main() -> None:
    options = arguments().parse_args()
    names = options.models or [*MODELS]
    if unknown := [name for name in names if name not in MODELS]:
        sys.exit(f"unknown model {unknown[0]!r}; known: {', '.join(MODELS)}")
    timing.prepare(options)
    head = [
        f"{timing.hardware(options)}, {torch.get_num_threads()} thread(s), torch "
        f"{torch.__version__}; {options.steps} steps a client, {options.repetitions} repetitions, "
        f"median (min to max); milliseconds a client's step, {options.clock} time",
        "",
        "| model | batch | clients | bare | round / bare | bare n | round n / bare n "
        "| gain: round / round n | `auto` takes |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    print("\n".join(head))
    rows, missed = [], []
    for name in names:
        for batch in options.batches:
            for n in options.cohorts:
                row, misses = line(name, batch, n, options)
                print(row, flush=True)
                rows.append(row)
                missed += misses
    if options.markdown:
        options.markdown.write_text(page([*head, *rows], missed, options))
    if options.check and missed:
        sys.exit("\n".join(missed))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("models", nargs="*", help=f"default: {', '.join(MODELS)}")
    timing.add_options(parser)
    parser.set_defaults(threads=1, clock="cpu", repetitions=3)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[MIN_CLIENTS, 10, 100])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 50])
    parser.add_argument("--steps", type=int, default=10, help="of each client in a round")
    return parser


def line(name: str, batch: int, n: int, options: argparse.Namespace) -> tuple[str, list[str]]:
    """A line of the table, and the targets that it misses."""
    title, build, shape = MODELS[name]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(POOL, *shape, generator=g)
    y = torch.randint(10, (POOL,), generator=g)
    rng = np.random.default_rng(0)
    task = Task(build, Clients(x, y, [rng.choice(POOL, HELD) for _ in range(n)]))
    config = partial(settings, batch, n, options.steps)
    measurements = measure(contestants(task, config, batch, n, options.steps), options)
    choice = choose("auto", task, config("auto").strategy, n)
    alone, together = ratio(measurements, "round", "bare"), ratio(measurements, "round n", "bare n")
    gain = ratio(measurements, "round", "round n")
    cells = [
        *(title, str(batch), str(n)),
        *(timing.spread(measurements["bare"], 3), timing.spread(alone, 2)),
        *(timing.spread(measurements["bare n"], 3), timing.spread(together, 2)),
        *(timing.spread(gain, 1), "many at once" if choice.vectorize else "one at a time"),
    ]
    missed = []
    if (name, batch, n) in GAINS:
        missed = [
            f"{title}, batch {batch}, {n} clients: {what} takes {share:.2f} x bare, allowed {MOST}"
            for what, share in (
                ("round", statistics.median(alone)),
                ("round n", statistics.median(together)),
            )
            if share > MOST
        ]
        if (least := GAINS[name, batch, n]) > (gained := statistics.median(gain)):
            missed.append(f"{title}, batch {batch}, {n} clients: gain {gained:.1f}, below {least}")
    return f"| {' | '.join(cells)} |", missed


def page(table: list[str], missed: list[str], options: argparse.Namespace) -> str:
    """The table with what was measured, for docs/results."""
    return "\n".join(
        [
            "# One client at a time, and many at once",
            "",
            "The time of a client's local step in a whole round of the in-process engine, "
            "messages, batches, checks, the server's step and metrics included, against bare steps "
            "in plain "
            f"PyTorch on prepared batches. Each client holds {HELD} samples; FedAvg without "
            "clipping or weight decay. `bare` and `round` take one client at a time "
            "(`vectorize=off`), `bare n` and `round n` all clients at once (`torch.vmap`, "
            "`vectorize=on`). Contestants take turns; ratios are taken within a repetition. The "
            "last column is the choice of `vectorize=auto`: many at once if a round has at least "
            f"{MIN_CLIENTS} clients, the model at most {MAX_MODEL_BYTES:,} bytes of parameters, "
            f"and a batch at most {MAX_MULTIPLICATIONS:,} multiplications in its forward pass.",
            "",
            *table,
            "",
            f"Targets, with MLP 64-64-10 and 100 clients: at most {MOST} x the bare steps, and a "
            f"gain of {GAINS['mlp64', 8, 100]:g} at batch 8 and {GAINS['mlp64', 50, 100]:g} at "
            f"batch 50: {'; '.join(f'missed: {miss}' for miss in missed) or 'all met'}.",
            "",
            f"Made by `{timing.command(arguments(), options)}`.",
            "",
        ]
    )


def ratio(measurements: Times, name: str, base: str) -> list[float]:
    return [a / b for a, b in zip(measurements[name], measurements[base], strict=True)]


def measure(kinds: Contestants, options: argparse.Namespace) -> Times:
    clock = timing.CLOCKS[options.clock]
    for run, _ in [*kinds.values()]:
        run()  # imports, allocates
    measurements: Times = {name: [] for name in kinds}
    for repetition in range(options.repetitions):
        names = [*kinds]
        k = repetition % len(names)
        for name in names[k:] + names[:k]:
            run, client_steps = kinds[name]
            began = clock()
            run()
            measurements[name].append(1e3 * (clock() - began) / client_steps)
    return measurements


# --- the contestants ------------------------------------------------------------------------------


def settings(batch: int, n: int, steps: int, vectorize: str) -> RunConfig:
    values: dict[str, Any] = {"algo": "fedavg", "num-clients": n, "fraction-train": 1.0, "lr": LR}
    values |= {"batch-size": batch, "local-steps": steps, "weight-decay": 0.0, "clip-norm": 0.0}
    return RunConfig.make(values | {"vectorize": vectorize})


def contestants(
    task: Task, config: Callable[[str], RunConfig], batch: int, n: int, steps: int
) -> Contestants:
    assert isinstance(task.clients, Clients)
    x, y = task.clients.x[:batch], task.clients.y[:batch]
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    xs, ys = x.expand(n, *x.shape).contiguous(), y.expand(n, batch).contiguous()
    alone, together = (timing.engine_round(task, config(how)) for how in ("off", "on"))
    everyone, some = [*range(n)], [*range(min(n, ALONE))]
    return {
        "bare": (partial(bare, task.module(), x, y, len(some) * steps), len(some) * steps),
        "round": (partial(alone, some), len(some) * steps),
        "bare n": (partial(bare_cohort, task.module(), xs, ys, steps), n * steps),
        "round n": (partial(together, everyone), n * steps),
    }


def bare(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    parameters = [*module.parameters()]
    for _ in range(steps):
        for p in parameters:
            p.grad = None
        F.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for p in parameters:
                assert p.grad is not None
                p.add_(p.grad, alpha=-LR)


def bare_cohort(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    w = {name: p.detach().expand(len(x), *p.shape).clone() for name, p in module.named_parameters()}

    def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, w, (x,)), y)

    gradient = vmap(grad(loss))
    for _ in range(steps):
        for name, g in gradient(w, x, y).items():
            w[name].add_(g, alpha=-LR)


if __name__ == "__main__":
    main()
