"""FedAccord's ClientApp, which also reports its state on request."""

from flwr.app import Context, Message, MetricRecord, RecordDict

from fedaccord import client_app
from fedaccord.core.node_config import PARTITION_ID
from fedaccord.storage.store import STATE

app = client_app.app  # Flower looks for this assignment, an import is not enough


@app.query()
def tell(message: Message, context: Context) -> Message:
    who = MetricRecord({"client": int(context.node_config[PARTITION_ID])})
    content = RecordDict({"who": who, "state": context.state.array_records[STATE]})
    return Message(content, reply_to=message)
