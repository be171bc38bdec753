"""The app's server: FedAccord's half is one call."""

import logging

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from anotherapp.task import Net, accuracy
from fedaccord.strategies import Scaffold

log = logging.getLogger("flwr")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    model = Net()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(model)})

    result = Scaffold(fraction_train=0.5, lr=0.1, local_epochs=2).start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())  # under the names of its own
    log.info("accuracy of the trained model: %.4f", accuracy(model))
