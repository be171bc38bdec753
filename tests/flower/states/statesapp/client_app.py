"""FedAccord's ClientApp, which also tells its state when it is asked."""

from flwr.app import Context, Message, MetricRecord, RecordDict

from fedaccord import client_app, records

app = client_app.app  # Flower looks for this assignment, an import is not enough


@app.query()
def tell(message: Message, context: Context) -> Message:
    who = MetricRecord({"client": int(context.node_config[records.PARTITION_ID])})
    content = RecordDict({"who": who, "state": context.state.array_records[records.STATE]})
    return Message(content, reply_to=message)
