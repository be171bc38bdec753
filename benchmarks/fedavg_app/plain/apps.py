"""FedAvg by Flower's strategy: an MLP on 719 samples of 64 random numbers, an epoch a round."""

import time
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

client = ClientApp()
server = ServerApp()


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    net = model()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(719, 1, 8, 8, generator=generator)
    y = torch.randint(10, (719,), generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in torch.arange(719).split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": 719})
    arrays = ArrayRecord(net.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    ends: list[float] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        ends.append(time.monotonic())
        return MetricRecord({"round": number})

    FedAvg(fraction_train=1.0, fraction_evaluate=0.0).start(
        grid=grid,
        initial_arrays=ArrayRecord(model().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    seconds = [b - a for a, b in pairwise(ends)]
    Path(str(context.run_config["out-file"])).write_text("\n".join(map(str, seconds)))
