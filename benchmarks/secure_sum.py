"""Bytes and seconds of a round with secure sums beside a plain one, in process, and accuracies.

    python benchmarks/secure_sum.py [--clients 100] [--parameters 200000] [--rounds 2]
    python benchmarks/secure_sum.py --only digits    # costs, digits or fashion-mnist

In the table of costs local training is one step on one sample, so that the difference is the
protocol's. Writes docs/results/secure_sum.md, or the part of it that `--only` names.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import data
import timing
import torch
from torch import nn

import fedaccord
from fedaccord import simulate
from fedaccord.plugins.secure_sum import SecureSum
from fedaccord.secure import client
from fedaccord.secure.server import SecureRound
from fedaccord.strategies import METHODS

PAGE = timing.REPOSITORY / "docs" / "results" / "secure_sum.md"
HEAD = """# Cost of secure sums

{clients} clients, all in each round, {parameters:,} parameters in float32, FedAvg, one local step
on one sample, in process with one thread; CPU, {cores} cores, torch {torch}. CPU seconds of a round
are those of all clients and of the server together; on devices each client does its own part. They
are the difference between runs of {longer} rounds and of one, divided by {rounds}, so the start of
a run is not included. Bytes of an upload include its answers to the three stages without training.
Made by `{command}`.

| | CPU seconds a round | upload of a client, bytes | to a client beside the model, bytes |
|---|---:|---:|---:|
"""

ALGOS, SEEDS = ("fedavg", "fedinit", "scaffold", "feddyn", "afedpd"), (0, 1, 2)
BITS = (24, 12, 6)  # the default, and fewer
COMMON: dict[str, Any] = {
    **{"num-clients": 20, "fraction-train": 0.3, "partition": "dirichlet", "dirichlet-alpha": 0.1},
    **{"local-steps": 10, "batch-size": 50, "lr": 0.1, "threads": 1, "device": "cpu"},
}


class Runs(NamedTuple):
    """Runs of a data set."""

    title: str
    model: str
    rounds: int


DATA = {
    "digits": Runs("Accuracy: digits, an MLP", "mlp", 40),
    "fashion-mnist": Runs("Accuracy: Fashion-MNIST, an MLP", "mlp", 20),
}
WINDOW = 10  # last evaluations behind a run's accuracy
ACCURACY = """## {title}

`{settings} num-server-rounds={rounds}`. Plain:
test accuracy in percent, the mean of the last {window} evaluations of a run, then of {seeds}
seeds, ± standard deviation. secagg+: the difference of this accuracy from that of the plain run of
the same seed, mean ± standard deviation, in points.

