"""A bad reply is dropped with one line, whatever is wrong with it; the run continues."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from fedaccord.core.vectors import is_finite
from fedaccord.federation.round import Round
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.strategies import FedAvg, FedNova, FedPD, Scaffold
from fedaccord.wire.tensor_array import to_record, to_tensor
from tests.server.runs import W0, C, Spoil, federation, strategy


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


def dropped(rounds: list[Round]) -> list[str]:
    return [row["status"] for row in rounds[-1].clients if row["status"] != "ok"]


RELAXED = {"plugins": (RelaxedInit(beta=0.1),)}
LINES: list[tuple[Any, dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = [
    (FedAvg, {}, lambda up: {}, "expected the vectors ['w'], got []"),
    (FedAvg, {}, lambda up: {**up, "v": up["w"]}, "expected the vectors ['w'], got ['w', 'v']"),
    (
        FedAvg,
        {},
        lambda up: {"w": up["w"].float()},
        "expected 'w' of shape (5,) and torch.float64, got (5,) and torch.float32",
    ),
    # every vector of a reply is checked
    (
        Scaffold,
        {},
        lambda up: {**up, "dc_i": up["dc_i"] * math.nan},
        "expected finite numbers, got NaN or Inf in 'dc_i'",
    ),
    # also the start that relaxed initialisation sends
    (FedNova, RELAXED, lambda up: {"w": up["w"]}, "expected the vectors ['w', 'w_i0'], got ['w']"),
    (
        FedNova,
        RELAXED,
        lambda up: {**up, "w_i0": up["w"][:2]},
        "expected 'w_i0' of shape (5,) and torch.float64, got (2,) and torch.float64",
    ),
    (
        FedNova,
        RELAXED,
        lambda up: {**up, "w_i0": up["w"] / 0},
        "expected finite numbers, got NaN or Inf in 'w_i0'",
    ),
    # FedPD's anchor may be None, but of all clients or of none
    (FedPD, {}, lambda up: {}, "expected the vectors ['anchor'], as in the other replies, got []"),
    (
        FedPD,
        {"p": 1.0},
        lambda up: {"anchor": torch.zeros(5, dtype=torch.float64)},
        "expected the vectors [], as in the other replies, got ['anchor']",
    ),
]


@pytest.mark.parametrize(("method", "settings", "change", "line"), LINES)
def test_what_is_wrong_with_a_replys_vectors_is_one_line(
    method: Any, settings: dict[str, Any], change: Any, line: str
) -> None:
    bounds = {"max_failed_rounds": 9, **settings}
    rounds = federation(strategy(method, **bounds), 1, with_vectors(change))
    assert [row["status"] for row in rounds[1].clients] == ["ok", "ok", line, "ok", "ok", "ok"]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_reply_has_all_local_steps_of_a_fixed_number(steps: int) -> None:
    rounds = federation(strategy(Scaffold, local_steps=2), 1, with_metrics(steps=steps))
    assert dropped(rounds) == [f"expected steps to be 2, got {steps}"]


def test_a_reply_to_another_message_counts_for_nobody() -> None:
    def other(message: Message, reply: Message) -> Message:
        reply.metadata.__dict__["_reply_to_message_id"] = "unknown"
        return reply

    assert dropped(federation(strategy(round_timeout=0.1), 1, other)) == ["no reply in time"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite_vectors_are_told_from_others(bad: float) -> None:
    v = torch.full((1000,), 1e38)  # its norm is beyond float32
    assert is_finite(v)
    v[7] = bad
    assert not is_finite(v)


def test_all_replies_bad_is_a_failed_round() -> None:
    rounds = federation(strategy(FedAvg, lr=1e38), 1)
    metrics = rounds[-1].metrics
    assert [metrics[name] for name in ("replies", "dropped", "counted")] == [0, C, 0]
    assert torch.equal(rounds[-1].w, torch.from_numpy(W0))
    assert all("the local model diverged" in line for line in dropped(rounds))
