"""FedAccord's ServerApp, which then writes beside the run's files what every client remembers, and
what a client makes of a message whose rule it does not know.
"""

import json
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from fedaccord import server_app
from fedaccord.core.client_half import ClientHalf
from fedaccord.strategies.fedavg import FedAvgClient
from fedaccord.wire.codec import dumps
from fedaccord.wire.instruction import PROTOCOL

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    server_app.app(grid, context)
    folder = Path(str(context.run_config["out-dir"])) / str(context.run_config["name"])
    questions = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(questions, timeout=120):
        vectors = reply.content.array_records["state"]
        client = reply.content.metric_records["who"]["client"]
        tensors = {name: torch.from_numpy(array.numpy()) for name, array in vectors.items()}
        save_file(tensors, folder / f"client-{client}.safetensors")
    half = json.loads(dumps(ClientHalf(FedAvgClient()))) | {"rule": {"class": "antigravity:Rule"}}
    text = json.dumps({"protocol": PROTOCOL, "half": json.dumps(half), "shapes": []})
    numbers = {"client": 0, "accepted-round": -1, "durable-round": -1}
    config = ConfigRecord({"instruction": text, **numbers})
    node = min(grid.get_node_ids())
    (reply,) = grid.send_and_receive([Message(RecordDict({"config": config}), node, "train")])
    (folder / "unknown-rule.txt").write_text(reply.error.reason)
