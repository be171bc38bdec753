"""What a client's visit costs on a model of five parameters: everything but the mathematics.

    python benchmarks/messages.py
    python benchmarks/messages.py --steps 1 7 --rounds 60

Least squares in float64, eight clients, all of them in every round, full batches, one thread. A
round's seconds divided by its clients: the best of all rounds, as another process can only add to
them. `bare` is as many forward and backward passes of the same module, and nothing else.
"""

import argparse
import time

import torch
from torch import Tensor, nn

from fedaccord import simulate

CLIENTS, ROWS, D = 8, 12, 5
METHODS = ("fedavg", "scaffold", "fedinit", "fedsam")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 7], help="local steps K")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| milliseconds a visit |" + "".join(f" K = {k} |" for k in options.steps))
    print("| --- |" + " --: |" * len(options.steps))
    rows = {"bare": [bare(k, options) for k in options.steps]}
    for vectorize, how in (("off", ""), ("on", ", in one call")):
        for method in METHODS:
            rows[method + how] = [message(method, k, vectorize, options) for k in options.steps]
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(f"{1e3 * value:.3f}" for value in values) + " |")


def half_square(predictions: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((predictions - targets) ** 2).sum()


def clients() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(ROWS, D, generator=generator, dtype=torch.float64),
            torch.randn(ROWS, 1, generator=generator, dtype=torch.float64),
        )
        for _ in range(CLIENTS)
    ]


def linear() -> nn.Linear:
    return nn.Linear(D, 1, bias=False, dtype=torch.float64)


def bare(steps: int, options: argparse.Namespace) -> float:
    module, (x, y), best = linear(), clients()[0], float("inf")
    for _ in range(options.rounds * options.repetitions):
        began = time.perf_counter()
        for _ in range(steps):
            half_square(module(x), y).backward()
        best = min(best, time.perf_counter() - began)
    return best


def message(method: str, steps: int, vectorize: str, options: argparse.Namespace) -> float:
    rounds = list[float]()
    for _ in range(options.repetitions):
        history = simulate(
            method,
            clients=clients(),
            model=linear(),
            loss=half_square,
            rounds=options.rounds,
            participation=1.0,
            dtype=torch.float64,
            batch_size=0,
            local_steps=steps,
            lr=0.01,
            eval_every=options.rounds,
            vectorize=vectorize,
        )
        rounds += list(history.metrics["seconds"][2:])
    return min(rounds) / CLIENTS


if __name__ == "__main__":
    main()
