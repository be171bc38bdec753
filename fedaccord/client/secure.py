"""A device's part of secure sums, as messages; between two it stores its memory in its Context."""

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedaccord.secure import client
from fedaccord.wire import records
from fedaccord.wire.records import METRICS, SECURE, UP
from fedaccord.wire.tensor_array import to_record, to_tensor


def is_stage(message: Message) -> bool:
    """Whether a message is of a stage without training."""
    payload = records.config_of(message.content, SECURE)
    return bool(payload) and payload.get("stage") != client.MASKED


def answer_stage(message: Message, context: Context) -> Message:
    """Raises ValueError as `client.answer`."""
    payload = records.config_of(message.content, SECURE)
    answer, memory = client.answer(payload, records.config_of(context.state, SECURE))
    context.state[SECURE] = ConfigRecord(memory)
    return Message(RecordDict({SECURE: ConfigRecord(answer)}), reply_to=message)


def masked_reply(message: Message, context: Context, train: Callable[[], Message]) -> Message:
    """The reply of ``train``, with its upload masked if the message requires it.

    Raises ValueError, before any training, if the shares of other clients are wrong or a masked
    upload was sent before: two uploads under one mask would reveal their difference.
    """
    payload = records.config_of(message.content, SECURE)
    if not payload:
        return train()
    memory = client.open_shares(payload, records.config_of(context.state, SECURE))
    reply = train()
    vectors = records.arrays_of(reply.content, UP)
    if vectors is not None:
        tensors = {name: to_tensor(array) for name, array in vectors.items()}
        metrics = records.metrics_of(reply.content, METRICS)
        reply.content[UP] = to_record(client.mask_vectors(tensors, memory))
        reply.content[METRICS] = MetricRecord({**metrics, client.OPENED: memory["senders"]})
        context.state[SECURE] = ConfigRecord(memory)
    return reply
