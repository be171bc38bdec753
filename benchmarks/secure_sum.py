"""Bytes and seconds of a round with secure sums beside a plain one, in process, and accuracies.

    python benchmarks/secure_sum.py [--clients 100] [--parameters 200000] [--rounds 2]
    python benchmarks/secure_sum.py --only digits    # costs, digits or fashion-mnist

In the table of costs local training is one step on one sample, so that the difference is the
protocol's. Writes docs/results/secure_sum.md, or the part of it that `--only` names.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import data
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
`python benchmarks/secure_sum.py` makes this page.

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


def measure(clients: int, parameters: int, rounds: int, *plugins: Any) -> tuple[float, float]:
    """CPU seconds of a round, and the mean bytes of an upload."""
    torch.manual_seed(0)
    data = [(torch.ones(1, 1), torch.zeros(1, parameters)) for _ in range(clients)]
    method = METHODS["fedavg"](
        fraction_train=1.0, local_steps=1, batch_size=0, lr=1e-3, plugins=plugins
    )
    began = time.process_time()
    history = simulate(
        method,
        clients=data,
        model=nn.Linear(1, parameters, bias=False),
        loss=lambda p, y: ((p - y) ** 2).sum(),
        rounds=rounds,
    )
    seconds = (time.process_time() - began) / rounds
    return seconds, float(history.metrics["up-bytes"].iloc[1:].sum()) / rounds / clients


def costs(options: argparse.Namespace) -> Iterator[str]:
    """A row for each setting."""
    sent = 0
    payload = SecureRound._payload

    def counted(self: SecureRound, stage: str, **values: Any) -> dict[str, Any]:
        nonlocal sent
        stage_payload = payload(self, stage, **values)
        sent += client.nbytes(stage_payload)
        return stage_payload

    SecureRound._payload = counted  # type: ignore[method-assign]
    for name, plugins in (
        ("plain", ()),
        ("secagg+, 24 bits, 20 neighbours", (SecureSum(),)),
        ("secagg+, 40 bits, 20 neighbours", (SecureSum(bits=40),)),
        ("secagg+, 24 bits, 40 neighbours", (SecureSum(neighbours=40),)),
    ):
        sent = 0
        seconds, size = measure(options.clients, options.parameters, options.rounds, *plugins)
        down = sent / options.rounds / options.clients
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
    parser.add_argument("--rounds", type=int, default=2, help="of the table of costs")
    parser.add_argument("--only", choices=("costs", *DATA))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in (options.only,) if options.only else ("costs", *DATA):
        if part == "costs":
            rewrite(HEAD.format(**vars(options)) + shown(costs(options)))
            continue
        head = ACCURACY.format(
            **DATA[part]._asdict(),
            settings=" ".join(f"{key}={value}" for key, value in COMMON.items()),
            **{"window": WINDOW, "seeds": len(SEEDS), "lines": "---:|" * len(BITS)},
            columns=" | ".join(f"secagg+, {bits} bits" for bits in BITS),
        )
        rewrite(head + shown(accuracies(part)))


def rewrite(section: str) -> None:
    """Replace one section of the page, which its first line names, or add it at the end."""
    parts = re.split(r"(?m)^(?=##? )", PAGE.read_text())[1:]
    sections = {text.partition("\n")[0]: text for text in (*parts, section)}
    PAGE.write_text("\n".join(text.strip() + "\n" for text in sections.values()))


if __name__ == "__main__":
    main()
