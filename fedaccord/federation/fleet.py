"""The interface of a round to its clients: requests and replies, as values.

`MessageFleet` of message_fleet.py sends Flower's messages; the clients of `engine/fleet.py` are in
this process. Only the code that makes a fleet knows its class.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
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
from fedaccord.secure.client import Payload

IN_PROCESS, SIMULATED, DEVICES = "in process", "simulated by Flower", "devices"
LATE = "no reply in time"
Reading = TrainReply | StateLost | str  # a string: the error in the reply, in one line
TrainReplies = Iterable[tuple[int, Reading]]  # each client of the requests, once


class SecureChannel(Protocol):
    """The stages of a round of secure sums."""

    def stage(self, payloads: Mapping[int, Payload], timeout: float) -> Mapping[int, Payload | str]:
        """The replies to a stage without training, or the reason for none in one line."""

    def train(
        self, requests: Sequence[TrainRequest], timeout: float, payloads: Mapping[int, Payload]
    ) -> TrainReplies:
        """As `Fleet.train`; each client masks its upload as its payload says."""


class Fleet(Protocol):
    """All clients of a federation.

    Throughout, seconds and timeouts are in seconds, ``least`` is a number of clients, and
    ``settings`` and ``model`` say how a module becomes the run's model, and its names and shapes.
    """

    place: str  # of the clients: IN_PROCESS, SIMULATED or DEVICES
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

    def card(self, seconds: float, settings: ModelSettings, least: int = 0) -> Mapping[str, Any]:
        """How to build the clients' model, its inputs and classes, as `Task.card`.

        Raises FederationError as `connect`, and if no client reports it.
        """

    def available(self) -> Sequence[int]:
        """The connected clients, in order."""

    def wait_for(
        self, least: int, at_work: Collection[int], seconds: float
    ) -> tuple[Sequence[int], str]:
        """As `available`, once ``least`` clients are connected or ``at_work``, and the reason if
        they are not after so many seconds, in one line; empty: they are."""

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        """The replies to the requests, in order of arrival; timeout: seconds for all."""

    def send(self, requests: Sequence[TrainRequest], timeout: float) -> None:
        """Send training requests, return at once; timeout: seconds until they end without a reply.

        An earlier request to the same client, and its reply, are dropped.
        """

    def receive(self, clients: Collection[int], wanted: int) -> Mapping[int, Reading]:
        """The next ``wanted`` replies in order of arrival, and the reasons of requests without one.

        It waits until they have arrived, or all requests have ended. clients: those whose requests
        still count; other replies are dropped.
        """

    def secure_channel(self) -> SecureChannel:
        """The clients' part of one round of secure sums."""

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