| method | plain | {columns} |
|---|---:|{lines}
"""


def accuracies(dataset: str) -> Iterator[str]:
    """A row for each method."""
    for algo in ALGOS:
        plain = [accuracy(dataset, algo, seed) for seed in SEEDS]
        cells = [spread("{:.1f} ± {:.1f}", plain)]
        for bits in BITS:
            secure = {"secure-sum.method": "secagg+", "secure-sum.bits": bits}
            summed = [accuracy(dataset, algo, seed, **secure) for seed in SEEDS]
            pairs = zip(summed, plain, strict=True)
            cells.append(spread("{:+.2f} ± {:.2f}", [a - b for a, b in pairs]))
        yield f"| {algo} | {' | '.join(cells)} |"


def accuracy(dataset: str, algo: str, seed: int, **secure: Any) -> float:
    """Percent."""
    runs = DATA[dataset]
    own = {"dataset": dataset, "model": runs.model, "num-server-rounds": runs.rounds, "seed": seed}
    if dataset != "digits":
        own["data-dir"] = str(data.find())
    with tempfile.TemporaryDirectory() as folder:
        own |= {"checkpoint-every": 0, "out-dir": folder}
        path = fedaccord.run(algo, **COMMON, **own, **secure)
        summary = json.loads((path / "summary.json").read_text())
    return 100 * float(summary[f"test-accuracy-mean-of-last-{WINDOW}"])


def spread(form: str, values: list[float]) -> str:
    return form.format(statistics.mean(values), statistics.stdev(values))


class Costs(NamedTuple):
    """Of a round: CPU seconds, and the mean bytes of a client, up and down beside the model."""

    seconds: float
    up: float
    down: float


def measure(clients: int, parameters: int, rounds: int, *plugins: Any) -> Costs:
    """Of ``rounds`` rounds, without the start of a run: the difference between two runs."""
    torch.manual_seed(0)
    data = [(torch.ones(1, 1), torch.zeros(1, parameters)) for _ in range(clients)]
    method = METHODS["fedavg"](
        fraction_train=1.0, local_steps=1, batch_size=0, lr=1e-3, plugins=plugins
    )

    def whole(rounds: int) -> Costs:
        """Of a run: seconds, and the bytes of a client."""
        with bytes_sent() as sizes:
            began = time.process_time()
            history = simulate(
                method,
                clients=data,
                model=nn.Linear(1, parameters, bias=False),
                loss=lambda p, y: ((p - y) ** 2).sum(),
                rounds=rounds,
            )
            seconds = time.process_time() - began
        up = float(history.metrics["up-bytes"].iloc[1:].sum())
        return Costs(seconds, up / clients, sum(sizes) / clients)

    whole(1)  # imports, allocates
    pairs = zip(whole(1 + rounds), whole(1), strict=True)
    return Costs(*((more - one) / rounds for more, one in pairs))


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """Of each message of a secure round to a client, in a block."""
    sizes: list[int] = []
    payload = SecureRound._payload

    def counted(self: SecureRound, stage: str, **values: Any) -> dict[str, Any]:
        stage_payload = payload(self, stage, **values)
        sizes.append(client.nbytes(stage_payload))
        return stage_payload

    with mock.patch.object(SecureRound, "_payload", counted):
        yield sizes


def costs(options: argparse.Namespace) -> Iterator[str]:
    """A row for each setting."""
    for name, plugins in (
        ("plain", ()),
        ("secagg+, 24 bits, 20 neighbours", (SecureSum(),)),
        ("secagg+, 40 bits, 20 neighbours", (SecureSum(bits=40),)),
        ("secagg+, 24 bits, 40 neighbours", (SecureSum(neighbours=40),)),
    ):
        one = measure(options.clients, options.parameters, options.rounds, *plugins)
        yield f"| {name} | {one.seconds:.2f} | {one.up:,.0f} | {one.down:,.0f} |"


def shown(rows: Iterator[str]) -> str:
    lines = []
    for row in rows:
        print(row, flush=True)
        lines.append(row)
    return "\n".join(lines) + "\n"


def main() -> None:
    options = arguments().parse_args()
    torch.set_num_threads(1)
    for part in (options.only,) if options.only else ("costs", *DATA):
        if part == "costs":
            made = timing.command(arguments(), options)
            facts = {"cores": os.cpu_count(), "torch": torch.__version__, "command": made}
            facts["longer"] = 1 + options.rounds
            timing.rewrite(PAGE, HEAD.format(**vars(options), **facts) + shown(costs(options)))
            continue
        head = ACCURACY.format(
            **DATA[part]._asdict(),
            settings=" ".join(f"{key}={value}" for key, value in COMMON.items()),
            **{"window": WINDOW, "seeds": len(SEEDS), "lines": "---:|" * len(BITS)},
            columns=" | ".join(f"secagg+, {bits} bits" for bits in BITS),
        )
        timing.rewrite(PAGE, head + shown(accuracies(part)))


def arguments() -> argparse.ArgumentParser:
    parser = timing.parser(__file__, __doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=2, help="of the table of costs")
    parser.add_argument("--only", choices=("costs", *DATA))
    return parser


if __name__ == "__main__":
    main()
