"""Our methods on the test problem of the dense references, through the in-process engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedaccord import simulate, train_locally
from fedaccord.engine import History, Recorder, quiet
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.run import Run
from fedaccord.federation.session import Session
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.storage import store
from fedaccord.wire import records
from fedaccord.wire.instruction import is_handshake, read_instruction
from tests.grid import InProcessGrid
from tests.reference.problem import Batches, Cohorts, LeastSquares


def half_square(pred: Tensor, y: Tensor) -> Tensor:
    """The loss that makes nn.Linear without bias the references' least squares."""
    return 0.5 * ((pred - y) ** 2).sum()


def linear(w0: np.ndarray) -> nn.Linear:
    model = nn.Linear(len(w0), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(w0))
    return model


def run(
    algo: str | FederatedStrategy,
    problem: LeastSquares,
    w0: np.ndarray,
    schedule: Cohorts,
    **keys: Any,
) -> History:
    """`simulate` with full-batch float64 steps, recording everything."""
    plain: dict[str, Any] = {"lr_decay": 1.0, "weight_decay": 0.0, "batch_size": 0}
    plain |= {"clip_norm": None, "dtype": torch.float64}
    keys = keys if isinstance(algo, FederatedStrategy) else plain | keys
    return simulate(
        algo,
        clients=problem.clients(),
        model=linear(w0),
        loss=half_square,
        rounds=len(schedule),
        participation=schedule,
        record="weights",
        **keys,
    )


def state_in(session: Session, grid: InProcessGrid, client: int, round: int) -> Any:
    """A client's state after a round, from its Context."""
    memory = store.ContextStore(list(grid.contexts.values())[client]).load(client)
    match = store.version(memory, round)
    return match and records.unpack_state(session.client_state(), match.state)


def run_on_batches(
    method: FederatedStrategy,
    problem: LeastSquares,
    w0: np.ndarray,
    schedule: Cohorts,
    batches: Batches,
) -> History:
    """A method over a foreign ClientApp that takes its batches from a fixed schedule."""
    data, app = problem.clients(), ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own: Sequence[tuple[Tensor, Tensor]] = []
        if not is_handshake(message):
            instruction = read_instruction(message)
            x, y = data[instruction.client]
            own = [(x[rows], y[rows]) for rows in batches[instruction.round][instruction.client]]
        model = linear(np.zeros(problem.dim))
        return train_locally(message, context, model=model, batches=own, loss=half_square)

    with InProcessGrid(app, problem.num_clients) as grid, quiet():
        recorder = Recorder(lambda i, t: state_in(run.session, grid, i, t), weights=True)
        initial, fleet = ArrayRecord(linear(w0).state_dict()), MessageFleet(grid)
        run = Run(method, fleet, initial, len(schedule), cohorts=schedule, on_round=recorder)
        run.play()
    return recorder.history(run.output(), {})
