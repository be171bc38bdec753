"""The replies of a round: accepted ones, and rejected ones with the reason in one line."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedaccord.core.cohort import Decoded, Reply, moved
from fedaccord.core.metrics import NAME
from fedaccord.core.options import listed
from fedaccord.core.request import StateLost, TrainInstruction, TrainReply, TrainRequest, round_of
from fedaccord.core.rounds import RoundState
from fedaccord.core.vectors import Number, Vector, is_finite, leaves, nbytes
from fedaccord.federation import bounds
from fedaccord.federation.fleet import Reading, TrainReplies
from fedaccord.federation.session import Session
from fedaccord.storage.mapped import SpillReplies
from fedaccord.wire.records import check_like

MAX_LOSS = 1e15  # above it a model has diverged
MAX_SECONDS = 1e9  # of a local round
OWN_METRICS = 32  # of a foreign ClientApp
TAKEN = {  # written by the server
    "round",
    "client",
    "status",
    "repair",
    "evaluation",
    "up-vectors",
    "up-bytes",
    "clock",
    "staleness",
}


class Accepted(NamedTuple):
    """An accepted reply, with its row of metrics.

    If it is on a GPU, its loss and sizes are tensors, and are checked when the round's other
    numbers are fetched (see `pending_numbers`).
    """

    reply: Reply
    metrics: dict[str, Any]
    sizes: dict[str, Number]  # of its vectors, see `bounds.sizes`


Outcome = Accepted | StateLost | str  # a string: the reason for dropping it, in one line


def check_all(
    session: Session, s: RoundState, requests: Sequence[TrainRequest], replies: TrainReplies
) -> dict[int, Outcome]:
    """The outcome of every client's reply, in the order of the requests, checked on arrival."""
    by_client = {request.instruction.client: request for request in requests}
    in_memory = not session.is_deployed or session.method.masking  # one sum for all
    place: Callable[[Any], Any] = (lambda v: v) if in_memory else SpillReplies(session.book.folder)
    unordered = dict[int, Outcome]()
    for i, reply in replies:
        it = _check(session, s, by_client[i], reply)
        if isinstance(it, Accepted):
            names = ("up", "w_i0", "buffers")
            vectors: dict[str, Any] = {name: place(getattr(it.reply, name)) for name in names}
            it = it._replace(reply=it.reply._replace(**vectors))
        unordered[i] = it
    outcomes = {i: unordered[i] for i in by_client}
    good = {i: it for i, it in outcomes.items() if isinstance(it, Accepted)}
    forms = {i: tuple(dict(leaves(it.reply.up))) for i, it in good.items()}
    return outcomes | unusual("the vectors", forms)


def unusual(what: str, forms: Mapping[int, tuple[str, ...]]) -> dict[int, str]:
    """An error for each reply whose names differ from the majority's."""
    counts = Counter(forms.values())
    usual = max(counts, key=lambda form: counts[form], default=())
    return {
        i: f"expected {what} {listed(usual)}, as in the other replies, got {listed(form)}"
        for i, form in forms.items()
        if form != usual
    }


def _check(session: Session, s: RoundState, request: TrainRequest, reply: Reading) -> Outcome:
    """The accepted reply, or the reason for rejecting it in one line."""
    if isinstance(reply, str):
        return reply
    instruction = request.instruction
    method, like, delay = session.method, session.like, s.t - instruction.round
    models = session.half.rule.models
    elsewhere = bool(models) and (delay > 0 or instruction.half.rounding is not None)
    w, _ = method.topology.view(s.w, s.server, instruction.client)
    base = request.down.w if elsewhere else w  # the model that the client started from
    try:
        if isinstance(reply, StateLost):
            return _check_lost(reply, instruction)
        decoded = instruction.half.decode(reply.up, request.down, like)
        check_like({**decoded.up._asdict(), "w_i0": decoded.w_i0}, like)
        _check_buffers(reply.buffers, s.buffers)
        check_numbers(session, request, reply)
        sizes = bounds.sizes(decoded, models, base)
        if not isinstance(reply.loss, Tensor):
            sizes = {name: float(size) for name, size in sizes.items()}
            _check_vectors(decoded, sizes)
            if line := bounds.too_large(sizes, method.max_client_norm):
                return line
    except ValueError as error:
        return str(error)
    size = nbytes(reply.up) + nbytes(reply.buffers) if reply.up_bytes is None else reply.up_bytes
    metrics = {
        "num-examples": reply.examples,
        "train-loss": reply.loss,
        "steps": reply.steps,
        "up-vectors": size / like.nbytes,
        "up-bytes": size,
    }
    if reply.seconds is not None:
        metrics["seconds"] = reply.seconds
    accepted = Reply(
        instruction.client,
        decoded.up,
        steps=reply.steps,
        examples=reply.examples,
        w_i0=decoded.w_i0,
        buffers=reply.buffers,
        delay=delay,
        damping=method.damping(delay),
    )
    if elsewhere:
        accepted = moved(accepted, models, base, w)
    if s.delays is not None:
        metrics["staleness"] = delay
    return Accepted(accepted, _own(reply.more) | metrics, sizes)


