"""What came back in a round: good replies, and bad ones with one line each."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedaccord.core.cohort import Received, Reply
from fedaccord.core.options import listed
from fedaccord.core.plugin import ClientHalf
from fedaccord.core.request import StateLost, TrainInstruction, TrainRequest
from fedaccord.core.vectors import Number, Vector, distances, is_finite, leaves, length
from fedaccord.federation.fleet import Reading, TrainReplies
from fedaccord.wire.records import check_like

MAX_LOSS = 1e15  # a model with a larger one has diverged
LONGEST = 1e9  # seconds of a local round
OWN_METRICS, OWN_NAME = 32, re.compile(r"[A-Za-z][\w.-]{0,63}")  # of a foreign ClientApp


class Accepted(NamedTuple):
    """A good reply, with what it tells of itself.

    Where it lies on a GPU, its loss is a tensor, and whether its numbers are finite is not known
    before the round's other numbers are (see `unread`).
    """

    reply: Reply
    metrics: dict[str, Any]
    far: float | None = None  # how far its model w is from w^t; None: not known yet


Outcome = Accepted | StateLost | str  # a string: why it was dropped, in one line


def check_all(
    requests: Sequence[TrainRequest],
    replies: TrainReplies,
    half: ClientHalf,
    like: Vector,
    max_examples: int,
    w: Vector | None = None,
) -> dict[int, Outcome]:
    """What becomes of every client's reply, in the order of the requests, checked as it comes.

    like: (d,), without values. w: w^t (d,), for `Accepted.far`.
    """
    asked = {request.instruction.client: request.instruction for request in requests}
    found = {i: check(asked[i], reply, half, like, max_examples, w) for i, reply in replies}
    return _of_one_form({i: found[i] for i in asked})


def check(
    asked: TrainInstruction,
    reply: Reading,
    half: ClientHalf,
    like: Vector,
    max_examples: int,
    w: Vector | None = None,
) -> Outcome:
    """A good reply, else what is wrong with it, in one line."""
    if isinstance(reply, str):
        return reply
    try:
        if isinstance(reply, StateLost):
            return _check_lost(reply, asked)
        received = half.decode(reply.up, like)
        check_like({**received.up._asdict(), "w_i0": received.w_i0}, like)
        _check_count("num-examples", reply.examples, 1, max_examples)
        if asked.local_steps:
            _check_count("steps", reply.steps, asked.local_steps, asked.local_steps)
        else:  # a step takes a sample or more
            _check_count("steps", reply.steps, 1, asked.local_epochs * reply.examples)
        if not isinstance(reply.loss, Tensor):
            _check_loss(reply.loss)
        if reply.seconds is not None and not _is_time(reply.seconds):
            raise ValueError(
                f"expected seconds to be a number from 0 to {LONGEST:g}, got {reply.seconds!r:.40}"
            )
        far = None
        if not isinstance(reply.loss, Tensor):
            for name, vector in _vectors(received):
                if name == "w" and w is not None:  # from what is finite
                    far = float(distances([vector], w))
                _check_finite(name, vector, far if name == "w" else None)
    except ValueError as error:
        return str(error)
    elements, size = traffic(reply.up)
    metrics = {
        "num-examples": reply.examples,
        "train-loss": reply.loss,
        "steps": reply.steps,
        "up-vectors": elements / like.numel(),
        "up-bytes": size,
    }
    if reply.seconds is not None:
        metrics["seconds"] = reply.seconds
    whole = Reply(asked.client, received.up, reply.steps, reply.examples, received.w_i0)
    return Accepted(whole, _own(reply.more) | metrics, far)


def unread(read: Accepted) -> list[Number]:
    """What is not known of a reply that lies on a GPU: its loss and the lengths of its vectors."""
    loss: Number = read.metrics["train-loss"]
    if not isinstance(loss, Tensor):
        return []
    return [loss, *(length(vector) for _, vector in _vectors(read.reply))]


def settled(read: Accepted, found: Sequence[float]) -> Outcome:
    """The reply once these numbers are known, or what is wrong with them."""
    if not found:
        return read
    loss, *lengths = found
    try:
        for (name, vector), total in zip(_vectors(read.reply), lengths, strict=True):
            _check_finite(name, vector, total)
        _check_loss(loss)
    except ValueError as error:
        return f"{error}, after {read.reply.steps} steps: lower lr or clip-norm"
    return read._replace(metrics=read.metrics | {"train-loss": loss})


def _vectors(decoded: Received | Reply) -> list[tuple[str, Vector]]:
    """All that a client sent, by name."""
    vectors = {**decoded.up._asdict(), "w_i0": decoded.w_i0}
    return [(name, vector) for name, vector in vectors.items() if vector is not None]


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, (int, float)) or not abs(loss) <= MAX_LOSS:
        raise ValueError(
            f"expected train-loss to be a number within {MAX_LOSS:g}, got {loss!r:.40}"
        )


def _check_finite(name: str, vector: Vector, total: float | None = None) -> None:
    if not is_finite(vector, total):
        raise ValueError(f"expected finite numbers, got NaN or Inf in {name!r}")


def traffic(*vectors: Any) -> tuple[int, int]:
    """Elements and bytes of what a message carries, headers not counted."""
    carried = [v for value in vectors for _, v in leaves(value)]
    return sum(v.numel() for v in carried), sum(v.nbytes for v in carried)


def _check_count(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        allowed = f"{least}" if least == most else f"an integer from {least} to {most}"
        raise ValueError(f"expected {name} to be {allowed}, got {value!r:.40}")


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= LONGEST


def _check_lost(lost: StateLost, asked: TrainInstruction) -> StateLost:
    """Nobody loses a state that the server does not know of."""
    if asked.accepted < 0 or lost.accepted != asked.accepted:
        raise ValueError(
            f"expected a reply, or the loss of the state of round {asked.accepted + 1}, got that "
            f"of {lost.accepted!r:.40}"
        )
    return lost


def _own(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A foreign ClientApp's own metrics: numbers under plain names, and not without end."""
    own = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and OWN_NAME.fullmatch(name) and name not in TAKEN
    }
    return dict(list(own.items())[:OWN_METRICS])


TAKEN = {"round", "client", "status", "repair", "up-vectors", "up-bytes"}


def _of_one_form(outcome: dict[int, Outcome]) -> dict[int, Outcome]:
    """Drop replies that lack a vector which most others have, or have one that they lack."""
    forms = {i: _form(read) for i, read in outcome.items() if isinstance(read, Accepted)}
    if len(set(forms.values())) < 2:
        return outcome
    usual = Counter(forms.values()).most_common(1)[0][0]
    return {
        i: read
        if forms.get(i, usual) == usual
        else f"expected the vectors {listed(usual)}, as in the other replies, got "
        f"{listed(forms[i])}"
        for i, read in outcome.items()
    }


def _form(read: Accepted) -> tuple[str, ...]:
    return tuple(name for name, v in read.reply.up._asdict().items() if v is not None)
