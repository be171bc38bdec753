"""Injected faults of messages, replies and devices, for tests and studies."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedaccord.core.request import EvaluateRequest, TrainInstruction, TrainRequest
from fedaccord.engine.fleet import InProcessFleet, LocalFleet
from fedaccord.federation.fleet import LATE, Reading, TrainReplies

if TYPE_CHECKING:
    from fedaccord.engine.workers import WorkersFleet

log = logging.getLogger("flwr")

KINDS = ("lost-message", "lost-reply", "duplicate", "late", "crash")
Faults = Callable[[int, int], str | None]  # (round t from 0, client) -> one of KINDS, or None


class FaultyFleet(InProcessFleet):
    """Clients in this process behind a network that loses, repeats and delays messages.

    lost-message: the client does not receive the request. lost-reply: it trains, and its reply is
    lost. late: its reply arrives in the next round and is ignored. duplicate: it receives the
    request twice and replies twice. crash: it loses its state before the request arrives. With
    ``over-selection`` no later reply takes the place of a lost one.
    """

    def __init__(self, fleet: "LocalFleet | WorkersFleet", faults: Faults) -> None:
        super().__init__(fleet.task, fleet.store)
        self.fleet = fleet
        self.home, self.evaluators = fleet.home, fleet.evaluators
        self.faults = faults
        self._late: list[tuple[int, int]] = []  # (round, client) of pending replies

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        for t, i in self._late:
            log.info("ignored the late reply of client %d to round %d", i, t + 1)
        self._late = []
        kinds = {
            request.instruction.client: self._kind(request.instruction) for request in requests
        }
        for i, kind in kinds.items():
            if kind == "crash":
                self.fleet.store.remove(i)
        reached = [v for v in requests if kinds[v.instruction.client] != "lost-message"]
        readings = dict(self.fleet.train(reached, timeout))
        again = [v for v in requests if kinds[v.instruction.client] == "duplicate"]
        for i, _ in self.fleet.train(again, timeout):
            log.info("ignored a second reply of client %d", i)
        replies: dict[int, Reading] = {}
        for request in requests:
            t, i = request.instruction.round, request.instruction.client
            if kinds[i] == "late":
                self._late.append((t, i))
            unheard = kinds[i] in ("lost-message", "lost-reply", "late")
            replies[i] = LATE if unheard else readings[i]
        return replies.items()

    def evaluate(
        self, requests: Sequence[EvaluateRequest], timeout: float
    ) -> list[Mapping[str, float] | str]:
        return self.fleet.evaluate(requests, timeout)

    def _kind(self, instruction: TrainInstruction) -> str | None:
        kind = self.faults(instruction.round, instruction.client)
        if kind is not None and kind not in KINDS:
            raise ValueError(f"faults: expected None or one of {', '.join(KINDS)}, got {kind!r}")
        return kind
