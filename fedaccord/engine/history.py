"""The result of `simulate`, and its recorder."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from fedaccord.core.rounds import RoundState
from fedaccord.federation.round import Round
from fedaccord.wire.tensor_array import to_tensor

if TYPE_CHECKING:
    import pandas as pd


REPR_METRICS = ("test-accuracy", "test-loss", "train-loss")  # of the last round


class History(NamedTuple):
    """The result of `simulate`; T rounds, C clients, d parameters."""

    metrics: "pd.DataFrame"  # a row a round, number 0 before the first
    model: dict[str, Tensor]  # the output model under its parameter names
    clients: list[Any]  # every client's last ClientState; None: never active
    weights: Tensor | None  # (T+1, d) w^t that round t broadcasts; with record="weights";
    # under gossip (T+1, C, d), a row per node
    averages: Tensor | None  # (T+1, d) mean of the uploaded models, or of the nodes; row 0: w^0
    states: list[list[Any]] | None  # every client's state after every round; row 0: all None
    settings: dict[str, Any]  # every run-config key in use, with its value
    state: RoundState  # of the server, after the last round

    def __repr__(self) -> str:
        """One line, without the weights."""
        last = self.metrics.iloc[-1]
        d = sum(tensor.numel() for tensor in self.model.values())
        ends = [f"{name} {last[name]:.4g}" for name in REPR_METRICS if name in last]
        words = [f"{last['round']:.0f} rounds", f"{len(self.clients)} clients", f"{d:,} parameters"]
        return f"History({', '.join(words + ends)})"


class Recorder:
    """Collects the result of `simulate`; state_of: (client, round) -> its state after the round;
    last_state_of: the same after the last one."""

    def __init__(
        self,
        state_of: Callable[[int, int], Any],
        weights: bool,
        on_round: Callable[[Round], None] | None = None,
        last_state_of: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.state_of, self.keep, self.on_round = state_of, weights, on_round
        self.last_state_of = last_state_of or state_of
        self.rows: list[dict[str, float]] = []
        self.weights: list[Tensor] = []
        self.averages: list[Tensor] = []
        self.states: list[list[Any]] = []
        self.last: RoundState | None = None

    def __call__(self, round: Round) -> None:
        self.last = round.state
        self.rows.append({"round": round.number, **round.metrics})
        if self.keep:
            self.weights.append(round.w.to("cpu", copy=True))
            self.averages.append(round.w_bar.to("cpu", copy=True))
            self.states.append(self.client_states(self.state_of))
        if self.on_round:
            self.on_round(round)

    def client_states(self, state_of: Callable[[int, int], Any]) -> list[Any]:
        """Every client's state after its last accepted reply."""
        assert self.last is not None
        return [state_of(*pair) for pair in enumerate(self.last.accepted.tolist())]

    def history(self, model: ArrayRecord, settings: dict[str, Any]) -> History:
        import pandas as pd

        assert self.last is not None
        return History(
            metrics=pd.DataFrame(self.rows),
            model={name: to_tensor(array) for name, array in model.items()},
            clients=self.client_states(self.last_state_of),
            weights=torch.stack(self.weights) if self.keep else None,
            averages=torch.stack(self.averages) if self.keep else None,
            states=self.states if self.keep else None,
            settings=settings,
            state=self.last,
        )
