"""The in-process Grid: it restores the Context of a client that fails, and copies no vector."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp

from fedaccord import train_locally
from fedaccord.engine import quiet
from fedaccord.strategies import FedAvg
from fedaccord.wire.handshake import handshake
from fedaccord.wire.instruction import is_handshake
from fedaccord.wire.tensor_array import to_tensor
from tests.federation import half_square, linear
from tests.grid import InProcessGrid
from tests.reference.problem import LeastSquares

LEAST_SQUARES = LeastSquares(1, seed=2)
W0 = np.linspace(-1, 1, LEAST_SQUARES.dim)


def test_a_failure_is_an_error_reply_and_restores_the_context() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        context.state["mine"] = ConfigRecord({"round": 1})
        raise KeyError("no such column")

    with InProcessGrid(app, 2) as grid:
        messages = [Message(handshake(), node, MessageType.TRAIN) for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages))
    assert [r.error.reason for r in replies] == ["KeyError: 'no such column'"] * 2
    assert [r.metadata.src_node_id for r in replies] == list(grid.get_node_ids())
    assert not any("mine" in context.state for context in grid.contexts.values())


def test_vectors_pass_by_reference() -> None:
    pointers: list[int] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not is_handshake(message):
            pointers.append(to_tensor(message.content.array_records["down"]["w"]).data_ptr())
        batches = LEAST_SQUARES.clients()
        return train_locally(message, context, model=linear(W0), batches=batches, loss=half_square)

    strategy = FedAvg(precision="float64", fraction_train=1.0, lr=0.05)
    with InProcessGrid(app, 3) as grid, quiet():
        strategy.start(grid, ArrayRecord(linear(W0).state_dict()), 1)
    assert len(pointers) == 3
    assert len(set(pointers)) == 1
