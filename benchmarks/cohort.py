"""Milliseconds a client's local step takes, one client at a time and as a cohort.

    python benchmarks/cohort.py                        # the table
    python benchmarks/cohort.py mlp64 --cohorts 100    # one model, one size
    python benchmarks/cohort.py --check                # exit 1 where a target is missed

CPU time with one thread. The contestants take turns, each repetition in another order, and every
ratio is taken within a repetition. Batches lie prepared in memory, FedAvg's rule, no clipping.

    bare      one client at a time: forward, backward and an SGD step in plain PyTorch
    solver    one client at a time through `client_round`
    bare n    n clients: torch.vmap over stacks of the parameters, torch.func.grad, an SGD step
    cohort n  n clients through `client_round`
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import timing
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedaccord.core.plugin import ClientHalf
from fedaccord.core.rounds import client_round
from fedaccord.core.rule import LocalConfig, LocalRule, Model, Stateless
from fedaccord.task import models
from fedaccord.task.cohort_solver import CohortSolver, Stack
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.solver import SequentialSolver

LR, ALONE = 0.001, 10  # clients that a repetition takes one at a time
TARGET = 1.5  # of the bare steps


def dense(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions() -> nn.Module:
    """A small network for 8x8 images: 6,090 parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: dense(64, 10), (64,)),
    "mlp64": (lambda: dense(64, 64, 10), (64,)),
    "cnn": (convolutions, (1, 8, 8)),
    "mlp": (lambda: dense(784, 200, 200, 10), (784,)),
    "lenet": (lambda: models.build("lenet", (3, 32, 32), 10), (3, 32, 32)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"default: {', '.join(MODELS)}")
    timing.add_options(parser)
    parser.set_defaults(threads=1, clock="cpu", repetitions=9)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 50])
    parser.add_argument("--steps", type=int, default=5, help="of each client in a repetition")
    options = parser.parse_args()
    names = options.models or [*MODELS]
    if unknown := [name for name in names if name not in MODELS]:
        sys.exit(f"unknown model {unknown[0]!r}; known: {', '.join(MODELS)}")
    timing.prepare(options)
    print(
        f"{timing.hardware(options)}, {torch.get_num_threads()} thread(s), torch "
        f"{torch.__version__}; {options.steps} steps a client, {options.repetitions} repetitions; "
        f"{options.clock} time\n\n"
        "| model | batch | clients | bare | solver / bare | bare cohort | cohort | cohort / bare "
        "cohort | gain |\n| --- | --: | --: | --: | --: | --: | --: | --: | --: |"
    )
    missed = []
    for name in names:
        for batch in options.batches:
            for n in options.cohorts:
                missed += line(name, batch, n, options)
    if options.check and missed:
        sys.exit("\n".join(missed))


def line(name: str, batch: int, n: int, options: argparse.Namespace) -> list[str]:
    """Prints a line of the table; the targets that it misses."""
    found = measure(contestants(name, batch, n, options.steps), options)
    bare, alone = found["bare"], ratio(found, "solver", "bare")
    cells = [name, str(batch), str(n), timing.spread(bare, 3), timing.spread(alone, 2)]
    missed = [("solver", alone)]
    if "cohort" in found:
        together = ratio(found, "cohort", "bare cohort")
        missed.append(("cohort", together))
        cells += [timing.spread(found[kind], 3) for kind in ("bare cohort", "cohort")]
        cells += [timing.spread(together, 2), timing.spread(ratio(found, "solver", "cohort"), 1)]
    else:
        cells += ["one client at a time only", "", "", ""]
    print(f"| {' | '.join(cells)} |", flush=True)
    return [
        f"missed: {name}, batch {batch}, {n} clients: {kind} takes {statistics.median(r):.2f} x "
        f"bare, allowed {TARGET}"
        for kind, r in missed
        if statistics.median(r) > TARGET
    ]


def ratio(found: dict[str, list[float]], name: str, base: str) -> list[float]:
    return [a / b for a, b in zip(found[name], found[base], strict=True)]


def measure(
    kinds: dict[str, tuple[Callable[[], object], int]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Milliseconds of a client's step in every repetition, by contestant."""
    clock = timing.CLOCKS[options.clock]
    for run, _ in [*kinds.values()]:
        run()  # imports, allocates
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for repetition in range(options.repetitions):
        names = [*kinds]
        k = repetition % len(names)
        for name in names[k:] + names[:k]:
            run, client_steps = kinds[name]
            began = clock()
            run()
            found[name].append(1e3 * (clock() - began) / client_steps)
    return found


# --- the contestants ------------------------------------------------------------------------------


def contestants(
    name: str, batch: int, n: int, steps: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """What to run, and how many client-steps it takes; without cohorts where a model refuses."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    x, y = torch.randn(max(n, ALONE), batch, *shape), torch.randint(10, (max(n, ALONE), batch))
    module, model = build(), FlatModel(build())
    clients = [[(x[i], y[i])] * steps for i in range(ALONE)]
    stack = Stack(x[:n], y[:n], torch.full((n,), batch))
    kinds: dict[str, tuple[Callable[[], object], int]] = {
        "bare": (partial(bare, module, clients), ALONE * steps),
        "solver": (partial(one_by_one, model, clients), ALONE * steps),
        "bare cohort": (partial(bare_cohort, module, x[:n], y[:n], steps), n * steps),
        "cohort": (partial(cohort, model, stack, steps), n * steps),
    }
    try:
        kinds["cohort"][0]()
    except NotImplementedError:
        del kinds["bare cohort"], kinds["cohort"]
    return kinds


def bare(module: nn.Module, clients: list[list[tuple[Tensor, Tensor]]]) -> None:
    parameters = [*module.parameters()]
    for client in clients:
        for x, y in client:
            for p in parameters:
                p.grad = None
            F.cross_entropy(module(x), y).backward()
            with torch.no_grad():
                for p in parameters:
                    p.add_(p.grad, alpha=-LR)


def bare_cohort(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    w = {name: p.detach().expand(len(x), *p.shape).clone() for name, p in module.named_parameters()}

    def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, w, (x,)), y)

    gradient = vmap(grad(loss))
    for _ in range(steps):
        for name, g in gradient(w, x, y).items():
            w[name].add_(g, alpha=-LR)


def one_by_one(model: FlatModel, clients: list[list[tuple[Tensor, Tensor]]]) -> None:
    w = model.w.clone()
    for i, client in enumerate(clients):
        settings = LocalConfig(0, 1, LR, 0.0, 0.0, i, 0, model.shapes)
        solve = SequentialSolver(model, client, F.cross_entropy)
        client_round(ClientHalf(LocalRule()), Model(w), Stateless(), settings, solve)


def cohort(model: FlatModel, stack: Stack, steps: int) -> None:
    n = len(stack.sizes)
    settings = LocalConfig(0, 1, LR, 0.0, 0.0, range(n), 0, model.shapes)
    solve = CohortSolver(model, [stack] * steps, F.cross_entropy)
    down = Model(model.w.expand(n, -1))
    client_round(ClientHalf(LocalRule()), down, Stateless(), settings, solve)


if __name__ == "__main__":
    main()
