"""Short federations on least squares through a foreign ClientApp, whose replies may be spoilt."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedaccord import train_locally
from fedaccord.engine import quiet
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.round import Round
from fedaccord.federation.run import Run
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import FedAvg
from fedaccord.wire.instruction import is_handshake
from tests.federation import half_square, linear
from tests.grid import InProcessGrid
from tests.reference.problem import LeastSquares

C = 6
LEAST_SQUARES = LeastSquares(C, seed=1)
W0 = np.zeros(LEAST_SQUARES.dim)
INITIAL = ArrayRecord(linear(W0).state_dict())
Spoil = Callable[[Message, Message], Message]  # (training message, good reply) -> reply


def strategy(kind: type[FederatedStrategy] = FedAvg, **more: Any) -> Any:
    settings: dict[str, Any] = {"precision": "float64", "lr": 0.05, "local_epochs": 2}
    return kind(**{**settings, "fraction_train": 1.0, **more})


def client_app(spoil: Spoil | None = None, client: int | None = 2) -> ClientApp:
    """A step of gradient descent per local epoch; the training replies of ``client`` (None: of
    all) are spoilt."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(str(context.node_config["partition-id"]))
        data: Any = [LEAST_SQUARES.clients()[i]]
        reply = train_locally(message, context, model=linear(W0), batches=data, loss=half_square)
        is_target = spoil and client in (i, None) and not is_handshake(message)
        return spoil(message, reply) if spoil and is_target else reply

    return app


def broken(message: Message, reply: Message) -> Message:
    """A `Spoil`."""
    return Message(Error(code=2, reason="broken"), reply_to=message)


def run_over(grid: Grid, method: FederatedStrategy, rounds: int, **options: Any) -> Run:
    """A run over messages, not begun."""
    return Run(method, MessageFleet(grid), INITIAL, rounds, **options)


def federation(
    method: FederatedStrategy, rounds: int, spoil: Spoil | None = None, **options: Any
) -> list[Round]:
    """The rounds as a run reports them; round 0 first."""
    reports: list[Round] = []
    with InProcessGrid(client_app(spoil), C) as grid, quiet():
        run_over(grid, method, rounds, on_round=reports.append, **options).play()
    return reports
