"""The app's server: FedAccord's half is one call."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedaccord.strategies import Scaffold
from strangerapp.task import Net, accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    model = Net()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict(), strict=True)
        return MetricRecord({"accuracy": accuracy(model)})

    result = Scaffold(fraction_train=0.5, lr=0.1, local_epochs=2).start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )

    model = Net()
    model.load_state_dict(result.arrays.to_torch_state_dict(), strict=True)
    summary = {
        "accuracy": accuracy(model),
        "names": list(result.arrays),
        "by-round": {r: m["accuracy"] for r, m in result.evaluate_metrics_serverapp.items()},
    }
    Path(str(context.run_config["result-file"])).write_text(json.dumps(summary))
