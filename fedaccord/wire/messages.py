"""A request and its reply as Flower messages.

A training message carries ``DOWN`` (the method's broadcast), ``CONFIG`` (see instruction.py)
and, with a client's first one, perhaps ``INITIAL`` (w^0); its reply carries ``UP`` and ``METRICS``.
Both carry ``BUFFERS`` if the server averages them.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedaccord.core.client_half import ClientHalf
from fedaccord.core.options import listed
from fedaccord.core.request import (
    EvaluateRequest,
    StateLost,
    TrainInstruction,
    TrainReply,
    TrainRequest,
)
from fedaccord.core.rule import Model, Rounding
from fedaccord.core.vectors import Vector, dtype_of
from fedaccord.wire import records
from fedaccord.wire.instruction import read_instruction, write_instruction
from fedaccord.wire.records import BUFFERS, CONFIG, DOWN, INITIAL, METRICS, UP

EXAMPLES, STEPS, LOSS, LOST = "num-examples", "steps", "train-loss", "lost-round"
SECONDS = "seconds"
OWN_ONLY = "own-model-only"
NEEDED = (EXAMPLES, STEPS, LOSS)


class Buffers(NamedTuple):
    """The record of the buffers that are averaged, in both directions."""

    buffers: Vector  # (d_b,)


def like(instruction: TrainInstruction) -> Vector:
    """A vector (d,) of the model's dtype on the meta device, without values."""
    d = sum(map(prod, instruction.shapes))
    return torch.empty(d, dtype=dtype_of(instruction.precision), device="meta")


def _packer() -> Callable[..., ArrayRecord]:
    """Packs vectors, rounded or not: the same ones once."""
    packed = dict[tuple[Any, ...], ArrayRecord]()

    def record(vectors: Any, rounding: Rounding | None = None) -> ArrayRecord:
        key = type(vectors), rounding, *map(id, vectors)
        if key not in packed:
            packed[key] = records.pack(vectors if rounding is None else rounding.pack(vectors))
        return packed[key]

    return record


def write_requests(requests: Iterable[TrainRequest]) -> list[RecordDict]:
    """A message's content for each request; vectors for several clients are packed once."""
    record, contents = _packer(), []
    for request in [*requests]:  # keeps the vectors alive: their ids identify them
        instruction = request.instruction
        content = RecordDict({DOWN: record(request.down, instruction.half.rounding)})
        content[CONFIG] = write_instruction(instruction)
        if request.w_init is not None:
            content[INITIAL] = record(Model(request.w_init))
        if request.buffers is not None:
            content[BUFFERS] = record(Buffers(request.buffers))
        contents.append(content)
    return contents


def read_request(message: Message) -> TrainRequest:
    """The request of a training message. Raises ValueError, in one line, for another message."""
    instruction = read_instruction(message)
    expected = like(instruction)
    down = records.arrays_of(message.content, DOWN)
    if down is None:
        raise ValueError(
            f"expected a training message with {DOWN!r}, got {listed(sorted(message.content))}"
        )
    initial = records.arrays_of(message.content, INITIAL)
    buffers = records.arrays_of(message.content, BUFFERS)
    kind, rounding = instruction.half.receives, instruction.half.rounding
    if rounding is None:
        vectors = records.unpack(kind, down, like=expected)
    else:
        vectors = rounding.unpack(records.unpack(rounding.packed(kind), down), kind, expected)
    return TrainRequest(
        instruction,
        vectors,
        None if initial is None else records.unpack(Model, initial, like=expected).w,
        None if buffers is None else records.unpack(Buffers, buffers).buffers,
    )


def write_evaluate_requests(requests: Iterable[EvaluateRequest]) -> list[RecordDict]:
    """A message's content for each request; vectors for several clients are packed once."""
    record, contents = _packer(), []
    for request in [*requests]:  # keeps the vectors alive
        config = write_instruction(request.instruction)
        config[OWN_ONLY] = request.own_only
        content = RecordDict({CONFIG: config})
        if request.w is not None:
            content[DOWN] = record(Model(request.w))
        if request.buffers is not None:
            content[BUFFERS] = record(Buffers(request.buffers))
        contents.append(content)
    return contents


def read_evaluate_request(message: Message) -> EvaluateRequest:
    """The request of an evaluation message. Raises ValueError, in one line, for another message."""
    instruction = read_instruction(message)
    w, buffers = (records.arrays_of(message.content, name) for name in (DOWN, BUFFERS))
    return EvaluateRequest(
        instruction,
        None if w is None else records.unpack(Model, w, like=like(instruction)).w,
        None if buffers is None else records.unpack(Buffers, buffers).buffers,
        bool(records.config_of(message.content, CONFIG).get(OWN_ONLY, False)),
    )


def write_reply(reply: TrainReply | StateLost) -> RecordDict:
    """The content of a reply."""
    if isinstance(reply, StateLost):
        return RecordDict({METRICS: MetricRecord({LOST: reply.accepted})})
    numbers = {EXAMPLES: reply.examples, LOSS: reply.loss, STEPS: reply.steps, **reply.more}
    if reply.seconds is not None:
        numbers[SECONDS] = reply.seconds
    content = RecordDict({UP: records.pack(reply.up), METRICS: MetricRecord(numbers)})
    if reply.buffers is not None:
        content[BUFFERS] = records.pack(Buffers(reply.buffers))
    return content


def read_reply(content: RecordDict, half: ClientHalf) -> TrainReply | StateLost:
    """The reply from a message's content. Raises ValueError, in one line, for other content."""
    up, numbers = records.arrays_of(content, UP), dict(records.metrics_of(content, METRICS))
    if up is None and LOST in numbers:
        return StateLost(numbers[LOST])
    buffers = records.arrays_of(content, BUFFERS)
    arrays = {name for name, record in content.items() if isinstance(record, ArrayRecord)}
    if up is None or not all(name in numbers for name in NEEDED) or arrays - {UP, BUFFERS}:
        raise ValueError(
            f"expected the records {UP!r} and {METRICS!r} with {', '.join(sorted(NEEDED))}, "
            f"got {listed(sorted(content))}"
        )
    examples, steps, loss = (numbers.pop(name) for name in NEEDED)
    seconds = numbers.pop(SECONDS, None)
    return TrainReply(
        records.unpack(half.sends, up),
        examples=examples,
        steps=steps,
        loss=loss,
        more=numbers,
        seconds=seconds,
        buffers=None if buffers is None else records.unpack(Buffers, buffers).buffers,
    )
