"""A client's local round and its evaluation, as values and for any ClientApp."""

import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn import functional as F

from fedaccord.client import secure
from fedaccord.client.node_limits import is_simulated
from fedaccord.core.client_half import WithLocal
from fedaccord.core.metrics import PERSONAL
from fedaccord.core.options import plain
from fedaccord.core.privacy import guarantee_of
from fedaccord.core.request import (
    EvaluateRequest,
    StateLost,
    TrainInstruction,
    TrainReply,
    TrainRequest,
)
from fedaccord.core.rounds import client_round
from fedaccord.core.vectors import (
    Vector,
    all_to_device,
    fetch,
    is_finite,
    length,
    to_device,
)
from fedaccord.storage.store import ContextStore, MissingStateError, Store
from fedaccord.task.batches import PAIRS, Batch, BatchFormat, Forward
from fedaccord.task.evaluation import evaluate
from fedaccord.task.flat_model import FlatModel, flat_model
from fedaccord.task.losses import checked
from fedaccord.task.solver import Loss, Passes, SequentialSolver
from fedaccord.wire import records
from fedaccord.wire.handshake import answer_handshake
from fedaccord.wire.instruction import is_handshake, is_ours, read_instruction, shapes_text
from fedaccord.wire.messages import (
    EXAMPLES,
    read_evaluate_request,
    read_request,
    write_reply,
)

CPU = torch.device("cpu")
DIVERGED = (
    "the local model diverged, got NaN or Inf after {} steps at lr {:g}; lower lr or clip-norm"
)


class Data(NamedTuple):
    """A client's data, loss and device."""

    model: FlatModel
    batches: Iterable[Batch]
    loss: Loss
    examples: int | None = None  # samples of the client; None: those of the first pass
    home: torch.device = CPU  # device of the reply
    metrics: str = ""  # of an evaluation, names as of `core.metrics.select`
    format: BatchFormat = PAIRS
    secret: bool = False  # as in `LocalConfig`
    own_code: bool = False  # whether making a batch may draw NumPy's and Python's random numbers

    def passes(self) -> Passes:
        """Iterates over the batches, prepared for the model."""
        return Passes(self.batches, self.model.w.device, self.model.w.dtype, self.format)


def train_locally(
    message: Message,
    context: Context,
    *,
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss = F.cross_entropy,
    examples: int | None = None,
    forward: Forward | None = None,
    targets: str = PAIRS.targets,
) -> Message:
    """One local round of the FedAccord strategy that sent ``message``; returns the reply.

    The method, its settings and the local rates come with the message; the client's state is stored
    in ``context.state`` and written last. ``batches`` is iterated once per local epoch, or until
    ``local-steps`` steps are taken; its tensors may be on any device. ``loss`` is called as
    ``loss(predictions, targets)``. ``examples`` counts the client's samples; by default those of
    a pass over ``batches``; of an iterator only those that ``local-steps`` read. Without
    ``local-steps`` the server drops a reply of more steps than ``local-epochs`` times as many.

    A batch is (inputs, targets), or a dict of an image (``img`` or ``image``) and its targets under
    the key ``targets``; with ``forward(model, batch) -> predictions`` any tuple that ends with the
    targets, and any dict that has them. Floating inputs are cast to the run's precision; token ids
    stay integers.

    Raises ValueError on a message, a model or data that do not fit together; Flower sends the error
    to the server as a reply, and the client's state does not change.
    """
    batch_format, loss, examples = BatchFormat(forward, targets), checked(loss), plain(examples)
    if examples is not None and (type(examples) is not int or examples < 1):
        raise ValueError(f"examples: expected an integer from 1, got {examples!r}")
    if is_handshake(message):
        if not isinstance(batches, Iterator):  # their errors appear before round 1
            for batch in islice(batches, 1):
                batch_format.split(batch)
        return answer_handshake(message, context, lambda it: flat_model(model, it).layout)
    if secure.is_stage(message):
        return secure.answer_stage(message, context)
    flat = flat_model(model, read_instruction(message).model_settings, forward=forward)
    data = Data(flat, batches, loss, examples, format=batch_format, own_code=True)
    store = ContextStore(context)
    return secure.masked_reply(message, context, lambda: reply_to_training(message, store, data))


