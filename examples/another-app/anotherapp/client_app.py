"""The app's clients: FedAccord's half is one call."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from anotherapp.task import Net, train_loader
from fedaccord import train_locally

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    node = context.node_config
    loader = train_loader(int(node["partition-id"]), int(node["num-partitions"]))
    return train_locally(message, context, model=Net(), batches=loader)
