"""The interface of a round to its clients: requests and replies, as values.

`MessageFleet` of message_fleet.py sends Flower's messages; the clients of `engine/fleet.py` are in
this process.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from fedaccord.core.request import (
    EvaluateRequest,
    ModelLayout,
    ModelSettings,
    StateLost,
    TrainReply,
    TrainRequest,
)

LATE = "no reply in time"
Reading = TrainReply | StateLost | str  # a string: the error in the reply, in one line
TrainReplies = Iterable[tuple[int, Reading]]  # each client of the requests, once


class Fleet(Protocol):
    """All clients of a federation."""

    home: torch.device  # of the server's vectors
    evaluators: int  # threads for evaluation: the cores of clients that are idle meanwhile

    @property
    def num_clients(self) -> int:
        """C."""

    def connect(
        self, seconds: float, settings: ModelSettings, model: ModelLayout, least: int = 0
    ) -> None:
        """Wait until every client is connected, with a model that matches this one.

        Raises FederationError if one does not connect; with ``least`` if fewer do.
        """

    def available(self) -> Sequence[int]:
        """The connected clients, in order."""

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        """The replies to the requests, in order of arrival; timeout: seconds for all."""

    def client_states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        """(round, state after it) of the clients whose states this process stores.

        accepted: of every client, as in `RoundState`.
        """

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        """Restore the clients' states from `client_states`, one after another."""

    def evaluate(
        self, requests: Sequence[EvaluateRequest], timeout: float
    ) -> list[Mapping[str, float] | str]:
        """The metrics of each client on its own samples, or the reason for none in one line."""
