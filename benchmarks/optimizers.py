"""CPU seconds of a client's local round with each optimiser, beside PyTorch's own on bare steps.

    python benchmarks/optimizers.py              # the table
    python benchmarks/optimizers.py --check      # exit 1 if a target is missed
    python benchmarks/optimizers.py --markdown docs/results/optimizers.md

A round of FedAvg on batches in memory: the steps with clip and weight decay, from a request to the
reply. Bare: forward, backward and the step of torch.optim, on a model of its own: the steps of
momentum and AdamW are fused, those of SGD and torch.optim.Muon are not. The two take turns, and
ratios are taken within a repetition, of CPU seconds of one thread. Muon has the mlp, whose hidden
layers are matrices: torch.optim.Muon takes no others.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import timing
import torch
from timing import spread, turns
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord.client.train import Data, local_round
from fedaccord.core.request import TrainInstruction, TrainRequest
from fedaccord.core.rounds import broadcast, first_state
from fedaccord.strategies import FedAvg
from fedaccord.task import models
from fedaccord.task.flat_model import FlatModel

STEPS, BATCH, LR, WD, CLIP = 50, 50, 0.01, 0.001, 10.0
Batches = list[tuple[Tensor, Tensor]]
BARE: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=LR)],
    "momentum": lambda m: [torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9, fused=True)],
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=WD, fused=True)],
    "muon": lambda m: muon(m),
}
TARGETS = {"sgd": 1.05, "adamw": 1.10, "muon": 1.0}  # ratio to bare


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    *hidden, output = (p for p in model.parameters() if p.ndim == 2)
    rest = [output, *(p for p in model.parameters() if p.ndim != 2)]
    setting: dict[str, Any] = {"lr": LR, "weight_decay": WD}
    return [
        torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **setting),
        torch.optim.AdamW(rest, fused=True, **setting),
    ]


def main() -> None:
    options = arguments().parse_args()
    torch.set_num_threads(1)
    seconds = measure(batches(), options)
    text = table(seconds, options)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.check and (missed := missed_targets(seconds)):
        sys.exit("\n".join(missed))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--model", default="lenet")
    timing.add_page(parser)
    return parser


def batches() -> Batches:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(BATCH, 3, 32, 32, generator=generator),
            torch.randint(10, (BATCH,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def module(name: str, options: argparse.Namespace) -> nn.Module:
    return models.build("mlp" if name == "muon" else options.model, (3, 32, 32), 10, seed=0)


def bare(name: str, batches: Batches, options: argparse.Namespace) -> Callable[[], None]:
    model = module(name, options)
    steps = BARE[name](model)

    def one_round() -> None:
        for x, y in batches:
            for each in steps:
                each.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
            for each in steps:
                each.step()

    return one_round


def ours(name: str, batches: Batches, options: argparse.Namespace) -> Callable[[], None]:
    method = FedAvg(
        optimizer=name, lr=LR, weight_decay=WD, clip_norm=CLIP, local_epochs=1, batch_size=BATCH
    )
    model = FlatModel(module(name, options))
    shapes, s = tuple(map(tuple, model.shapes)), first_state(method, model.w.clone(), 1)
    instruction = TrainInstruction(
        round=0,
        rounds=1,
        half=method.client_half(),
        shapes=shapes,
        lr=LR,
        weight_decay=WD,
        clip_norm=CLIP,
        local_epochs=1,
        local_steps=0,
        batch_size=BATCH,
        seed=0,
        precision="float32",
        client=0,
    )

    def one_round() -> None:
        request = TrainRequest(instruction, broadcast(method, s, 0))
        local_round(request, None, Data(model, batches, F.cross_entropy))

    return one_round


def measure(batches: Batches, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every repetition, by contestant: an optimiser, or one with "bare" before it."""
    rounds = {f"bare {name}": bare(name, batches, options) for name in BARE}
    rounds |= {name: ours(name, batches, options) for name in BARE}
    return turns(rounds, options.repetitions)


def ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    """Of an optimiser to PyTorch's own, each taken within a repetition."""
    return [a / b for a, b in zip(seconds[name], seconds[f"bare {name}"], strict=True)]


def missed_targets(seconds: dict[str, list[float]]) -> list[str]:
    medians = {name: statistics.median(ratios(seconds, name)) for name in TARGETS}
    return [
        f"missed: {name} takes {medians[name]:.3f} x bare, allowed {allowed:.2f}"
        for name, allowed in TARGETS.items()
        if medians[name] > allowed
    ]


def table(seconds: dict[str, list[float]], options: argparse.Namespace) -> str:
    lines = [
        "# Local optimisers",
        "",
        f"A client's local round of FedAvg: {STEPS} steps of batch {BATCH}, {options.model}, with "
        "clip and weight decay; bare: forward, backward and the step of `torch.optim`, fused for "
        "momentum, adamw and what muon leaves to AdamW, not for sgd and `torch.optim.Muon`. "
        f"CPU seconds of one thread, {options.repetitions} repetitions, torch "
        f"{torch.__version__}. Muon has the mlp, whose hidden layers are matrices.",
        "",
        "| optimiser | seconds: median (min to max) | bare, likewise | ratio, likewise |",
        "| --- | --: | --: | --: |",
    ]
    for name in BARE:
        columns = (seconds[name], seconds[f"bare {name}"], ratios(seconds, name))
        lines.append(f"| {name} | {' | '.join(spread(each, 3) for each in columns)} |")
    targets = ", ".join(f"{name} at most {allowed:.2f}" for name, allowed in TARGETS.items())
    missed = missed_targets(seconds)
    lines += ["", f"Targets (medians): {targets}: {'; '.join(missed) or 'all met'}.", ""]
    lines += [
        f"Made by `{timing.command(arguments(), options)}`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
