"""Flower's apps for flower.py, in a module that Flower's actors can import.

The client is that of Flower's first PyTorch example: a DataLoader that transforms image by image.
With ``tensors`` in the job its data are prepared tensors in memory, the least work possible.
"""

from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
import torch
from common import Job, arrays, network, partition, prepared, read_job, report, transform
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

Batches = Iterable[tuple[Tensor, Tensor]]


@cache
def whole(path: str) -> dict[str, np.ndarray]:
    """All images and labels, read once per process."""
    return arrays({"data": path})


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, job: Job, split: str, rows: list[int] | None = None) -> None:
        data, self.transform = whole(job["data"]), transform(job)
        pick = slice(None) if rows is None else rows
        self.x, self.y = data[f"x_{split}"][pick], data[f"y_{split}"][pick].tolist()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(self.x[i]), self.y[i]


class Prepared:
    """Batches in a new order at every pass."""

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.y)).split(self.size):
            yield self.x[rows], self.y[rows]


@cache
def kept(path: str, split: str) -> tuple[Tensor, Tensor]:
    """All samples as tensors, once per process."""
    data = whole(path)
    return prepared(JOB, data[f"x_{split}"]), torch.from_numpy(data[f"y_{split}"]).long()


@cache
def parts(path: str) -> list[list[int]]:
    return partition({"partition": path})


@cache
def images(client: int) -> Images:
    """A client's images, read once per process."""
    return Images(JOB, "train", parts(JOB["partition"])[client])


def train_batches(client: int) -> Batches:
    if JOB["tensors"]:
        x, y = kept(JOB["data"], "train")
        rows = parts(JOB["partition"])[client]
        return Prepared(x[rows], y[rows], JOB["batch-size"])
    return DataLoader(images(client), batch_size=JOB["batch-size"], shuffle=True)


def test_batches() -> Batches:
    if JOB["tensors"]:
        return list(zip(*(part.split(1000) for part in kept(JOB["data"], "test")), strict=True))
    return DataLoader(Images(JOB, "test"), batch_size=1000)


JOB = read_job()
client_app = ClientApp()
server_app = ServerApp()
replies: list[int] = []  # of every round, for flower.py to check


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    net = network(JOB)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=JOB["lr"])
    client = int(context.node_config["partition-id"])
    batches, examples = train_batches(client), len(parts(JOB["partition"])[client])
    for _ in range(JOB["epochs"]):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": examples}),
        }
    )
    return Message(content=content, reply_to=message)


def evaluate(round: int, weights: ArrayRecord) -> MetricRecord:
    net = network(JOB)
    net.load_state_dict(weights.to_torch_state_dict())
    net.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in test_batches():
            right, total = right + int((net(x).argmax(1) == y).sum()), total + len(y)
    report(round, right / total)
    return MetricRecord({"accuracy": right / total})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    clients = len(JOB["cohorts"][0])
    strategy = FedAvg(  # which continues without the clients that fail
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
        train_metrics_aggr_fn=lambda contents, key: MetricRecord({"replies": len(contents)}),
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network(JOB).state_dict()),
        num_rounds=len(JOB["cohorts"]),
        evaluate_fn=evaluate,
    )
    replies.extend(int(m["replies"]) for m in result.train_metrics_clientapp.values())
