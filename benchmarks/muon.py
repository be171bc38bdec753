"""Muon's iteration on square Gram matrices, beside products of the whole matrix and PyTorch's.

    python benchmarks/muon.py                    # the tables
    python benchmarks/muon.py --markdown docs/results/muon.md

The contestants take turns; ratios are of CPU seconds of one thread, within a repetition. The same
iteration is measured in a process that may use only the instructions of AVX2.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import optimizers
import timing
import torch
from timing import spread, turns
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from fedaccord.core import optimizer

SHAPES = (200, 784), (64, 576)
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
CALLS = 20  # of an iteration, in a repetition
Seconds = dict[str, dict[str, list[float]]]  # by work, by contestant


def whole(x: Tensor) -> Tensor:
    """The iteration with products of the whole matrix."""
    with mock.patch.object(optimizer, "LONG", sys.maxsize):
        return optimizer.orthogonal(x)


def of_torch(x: Tensor) -> Tensor:
    """The iteration of torch.optim.Muon, rounded to bfloat16."""
    steps = optimizer.ITERATIONS
    return _zeropower_via_newtonschulz(x, optimizer.COEFFICIENTS, steps, 1e-7)


FORMS = {"Gram": optimizer.orthogonal, "whole": whole, "torch": of_torch}


def main() -> None:
    options = arguments().parse_args()
    torch.set_num_threads(1)
    seconds = {f"{a} x {b}": of_iteration((a, b), options.repetitions) for a, b in SHAPES}
    if options.json:
        print(json.dumps(seconds))
        return
    seconds["local round of the mlp"] = of_round(options.repetitions)
    text = page(seconds, with_avx2(options.repetitions), options)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument(
        "--json", action="store_true", help="only an iteration's seconds, of this process"
    )
    parser.add_argument("--markdown", type=Path, help="write setting and tables to this file")
    return parser


def with_avx2(repetitions: int) -> Seconds:
    command = [sys.executable, __file__, "--json", "--repetitions", str(repetitions)]
    result = subprocess.run(command, env=os.environ | AVX2, check=True, capture_output=True)
    seconds: Seconds = json.loads(result.stdout)
    return seconds


def of_iteration(shape: tuple[int, int], repetitions: int) -> dict[str, list[float]]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def calls(form: Callable[[Tensor], Tensor]) -> None:
        for _ in range(CALLS):
            form(x)

    return turns({name: partial(calls, form) for name, form in FORMS.items()}, repetitions)


def of_round(repetitions: int) -> dict[str, list[float]]:
    """A client's round, as in optimizers.py; PyTorch's on bare steps."""
    options = argparse.Namespace(model="mlp")
    batches = optimizers.batches()
    ours = optimizers.ours("muon", batches, options)

    def with_whole() -> None:
        with mock.patch.object(optimizer, "LONG", sys.maxsize):
            ours()

    bare = optimizers.bare("muon", batches, options)
    return turns({"Gram": ours, "whole": with_whole, "torch": bare}, repetitions)


def error(x: Tensor) -> float:
    """The largest difference from the factor in float64, relative to its largest number."""
    exact = whole(x.double())
    return float((optimizer.orthogonal(x).double() - exact).abs().max() / exact.abs().max())


def change(x: Tensor) -> float:
    """The relative change of the factor, in L2 norm, by rounding to bfloat16."""
    exact = whole(x.double())
    return float((of_torch(x).double() - exact).norm() / exact.norm())


def page(seconds: Seconds, avx2: Seconds, options: argparse.Namespace) -> str:
    lines = [
        "# Muon's iteration",
        "",
        f"CPU seconds of one thread, {options.repetitions} repetitions, torch "
        f"{torch.__version__}. An iteration: {CALLS} calls of one matrix. A local round: "
        f"{optimizers.STEPS} steps of batch {optimizers.BATCH} on images of CIFAR-10's size. Gram: "
        "long matrices take their iterations on the square Gram matrix. Whole: products of the "
        "whole matrix, in float32. torch: that of `torch.optim.Muon`, in bfloat16, and its bare "
        "steps. AVX2: "
        f"`{' '.join(map('='.join, AVX2.items()))}`, without AVX-512 or bfloat16.",
        "",
        "| work | instructions | Gram, seconds: median (min to max) | whole / Gram, likewise "
        "| torch / Gram, likewise |",
        "| --- | --- | --: | --: | --: |",
    ]
    for name, rows in (("all", seconds), ("AVX2", avx2)):
        for work, by in rows.items():
            columns = [by["Gram"], *(ratios(by, form) for form in ("whole", "torch"))]
            texts = (spread(each, digits) for each, digits in zip(columns, (3, 2, 2), strict=True))
            lines.append(f"| {work} | {name} | {' | '.join(texts)} |")
    generator = torch.Generator().manual_seed(0)
    a, b = SHAPES[0]
    noise = torch.randn(a, b, generator=generator)
    low = torch.randn(a, 5, generator=generator) @ torch.randn(5, b, generator=generator)
    lines += [
        "",
        "## Rounding",
        "",
        f"A matrix of {a} x {b}: a random one, and the sum of one of rank 5 and 1e-4 times the "
        "random one. Gram: the largest difference from the factor in float64, relative to its "
        "largest number. bfloat16: the relative change of the factor, in L2 norm, by the rounding "
        "of `torch.optim.Muon`.",
        "",
        "| matrix | Gram in float32 | Gram in float64 | bfloat16 |",
        "| --- | --: | --: | --: |",
    ]
    for name, x in (("random", noise), ("nearly of rank 5", low + 1e-4 * noise)):
        errors = " | ".join(f"{error(each):.1e}" for each in (x, x.double()))
        lines.append(f"| {name} | {errors} | {change(x):.3f} |")
    made = f"Made by `{timing.command(arguments(), options)}`."
    return "\n".join([*lines, "", made, ""])


def ratios(by: dict[str, list[float]], form: str) -> list[float]:
    """To Gram, each taken within a repetition."""
    return [a / b for a, b in zip(by[form], by["Gram"], strict=True)]


if __name__ == "__main__":
    main()
