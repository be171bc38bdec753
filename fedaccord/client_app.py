"""The ClientApp: message in, local round, reply out."""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import records
from fedaccord.config import RunConfig
from fedaccord.records import Order
from fedaccord.strategies.base import LocalRule, Model, Plan, Work, is_finite
from fedaccord.task import Task, load_task
from fedaccord.task.evaluation import evaluate
from fedaccord.task.training import Batch, Loss, descend, gradient_at_w
from fedaccord.task.vectors import FlatModel

log = logging.getLogger("flwr")


def train_locally(
    message: Message,
    context: Context,
    *,
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss = F.cross_entropy,
    examples: int | None = None,
) -> Message:
    """One local round of whatever FedAccord strategy sent ``message``; returns the reply.

    The method, its settings and the local rates come with the message; the client's state lives
    in ``context.state`` and is written last. ``batches`` is gone through once per local epoch, or
    until ``local-steps`` steps are taken; its tensors may lie on any device. ``loss`` is called as
    ``loss(predictions, targets)``. ``examples`` counts the client's samples; by default those of
    the first pass over ``batches``.

    Raises ValueError on a message, a model or data that do not fit together; Flower hands that
    to the server as an error reply, and the client's state stays as it was.
    """
    if records.is_hello(message):
        return records.introduce(message, context)
    order = records.read_order(message)
    flat = _flat(model, order)
    return _local_round(message, context, order, flat, batches, loss, examples)


def evaluate_locally(
    message: Message,
    context: Context,
    *,
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss = F.cross_entropy,
) -> Message:
    """Loss and accuracy of the client's personal model, where its method has one, as the reply.

    The model lies in ``context.state``, where `train_locally` left it. ``loss`` must be a mean over
    its batch; ``batches`` are the client's own test samples.
    Raises ValueError where the message is of another kind or the client has no such model.
    """
    order = records.read_order(message)
    return _local_test(message, context, order, _flat(model, order), batches, loss)


def _flat(model: nn.Module, order: Order) -> FlatModel:
    dtype = torch.float64 if order.precision == "float64" else torch.float32
    return FlatModel(model, dtype=dtype)


def _local_test(
    message: Message,
    context: Context,
    order: Order,
    model: FlatModel,
    batches: Iterable[Batch],
    loss: Loss,
) -> Message:
    device, nothing = model.w.device, model.w.to("meta")
    rule: LocalRule = records.loads(order.rule, LocalRule)
    saved = records.load_state(context, rule.init(nothing, nothing))
    w = rule.personal(saved[0]) if saved else None
    if w is None:
        raise ValueError("expected a client with a personal model, got one that has none")
    counter = _Counter(batches, device)
    found = evaluate(model, w.to(device), counter.one_pass(first=True), loss)
    metrics = MetricRecord({"num-examples": counter.examples, **found})
    return Message(RecordDict({records.METRICS: metrics}), reply_to=message)


def _local_round(
    message: Message,
    context: Context,
    order: Order,
    model: FlatModel,
    batches: Iterable[Batch],
    loss: Loss,
    examples: int | None,
) -> Message:
    device = model.w.device
    shapes = records.shapes_text(model.shapes)
    if shapes != order.shapes:
        raise ValueError(
            f"expected the server's model with parameter shapes {order.shapes}, got {shapes}: "
            "build the same model on server and clients"
        )
    rule: LocalRule = records.loads(order.rule, LocalRule)
    down = _to(device, records.unpack_down(message, rule.receives, like=model.w))
    state = _client_state(message, context, order, rule, down, model.w)

    w_0 = rule.start(down, state)
    model.w.copy_(w_0)
    counter = _Counter(batches, device)
    plan = Plan(order.round, order.lr, order.weight_decay, order.client, order.seed)
    oracle = rule.oracle(down, state, plan)
    done = descend(
        model,
        counter.steps(order.local_epochs, order.local_steps),
        loss,
        **rule.direction(down, state, plan)._asdict(),
        lr=order.lr,
        weight_decay=order.weight_decay,
        clip_norm=order.clip_norm or None,
        oracle=oracle or gradient_at_w,
        precision=order.precision,
    )
    if not done.steps:
        raise ValueError("expected at least one batch of training data, got none")
    w_K = model.w.clone()
    if not is_finite(w_K):
        raise ValueError(
            f"the local model diverged: NaN or Inf after {done.steps} steps at lr {order.lr:g}; "
            "lower lr or clip-norm"
        )
    examples = examples or counter.examples
    work = Work(w_0, done.steps, order.round, order.lr, examples, done.loss, oracle)
    up, state = rule.finish(w_K, down, state, work)
    metrics = MetricRecord(
        {"num-examples": work.examples, "train-loss": done.loss, "steps": done.steps}
    )
    content = RecordDict({records.UP: records.pack(_to("cpu", up)), records.METRICS: metrics})
    reply = Message(content, reply_to=message)
    records.save_state(context, _to("cpu", state), order.round)
    return reply


