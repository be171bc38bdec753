"""The app's clients: train() calls FedAccord, evaluate() is that of an app with Flower's FedAvg."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from anotherapp.task import Net, load_data, test
from fedaccord import train_locally

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    trainloader, _ = loaders(context)
    return train_locally(msg, context, model=Net(), batches=trainloader)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, testloader = loaders(context)
    loss, accuracy = test(model, testloader)
    metrics = {
        "eval_loss": loss,
        "eval_acc": accuracy,
        "num-examples": len(testloader.dataset),
    }
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


def loaders(context: Context) -> tuple[DataLoader, DataLoader]:
    node = context.node_config
    batch_size = int(context.run_config["batch-size"])
    return load_data(int(node["partition-id"]), int(node["num-partitions"]), batch_size)
