"""A bad reply is dropped with one line, whatever is wrong with it; the run goes on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from fedaccord.core.vectors import is_finite
from fedaccord.federation.round import Round
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.strategies import FedAvg, FedNova, FedPD, Scaffold
from fedaccord.wire.tensor_array import to_record, to_tensor
from tests.federation import run
from tests.server.runs import LEAST_SQUARES, W0, C, Spoil, federation, strategy


def replied(message: Message, **records: Any) -> Message:
    return Message(RecordDict(records), reply_to=message)


def vectors(reply: Message) -> dict[str, Tensor]:
    return {name: to_tensor(a).clone() for name, a in reply.content.array_records["up"].items()}


def with_vectors(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    def spoil(message: Message, reply: Message) -> Message:
        up = change(vectors(reply))
        up = up if isinstance(up, ArrayRecord) else to_record(up)
        return replied(message, up=up, metrics=reply.content["metrics"])

    return spoil


def with_w(change: Callable[[Tensor], Tensor]) -> Spoil:
    return with_vectors(lambda up: {**up, "w": change(up["w"])})


def with_metrics(without: str = "", **values: Any) -> Spoil:
    def spoil(message: Message, reply: Message) -> Message:
        numbers = {**reply.content.metric_records["metrics"], **values}
        numbers.pop(without, None)
        return replied(message, up=reply.content["up"], metrics=MetricRecord(numbers))

    return spoil


def with_records(**records: Any) -> Spoil:
    def spoil(message: Message, reply: Message) -> Message:
        content = {**reply.content, **records}
        return replied(message, **{name: r for name, r in content.items() if r is not None})

    return spoil


def raising(message: Message, reply: Message) -> Message:
    raise RuntimeError("cannot write:\nthe disk is full")


def boasting(message: Message, reply: Message) -> Message:
    reason = "=HYPERLINK(1)\x1b[31m red\x1b[0m\x1b]0;title\x07\x00" + "x" * 1_000_000
    return Message(Error(code=4, reason=reason), reply_to=message)


def wordless(message: Message, reply: Message) -> Message:
    return Message(Error(code=4, reason="\n"), reply_to=message)


def nan_in(w: Tensor) -> Tensor:
    w[1] = float("nan")
    return w


BAD: dict[str, tuple[Spoil, str]] = {
    "error": (raising, "the disk is full"),
    "error without a reason": (wordless, "error 4: no reason given"),
    "control codes and a megabyte": (boasting, f"error 4: =HYPERLINK(1) red {'x' * 100}"),
    "no vectors": (with_records(up=None), "expected the records 'up' and 'metrics'"),
    "no metrics": (with_records(metrics=None), "expected the records 'up' and 'metrics'"),
    "metrics for vectors": (with_records(up=MetricRecord()), "expected the records 'up'"),
    "two records of vectors": (with_records(more=ArrayRecord()), "expected the records 'up'"),
    "a vector missing": (
        with_vectors(lambda up: {}),
        "expected the vectors ['w'], got []",
    ),
    "a vector more": (
        with_vectors(lambda up: {**up, "v": up["w"]}),
        "expected the vectors ['w'], got ['w', 'v']",
    ),
    "another name": (
        with_vectors(lambda up: {"v": up["w"]}),
        "expected the vectors ['w'], got ['v']",
    ),
    "a shape that broadcasts": (with_w(lambda w: w[:1]), "expected 'w' of shape (5,)"),
    "a shape of the same size": (with_w(lambda w: w.view(5, 1)), "expected 'w' of shape (5,)"),
    "a dtype that converts": (with_w(lambda w: w.float()), "and torch.float64, got (5,) and "),
    "bytes that are no array": (
        with_vectors(lambda up: ArrayRecord({"w": Array("float64", (5,), "numpy.ndarray", b"?")})),
        "expected an array of numbers, got float64",
    ),
    "words for numbers": (
        with_vectors(lambda up: ArrayRecord({"w": Array(np.array(["a"] * 5))})),
        "expected an array of numbers, got ",
    ),
    "nan": (with_w(nan_in), "expected finite numbers, got NaN or Inf in 'w'"),
    "inf": (with_w(lambda w: w / 0), "expected finite numbers, got NaN or Inf in 'w'"),
    "no examples": (with_metrics(**{"num-examples": 0}), "expected num-examples to be an integer"),
    "half an example": (with_metrics(**{"num-examples": 0.5}), "from 1 to 10000000, got 0.5"),
    "no steps": (with_metrics(steps=0), "expected steps to be an integer from 1 to 24, got 0"),
    "examples not counted": (with_metrics("num-examples"), "with num-examples, steps, train-loss"),
    "a list of losses": (with_metrics(**{"train-loss": [1.0]}), "expected train-loss to be a num"),
}


@pytest.fixture(scope="module")
def others() -> Tensor:
    """w of each round without client 2."""
    weights = run(strategy(batch_size=0), LEAST_SQUARES, W0, [[0, 1, 3, 4, 5]] * 2).weights
    assert weights is not None
    return weights


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_reply_is_dropped_with_one_line(
    bad: str, others: Tensor, warnings: list[str]
) -> None:
    spoil, reason = BAD[bad]
    rounds = federation(strategy(), 2, spoil)
    assert torch.equal(rounds[-1].w, others[-1])
    assert [rounds[-1].metrics[name] for name in ("replies", "dropped")] == [5, 1]
    first, second = [line for line in warnings if line.startswith("round")]
    for number, line in ((1, first), (2, second)):
        assert line.startswith(f"round {number}: dropped client 2: ")
        assert reason in line
        assert line.isprintable()
        assert len(line) < 500
    status = {row["client"]: row["status"] for row in rounds[-1].clients}
    assert status == dict.fromkeys((0, 1, 3, 4, 5), "ok") | {2: status[2]}
    assert reason in status[2]


def dropped(rounds: list[Round]) -> list[str]:
    return [row["status"] for row in rounds[-1].clients if row["status"] != "ok"]


def test_every_vector_of_a_reply_is_looked_at() -> None:
    spoil = with_vectors(lambda up: {**up, "dc_i": up["dc_i"] * float("nan")})
    rounds = federation(strategy(Scaffold), 1, spoil)
    assert dropped(rounds) == ["expected finite numbers, got NaN or Inf in 'dc_i'"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda up: {"w": up["w"]}, "expected the vectors ['w', 'w_i0'], got ['w']"),
        (lambda up: {**up, "w_i0": up["w"][:2]}, "expected 'w_i0' of shape (5,)"),
        (lambda up: {**up, "w_i0": up["w"] / 0}, "got NaN or Inf in 'w_i0'"),
    ],
    ids=["missing", "shape", "inf"],
)
def test_the_start_that_relaxed_initialisation_sends_is_looked_at(change: Any, line: str) -> None:
    relaxed = strategy(FedNova, plugins=(RelaxedInit(beta=0.1),))
    (found,) = dropped(federation(relaxed, 1, with_vectors(change)))
    assert line in found


def test_a_vector_that_all_others_send_is_missed() -> None:
    """FedPD's `anchor` may be None, but of all clients or of none."""
    every = strategy(FedPD, max_failed_rounds=9)
    assert dropped(federation(every, 1, with_vectors(lambda up: {}))) == [
        "expected the vectors ['anchor'], as in the other replies, got []"
    ]


