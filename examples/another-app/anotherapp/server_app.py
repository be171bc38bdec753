"""The app's server: it has Scaffold where it had Flower's FedAvg."""

import logging

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from anotherapp.task import Net, load_test_data, test
from fedaccord.strategies import Scaffold

log = logging.getLogger("flwr")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(0)
    model = Net()

    def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(model, load_test_data())
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    strategy = Scaffold(
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=float(config["fraction-evaluate"]),
        lr=float(config["learning-rate"]),
        local_epochs=int(config["local-epochs"]),
        buffers="mean",  # of BatchNorm
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=global_evaluate,
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())  # its own names
    _, accuracy = test(model, load_test_data())
    log.info("accuracy of the trained model: %.4f", accuracy)