def evaluate_locally(
    message: Message,
    context: Context,
    *,
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss = F.cross_entropy,
    metrics: str = "",
    forward: Forward | None = None,
    targets: str = PAIRS.targets,
) -> Message:
    """The reply to an evaluation message: metrics of the server's model, if it is sent to be
    evaluated, and of the client's own model, if it has one.

    A personal model, and parameters that stay at the client, are in ``context.state``, where
    `train_locally` left them. ``loss`` must be a mean over its batch; ``batches`` are the client's
    held-out samples: a list or a DataLoader, which can be iterated twice; batches, ``forward`` and
    ``targets`` are as for `train_locally`. ``metrics``: names with commas, as "accuracy, f1"; by
    default accuracy for class labels.
    Raises ValueError if the message is of another kind or requests a model that the client lacks.
    """
    if not is_ours(message):
        raise ValueError(
            "expected a message of a strategy with evaluation='clients' or 'both', or with "
            "personal models, got one of another: choose that, or reply with your own metrics"
        )
    flat = flat_model(model, read_instruction(message).model_settings, forward=forward)
    data = Data(flat, batches, checked(loss), metrics=metrics, format=BatchFormat(forward, targets))
    return reply_to_evaluation(message, ContextStore(context), data)


# messages


def reply_to_training(message: Message, store: Store, data: Data) -> Message:
    """`train_locally` with a model whose parameters are already flat."""
    _check_shapes(data.model, read_instruction(message))
    request = read_request(message)
    instruction = request.instruction
    try:
        state = store.recall(instruction)
    except MissingStateError:
        return Message(write_reply(StateLost(instruction.accepted)), reply_to=message)
    reply, state = local_round(request, state, data._replace(secret=not is_simulated()))
    if (promise := guarantee_of(instruction.half.plugins)) and promise.hides_numbers:
        reply = reply._replace(examples=1, loss=0.0, seconds=None)
    store.remember(instruction, state)
    return Message(write_reply(reply), reply_to=message)


def reply_to_evaluation(message: Message, store: Store, data: Data) -> Message:
    """`evaluate_locally` with a model whose parameters are already flat."""
    _check_shapes(data.model, read_instruction(message))
    request = read_evaluate_request(message)
    try:
        state = store.recall(request.instruction)
    except MissingStateError:
        state = None
    values = local_evaluation(request, state, data)
    return Message(RecordDict({records.METRICS: MetricRecord(dict(values))}), reply_to=message)


# values


def local_round(request: TrainRequest, state: Any, data: Data) -> tuple[TrainReply, Any]:
    """The reply to a request, on `Data.home`, and the client's next state, on the host.

    state: the client's before this request; None: it has none. Raises ValueError if the
    message and the data do not fit together or the model diverged.

    If `Data.home` is a GPU, this does not synchronise: the loss is a tensor; reading it shows
    whether the model diverged, and only then are the state's values complete.
    """
    began = time.perf_counter()
    instruction, model = request.instruction, data.model
    half, config, device = instruction.half, instruction.config, model.w.device
    down = all_to_device(request.down, device)
    state = begun_state(request, model, state)
    steps = _steps(instruction, data.batches)
    config = config._replace(steps=steps, hidden=model.hidden, secret=data.secret)
    if half.keeps_local:
        model.write_local(state.local)
        state = state.base
    if request.buffers is not None:
        model.write_buffers(to_device(request.buffers, device))
    passes = data.passes()
    batches = passes.steps(instruction.local_epochs, instruction.local_steps)
    solve = SequentialSolver(model, batches, data.loss, instruction.precision, data.own_code)
    up, state, result = client_round(half, down, state, config, solve)
    if half.keeps_local:
        state = WithLocal(state, model.read_local())
    up, state = all_to_device(up, data.home), all_to_device(state, CPU)
    reply = TrainReply(up, data.examples or passes.size, result.steps, result.loss)
    if request.buffers is not None:
        reply = reply._replace(buffers=to_device(model.read_buffers(), data.home))
    if data.home.type == "cuda":
        return reply, state
    total, loss = fetch([length(result.w_K), result.loss])  # synchronises: all copies are complete
    if not is_finite(result.w_K, total):
        raise ValueError(DIVERGED.format(result.steps, instruction.lr))
    return reply._replace(loss=loss, seconds=time.perf_counter() - began), state