def test_a_vector_that_no_other_sends_is_too_much() -> None:
    silent = strategy(FedPD, p=1.0, max_failed_rounds=9)
    more = with_vectors(lambda up: {"anchor": torch.zeros(5, dtype=torch.float64)})
    assert dropped(federation(silent, 1, more)) == [
        "expected the vectors [], as in the other replies, got ['anchor']"
    ]


def test_a_reply_to_another_message_counts_for_nobody() -> None:
    def other(message: Message, reply: Message) -> Message:
        reply.metadata.__dict__["_reply_to_message_id"] = "unknown"
        return reply

    assert dropped(federation(strategy(), 1, other)) == ["no reply in time"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite_vectors_are_told_from_others(bad: float) -> None:
    v = torch.full((1000,), 1e38)  # its norm is beyond float32
    assert is_finite(v)
    v[7] = bad
    assert not is_finite(v)


def test_all_replies_bad_is_a_failed_round() -> None:
    rounds = federation(strategy(FedAvg, lr=1e200), 1)
    found = rounds[-1].metrics
    assert [found[name] for name in ("replies", "dropped", "counted")] == [0, C, 0]
    assert torch.equal(rounds[-1].w, torch.from_numpy(W0))
    assert all("the local model diverged" in line for line in dropped(rounds))