def _client_state(
    message: Message,
    context: Context,
    order: Order,
    rule: LocalRule,
    down: tuple[Tensor, ...],
    like: Tensor,
) -> tuple[Tensor, ...]:
    nothing = like.to("meta")
    saved = records.load_state(context, rule.init(nothing, nothing))
    if saved is None:
        if order.last_round >= 0:
            log.warning("client %d lost its state of round %d", order.client, order.last_round + 1)
        w: Tensor | None = down.w  # type: ignore[attr-defined]
        if w is None:
            raise ValueError("expected a model from the server, as this client has lost its own")
        initial = message.content.array_records.get(records.INITIAL)
        w_0 = w if initial is None else _to(like.device, records.unpack(Model, initial)).w
        return rule.init(w, w_0)  # type: ignore[no-any-return]
    state, last_round = saved
    if last_round != order.last_round:
        log.warning(
            "client %d: its reply of round %d was not accepted", order.client, last_round + 1
        )
    return _to(like.device, state)


def _to(device: torch.device | str, vectors: "records.Vectors") -> "records.Vectors":
    """A NamedTuple of vectors on ``device``, without copying where it is there already."""
    moved: Iterable[Any] = (
        v.to(device) if isinstance(v, Tensor) else None if v is None else _to(device, v)
        for v in vectors
    )
    return type(vectors)(*moved)


class _Counter:
    """Counts the samples of the first pass over the batches, on their way to the device."""

    def __init__(self, batches: Iterable[Batch], device: torch.device) -> None:
        self.batches = batches
        self.device = device
        self.examples = 0

    def one_pass(self, first: bool) -> Iterator[Batch]:
        seen = False
        for inputs, targets in self.batches:
            seen = True
            if first:
                self.examples += len(targets)
            yield inputs.to(self.device), targets.to(self.device)
        if not seen and self.examples:
            raise ValueError(
                "expected batches that can be gone through more than once (a list, a DataLoader), "
                f"got a {type(self.batches).__name__} that was used up after the first pass"
            )

    def steps(self, epochs: int, steps: int) -> Iterator[Batch]:
        if steps == 0:
            return chain.from_iterable(self.one_pass(e == 0) for e in range(epochs))
        return islice(chain.from_iterable(self.one_pass(e == 0) for e in self._epochs()), steps)

    def _epochs(self) -> Iterator[int]:
        """0, 1, 2, ... as long as passes give batches."""
        yield 0
        if self.examples:
            yield from repeat(1)


def make_app(task_of: Callable[[Context], Task]) -> ClientApp:
    """The ClientApp that trains on the task which ``task_of`` finds for a client."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = records.introduce(message, context) if records.is_hello(message) else None
        task = task_of(context)  # also with an introduction: what is wrong shows before round 1
        if reply is not None:
            return reply
        order = records.read_order(message)
        model = task.model(order.precision)
        batches = task.train_batches(
            order.client, order.round, order.batch_size, order.seed, model.w.dtype
        )
        examples = task.num_examples(order.client)
        return _local_round(message, context, order, model, batches, task.loss, examples)

    @app.evaluate()
    def test(message: Message, context: Context) -> Message:
        task, order = task_of(context), records.read_order(message)
        model = task.model(order.precision)
        client = int(context.node_config[records.PARTITION_ID])  # type: ignore[arg-type]
        samples = task.client_test(client)
        batches = task.batches(samples, model.w.dtype) if samples else []
        return _local_test(message, context, order, model, batches, task.loss)

    return app


def configured_task(context: Context) -> Task:
    """The task of the run configuration, or the node's own data.

    A node's config may name its own ``dataset``, ``data-dir``, ``image-size``, ``device`` and
    ``threads``; a node with its own ``data-dir`` holds all training samples it finds there.
    """
    own = {key: context.node_config[key] for key in OWN_KEYS if key in context.node_config}
    config = RunConfig.make({**context.run_config, **own})
    if config.threads:
        torch.set_num_threads(config.threads)
    num_clients = context.node_config.get(records.NUM_PARTITIONS, config.num_clients)
    return load_task(**config.task(), num_clients=int(num_clients), whole="data-dir" in own)


OWN_KEYS = ("dataset", "data-dir", "image-size", "device", "threads")

app = make_app(configured_task)