def _steps(instruction: TrainInstruction, batches: Iterable[Batch]) -> int:
    """K_i; 0 if the batches have no length. Raises ValueError if a rate depends on it then."""
    if instruction.local_steps:
        return instruction.local_steps
    if isinstance(batches, Sized):
        with suppress(TypeError):  # a DataLoader of an IterableDataset has none
            return instruction.local_epochs * len(batches)
    schedule = instruction.half.schedule
    if schedule.falls:
        raise ValueError(
            f"lr-schedule={schedule.name}: expected batches with a length (a list, a "
            f"DataLoader), or local-steps, got a {type(batches).__name__}"
        )
    return 0


def begun_state(request: TrainRequest, model: FlatModel, earlier: Any) -> Any:
    """The state with which a client begins a visit, on the model's device.

    earlier: the stored one; None: it has none. After a reset of the server's only its own
    parameters and buffers still count.
    """
    half, device = request.instruction.half, model.w.device
    if earlier is not None and request.instruction.accepted >= -1:
        return all_to_device(earlier, device)
    w = to_device(request.down.w, device)
    w_init = w if request.w_init is None else to_device(request.w_init, device)
    state = half.init(w, w_init, request.instruction.config)
    local = model.initial_local if earlier is None else to_device(earlier.local, device)
    return WithLocal(state, local) if half.keeps_local else state


def local_evaluation(request: EvaluateRequest, state: Any, data: Data) -> dict[str, float]:
    """Metrics of the server's model and of the client's own, which have the prefix `PERSONAL` if
    there are both, and the number of samples; only that number, 0, without samples, or if their
    targets are all ignored.

    state: after the client's last accepted round; None: it has none.
    Raises ValueError if only its own model is requested and it has none.
    """
    model, precision = data.model, request.instruction.precision
    own = None if state is None else _own_model(request, state, model)
    if request.own_only and own is None:
        raise ValueError("expected a client with a personal model, got one that has none")
    buffers = model.initial_buffers if request.buffers is None else request.buffers
    model.write_buffers(to_device(buffers, model.w.device))
    passes = data.passes()

    def measure(w: Vector, local: Vector) -> dict[str, float]:
        model.write_local(to_device(local, model.w.device))
        batches = passes.one_pass(first=not passes.examples)
        w = to_device(w, model.w.device)
        return evaluate(model, w, batches, data.loss, precision, metrics=data.metrics)

    values: dict[str, float] = {}
    if request.w is not None and not request.own_only:
        values = measure(request.w, model.initial_local)
    if own is not None:
        prefix = "" if request.own_only else PERSONAL
        values |= {f"{prefix}{name}": value for name, value in measure(*own).items()}
    return {EXAMPLES: passes.examples if values else 0, **values}


def _own_model(
    request: EvaluateRequest, state: Any, model: FlatModel
) -> tuple[Vector, Vector] | None:
    """The client's own model (d,) and its local tensors; None: its method has none."""
    half = request.instruction.half
    local = state.local if half.keeps_local else model.initial_local
    w = half.personal(state)
    if w is None and half.keeps_local:
        w = request.w
    return None if w is None else (w, local)


def _check_shapes(model: FlatModel, instruction: TrainInstruction) -> None:
    if tuple(model.shapes) != instruction.shapes:
        raise ValueError(
            "expected the server's model with parameter shapes "
            f"{shapes_text(instruction.shapes)}, got {shapes_text(model.shapes)}: "
            "build the same model on server and clients"
        )
