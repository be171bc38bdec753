"""A node's reply message: its sender, and its content, or the reason for rejecting it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from flwr.app import Message

from fedaccord.compat import flower
from fedaccord.core.options import listed
from fedaccord.core.request import TrainInstruction
from fedaccord.federation.errors import FederationError, last_line
from fedaccord.federation.fleet import LATE, Reading
from fedaccord.wire.messages import read_reply
from fedaccord.wire.records import METRICS, metrics_of

T = TypeVar("T")


def is_sender(reply: Message, message: Message) -> bool:
    """Whether the reply is from the receiver of the message, or from Flower on its behalf."""
    sender = reply.metadata.src_node_id
    by_flower = reply.has_error() and sender == message.metadata.src_node_id
    return by_flower or sender == message.metadata.dst_node_id


def check_workers(errors: Iterable[str]) -> None:
    """Raise FederationError if Flower's simulation has lost a worker process.

    Flower continues to assign clients to the dead Ray actor. As a client could fake one such reply,
    at least two are needed.
    """
    if sum(flower.is_dead_worker(reason) for reason in errors) > 1:
        raise FederationError(
            "a worker process of Flower's simulation died, usually for lack of memory, "
            "and most clients of this run would fail from now on; give each client more with "
            "client-resources-num-cpus, so that fewer run at once, and resume with resume=true"
        )


def read_content(reply: Message, read: Callable[[Message], T]) -> T | str:
    """The content of a reply, or the reason for rejecting it in one line: no reply ends a run."""
    try:
        if reply.has_error():
            return f"error {reply.error.code}: {last_line(reply.error.reason)}"
        return read(reply)
    except ValueError as error:
        return str(error)
    except Exception as error:  # Flower's errors for inconsistent messages
        return f"expected a reply that can be read, got {type(error).__name__}"


def read_training(reply: Message, instruction: TrainInstruction) -> Reading:
    return read_content(reply, lambda it: read_reply(it.content, instruction.half))


def readings(
    clients: Sequence[int],
    replies: Iterable[tuple[int, Message]],
    instructions: Mapping[int, TrainInstruction],
) -> Iterator[tuple[int, Reading]]:
    """The content of each client's reply, in order of arrival, then `LATE` of the others.

    Raises FederationError if Flower's simulation has lost a worker process.
    """
    others, errors = dict.fromkeys(clients), list[str]()
    for i, reply in replies:
        del others[i]
        if reply.has_error():
            errors.append(reply.error.reason or "")
        yield i, read_training(reply, instructions[i])
    check_workers(errors)
    yield from ((i, LATE) for i in others)


def read_metrics(reply: Message) -> Mapping[str, float]:
    """The numbers in a reply to an evaluation request.

    Raises ValueError, in one line, if there are none.
    """
    metrics = metrics_of(reply.content, METRICS)
    if not metrics:
        raise ValueError(f"expected the record {METRICS!r}, got {listed(sorted(reply.content))}")
    return {name: v for name, v in metrics.items() if isinstance(v, (int, float))}
