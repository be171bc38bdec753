"""The in-process Grid: it names the sender and gives the name back, keeps Contexts, never fails."""

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from fedaccord import train_locally
from fedaccord.engine import quiet
from fedaccord.federation.fleet import MessageFleet
from fedaccord.federation.run import Run
from fedaccord.storage import store
from fedaccord.strategies import FedAvg, FedDyn
from fedaccord.wire.handshake import answer_handshake, handshake
from fedaccord.wire.instruction import is_handshake, read_instruction
from fedaccord.wire.records import pack
from fedaccord.wire.tensor_array import to_tensor
from tests.federation import half_square, linear
from tests.grid import FIRST_NODE, InProcessGrid
from tests.reference.problem import LeastSquares

C = 6
LEAST_SQUARES = LeastSquares(C, seed=2)
W0 = np.linspace(-1, 1, LEAST_SQUARES.dim)
INITIAL = ArrayRecord(linear(W0).state_dict())


# --- who writes a message -------------------------------------------------------------------------


def named() -> tuple[Any, ...]:
    """Who writes this process's messages, for Flower: its run, node and task."""
    return TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id


def a_grid() -> InProcessGrid:
    return InProcessGrid(ClientApp(), 1)


@pytest.mark.parametrize("before", [(None, None, None), (7, 8, 9)])
def test_whoever_was_named_before_a_block_is_named_again_after_it(
    before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(("_run_id", "_node_id", "_task_id"), before, strict=True):
        monkeypatch.setattr(TaskIdentity, name, value)
    with suppress(KeyboardInterrupt), a_grid():
        assert Message(handshake(), 5, MessageType.TRAIN).metadata.src_node_id == 1
        with a_grid():  # a block in a block
            TaskIdentity.task_id = 4
        assert named() == (1, 1, 1)
        raise KeyboardInterrupt
    assert named() == before


# --- Contexts and replies -------------------------------------------------------------------------


class Count(NamedTuple):
    round: Tensor


def counting_app(fail_in_round: int, client: int) -> ClientApp:
    """FedDyn's client half, that also counts its calls in its Context and once fails after that."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if is_handshake(message):
            return answer_handshake(message, context)
        i = int(str(context.node_config["partition-id"]))
        instruction = read_instruction(message)
        reply = train_locally(
            *(message, context),
            model=linear(W0),
            batches=[LEAST_SQUARES.clients()[i]],
            loss=half_square,
        )
        context.state["mine"] = pack(Count(torch.tensor([instruction.round])))
        if (instruction.round, i) == (fail_in_round, client):
            raise RuntimeError("the disk is full")
        return reply

    return app


def test_a_client_that_fails_keeps_the_context_it_had() -> None:
    """What it had written before it failed is undone, and the next round goes on from there."""
    grid = InProcessGrid(counting_app(fail_in_round=1, client=2), C)
    after: list[tuple[int, int]] = []

    def look(round: Any) -> None:
        state = grid.contexts[FIRST_NODE + 2].state
        if "mine" in state:
            count = to_tensor(state.array_records["mine"]["round"])
            saved = state.config_records[store.STATE_INFO]["rounds"][0]  # type: ignore[index]
            after.append((int(count), int(saved)))  # type: ignore[arg-type]

    method = FedDyn(precision="float64", fraction_train=1.0, lr=0.05)
    with grid, quiet():
        Run(method, MessageFleet(grid), INITIAL, 3, on_round=look).play()
    assert after == [(0, 0), (0, 0), (2, 2)]


def test_a_failure_is_an_error_reply_with_its_reason() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise KeyError("no such column")

    with InProcessGrid(app, 2) as grid:
        messages = [Message(handshake(), node, MessageType.TRAIN) for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages))
    assert [r.error.reason for r in replies] == ["KeyError: 'no such column'"] * 2
    assert [r.error.code for r in replies] == [2, 2]
    sent = [m.metadata.message_id for m in messages]
    assert [r.metadata.reply_to_message_id for r in replies] == sent
    assert [r.metadata.src_node_id for r in replies] == list(grid.get_node_ids())


def test_vectors_pass_by_reference() -> None:
    received: list[int] = []

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not is_handshake(message):
            received.append(to_tensor(message.content.array_records["down"]["w"]).data_ptr())
        batches = [LEAST_SQUARES.clients()[0]]
        return train_locally(message, context, model=linear(W0), batches=batches, loss=half_square)

    strategy = FedAvg(precision="float64", fraction_train=1.0, lr=0.05)
    with InProcessGrid(app, 3) as grid, quiet():
        strategy.start(grid, INITIAL, 1)
    assert len(received) == 3
    assert len(set(received)) == 1


# --- Flower's private parts -----------------------------------------------------------------------


def test_the_private_parts_of_flower_that_the_grid_needs_are_there() -> None:
    advice = "Flower has changed: fix tests/grid.py"
    try:
        from flwr.supercore.run import Run
        from flwr.supercore.task_identity import TaskIdentity as Identity
    except ImportError as error:
        pytest.fail(f"{advice} ({error})")
    for name in ("_run_id", "_node_id", "_task_id"):
        assert hasattr(Identity, name), f"{advice}: TaskIdentity.{name}"
    assert callable(getattr(Run, "create_empty", None)), f"{advice}: Run.create_empty"
    assert Run.create_empty(7).run_id == 7, advice
    with a_grid():
        message = Message(handshake(), 1, MessageType.TRAIN)
        assert "_message_id" in message.metadata.__dict__, f"{advice}: metadata._message_id"
        message.metadata.__dict__["_message_id"] = "mine"
        assert message.metadata.message_id == "mine", advice
        reply = Message(handshake(), reply_to=message)
        assert reply.metadata.reply_to_message_id == "mine", advice
