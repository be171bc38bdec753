"""Bytes and seconds of a round with secure sums beside a plain one, in process, and accuracies.

    python benchmarks/secure_sum.py [--clients 100] [--parameters 200000] [--rounds 2]

Local training is one step on one sample, so that the difference is the protocol's. Accuracies are
of runs on the digits. Writes docs/results/secure_sum.md, or that part of it which `--only` names.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedaccord
from fedaccord import simulate
from fedaccord.plugins.secure_sum import SecureSum
from fedaccord.secure import client
from fedaccord.secure.server import SecureRound
from fedaccord.strategies import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "results" / "secure_sum.md"
HEAD = """# Cost of secure sums

{clients} clients, all in each round, {parameters:,} parameters in float32, FedAvg, one local step
on one sample, in process with one thread, rounds measured: {rounds}. CPU seconds of a round
are those of all clients and of the server together; on devices each client does its own part. Bytes
of an upload include its answers to the three stages without training.

| | CPU seconds a round | upload of a client, bytes | to a client beside the model, bytes |
|---|---:|---:|---:|
"""

ALGOS, SEEDS = ("fedavg", "fedinit", "scaffold", "feddyn", "afedpd"), (0, 1, 2)
DIGITS: dict[str, Any] = {
    **{"num_clients": 20, "fraction_train": 0.3, "dirichlet_alpha": 0.1, "local_steps": 10},
    **{"num_server_rounds": 40, "threads": 1, "checkpoint_every": 0},
}
TITLE = "## Accuracy"
ACCURACY = """
{title}

Digits, {rounds} rounds, 20 clients with Dirichlet(0.1) shares of which 6 take part, 10 local steps;
test accuracy in percent, the mean of the last 10 evaluations, then of three seeds, ± standard
deviation.

| method | plain | secagg+, 24 bits |
|---|---:|---:|
"""


def accuracies() -> Iterator[str]:
    """A row for each method."""
    for algo in ALGOS:
        cells = []
        for secure in ({}, {"secure-sum.method": "secagg+"}):
            with tempfile.TemporaryDirectory() as folder:
                found = []
                for seed in SEEDS:
                    own = {"seed": seed, "out_dir": folder, "name": str(seed)}
                    path = fedaccord.run(algo, **DIGITS, **own, **secure)
                    summary = json.loads((path / "summary.json").read_text())
                    found.append(100 * summary["test-accuracy-mean-of-last-10"])
            cells.append(f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}")
        yield f"| {algo} | {' | '.join(cells)} |"


def measure(clients: int, parameters: int, rounds: int, *plugins: Any) -> tuple[float, float]:
    """CPU seconds of a round, and the mean bytes of an upload."""
    torch.manual_seed(0)
    data = [(torch.ones(1, 1), torch.zeros(1, parameters)) for _ in range(clients)]
    method = METHODS["fedavg"](
        fraction_train=1.0, local_steps=1, batch_size=0, lr=1e-3, plugins=plugins
    )
    began = time.process_time()
    found = simulate(
        method,
        clients=data,
        model=nn.Linear(1, parameters, bias=False),
        loss=lambda p, y: ((p - y) ** 2).sum(),
        rounds=rounds,
    )
    seconds = (time.process_time() - began) / rounds
    return seconds, float(found.metrics["up-bytes"].iloc[1:].sum()) / rounds / clients


def costs(given: argparse.Namespace) -> Iterator[str]:
    """A row for each setting."""
    sent = 0
    payload = SecureRound._payload

    def counted(self: SecureRound, stage: str, **values: Any) -> dict[str, Any]:
        nonlocal sent
        found = payload(self, stage, **values)
        sent += client.nbytes(found)
        return found

    SecureRound._payload = counted  # type: ignore[method-assign]
    for name, plugins in (
        ("plain", ()),
        ("secagg+, 24 bits, 20 neighbours", (SecureSum(),)),
        ("secagg+, 40 bits, 20 neighbours", (SecureSum(bits=40),)),
        ("secagg+, 24 bits, 40 neighbours", (SecureSum(neighbours=40),)),
    ):
        sent = 0
        seconds, size = measure(given.clients, given.parameters, given.rounds, *plugins)
        down = sent / given.rounds / given.clients
        yield f"| {name} | {seconds:.2f} | {size:,.0f} | {down:,.0f} |"


def shown(rows: Iterator[str]) -> str:
    lines = []
    for row in rows:
        print(row, flush=True)
        lines.append(row)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("costs", "accuracies"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    first, _, last = PAGE.read_text().partition(f"\n{TITLE}\n")
    if given.only != "accuracies":
        first = HEAD.format(**vars(given)) + shown(costs(given))
    last = f"\n{TITLE}\n{last}" if last else ""
    if given.only != "costs":
        last = ACCURACY.format(title=TITLE, rounds=DIGITS["num_server_rounds"])
        last += shown(accuracies())
    PAGE.write_text(first + last)


if __name__ == "__main__":
    main()