def check_numbers(session: Session, request: TrainRequest, reply: TrainReply) -> None:
    """Raise ValueError, in one line, if the numbers beside an upload are impossible."""
    instruction = request.instruction
    most = session.method.max_examples
    _check_count("num-examples", reply.examples, 1, most, " (max-examples)")
    if instruction.local_steps:
        _check_count("steps", reply.steps, instruction.local_steps, instruction.local_steps)
    else:  # each step uses at least one sample
        _check_count("steps", reply.steps, 1, 2**63)
        if reply.steps > (most := instruction.local_epochs * reply.examples):
            raise ValueError(
                "expected steps to be at most local-epochs times num-examples, got "
                f"{reply.steps} beside {most}"
            )
    if reply.seconds is not None:
        _check_number("seconds", reply.seconds, 0, MAX_SECONDS)
    if not isinstance(reply.loss, Tensor):
        _check_loss(reply.loss)


def pending_numbers(accepted: Accepted) -> list[Number]:
    """The numbers of a reply that are still on a GPU: its loss and the sizes of its vectors."""
    loss: Number = accepted.metrics["train-loss"]
    return [loss, *accepted.sizes.values()] if isinstance(loss, Tensor) else []


def complete(accepted: Accepted, values: Sequence[float], max_client_norm: float) -> Outcome:
    """The reply with the values of its pending numbers, or the error in them."""
    if not values:
        return accepted
    loss, *some = values
    sizes = dict[str, Number](zip(accepted.sizes, some, strict=True))
    try:
        _check_vectors(accepted.reply, sizes)
        _check_loss(loss)
    except ValueError as error:
        return f"{error}, after {accepted.reply.steps} steps: lower lr or clip-norm"
    if line := bounds.too_large(sizes, max_client_norm):
        return line
    return accepted._replace(metrics=accepted.metrics | {"train-loss": loss}, sizes=sizes)


def _check_vectors(sent: Decoded | Reply, sizes: Mapping[str, Number]) -> None:
    for name, vector in bounds.vectors(sent).items():
        _check_finite(name, vector, float(sizes[name]))


def _check_buffers(buffers: Vector | None, sent: Vector | None) -> None:
    if (buffers is None) != (sent is None):
        raise ValueError(
            f"expected {'no ' if sent is None else ''}buffers beside the model, got "
            f"{'none' if buffers is None else 'some'}: set the same buffers on server and clients"
        )
    if buffers is not None and sent is not None:
        check_like({"buffers": buffers}, sent)
        _check_finite("buffers", buffers)


def _check_finite(name: str, vector: Vector, total: float | None = None) -> None:
    if not is_finite(vector, total):
        raise ValueError(f"expected finite numbers, got NaN or Inf in {name!r}")


def _check_count(name: str, value: Any, least: int, most: int, why: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        allowed = f"{least}" if least == most else f"an integer from {least} to {most}"
        raise ValueError(f"expected {name} to be {allowed}{why}, got {value!r:.40}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(
            f"expected {name} to be a number from {low:g} to {high:g}, got {value!r:.40}"
        )


def _check_loss(loss: Any) -> None:
    try:
        _check_number("train-loss", loss, -MAX_LOSS, MAX_LOSS)
    except ValueError as error:
        if not isinstance(loss, float):
            raise
        raise ValueError(f"the local model diverged: {error}") from None


def _check_lost(lost: StateLost, instruction: TrainInstruction) -> StateLost:
    """Raise ValueError unless the client lost the state that the server expects."""
    expected = instruction.accepted
    if expected == -1 or lost.accepted != expected:
        raise ValueError(
            f"expected a reply, or the loss of the state of round {round_of(expected) + 1}, got "
            f"that of {lost.accepted!r:.40}"
        )
    return lost


def _own(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A foreign ClientApp's own metrics: a limited number of numbers with plain names."""
    own = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and NAME.fullmatch(name) and name not in TAKEN
    }
    return dict(list(own.items())[:OWN_METRICS])
