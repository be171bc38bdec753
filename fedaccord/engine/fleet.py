"""Clients in this process, without ClientApp and messages: local rounds are called directly, with
one or many clients in a call, and vectors are passed by reference."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fedaccord.client.cohort_rounds import form, local_rounds
from fedaccord.client.data import test_data, training_data
from fedaccord.client.train import local_evaluation, local_round
from fedaccord.core.request import (
    EvaluateRequest,
    ModelSettings,
    StateLost,
    TrainInstruction,
    TrainReply,
    TrainRequest,
)
from fedaccord.core.vectors import fetch, nbytes
from fedaccord.engine.secure_clients import SecureClients
from fedaccord.federation.fleet import IN_PROCESS, LATE, Reading, SecureChannel, TrainReplies
from fedaccord.federation.settings import ROUND_TIMEOUT
from fedaccord.storage.in_process import InProcessStore
from fedaccord.storage.store import MissingStateError
from fedaccord.task import Task

log = logging.getLogger("flwr")

CALL_CLIENTS = 100  # at most, in one call; more are not faster
PENDING_BYTES = 2**30  # bytes of models whose clients' states are not yet stored
CALL_BYTES = 2**25  # bytes of their models; larger calls are hardly faster on a CPU
GPU_CALL_BYTES = 2**30  # on a GPU a call has about eight vectors of each model

Reached = tuple[TrainRequest, Any]  # a request, and its client's state before the visit
NewStates = list[tuple[TrainInstruction, TrainReply, Any]]  # not yet stored, with the replies


class InProcessFleet(ABC):
    """C clients that are always connected, and train when their replies are read; this process
    stores their states."""

    place = IN_PROCESS
    home = torch.device("cpu")
    evaluators = 1

    def __init__(
        self,
        task: Task,
        store: InProcessStore,
        vectorize: bool = False,
        on_client: Callable[[int], None] | None = None,
    ) -> None:
        self.task = task
        self.num_clients = len(task.clients)
        self.store = store
        self.vectorize = vectorize  # many clients in one call; the last bits may differ
        self._on_client = on_client  # called after each visit with the client's number
        self._warnings: set[str] = set()  # each is printed once
        self._sent: dict[int, tuple[TrainRequest, float]] = {}  # with their timeouts, by client

    @abstractmethod
    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies: ...

    def connect(self, seconds: float, *model: Any) -> None:  # noqa: B027  all are connected
        pass

    def card(self, seconds: float, settings: ModelSettings, least: int = 0) -> Mapping[str, Any]:
        return self.task.card

    def available(self) -> Sequence[int]:
        return range(self.num_clients)

    def wait_for(
        self, least: int, at_work: Collection[int], seconds: float
    ) -> tuple[Sequence[int], str]:
        return self.available(), ""

    def send(self, requests: Sequence[TrainRequest], timeout: float) -> None:
        """As `Fleet.send`; the seconds of ``timeout`` begin with `receive`."""
        for request in requests:
            self._sent.pop(request.instruction.client, None)  # the new one is the last
            self._sent[request.instruction.client] = request, timeout

    def receive(self, clients: Collection[int], wanted: int) -> dict[int, Reading]:
        """As `Fleet.receive`: replies arrive in the order of `send`, one after another."""
        self._sent = {i: sent for i, sent in self._sent.items() if i in clients}
        readings: dict[int, Reading] = {}
        while self._sent and wanted:
            i = next(iter(self._sent))
            request, timeout = self._sent.pop(i)
            readings[i] = dict(self.train([request], timeout))[i]
            wanted -= not isinstance(readings[i], str)
        return readings

    def secure_channel(self) -> SecureChannel:
        return SecureClients(self.train)

    def client_states(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        return self.store.states(accepted)

    def restore(self, states: Iterable[tuple[int, tuple[int, Any]]]) -> None:
        self.store.restore(states)


class LocalFleet(InProcessFleet):
    """C clients that share this process and its task; vectors pass by reference.

    A client that raises is dropped with its error and keeps its previous state.
    """

    def __init__(
        self,
        task: Task,
        on_client: Callable[[int], None] | None = None,
        vectorize: bool = False,
        store: InProcessStore | None = None,
        home: torch.device | str = "cpu",
    ) -> None:
        super().__init__(task, store or InProcessStore(), vectorize, on_client)
        self.home = torch.device(home)  # of the server's vectors and of replies

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        # by default the clients that count do not depend on the speed of the machine
        deadline = math.inf if timeout == ROUND_TIMEOUT else time.monotonic() + timeout
        replies: dict[int, Reading] = {}
        new_states: NewStates = []
        for some in [requests] if self.vectorize else [[request] for request in requests]:
            for part in _parts(self._reached(some, replies), self.task):
                late = time.monotonic() > deadline
                clients = [request.instruction.client for request, _ in part]
                replies |= dict.fromkeys(clients, LATE) if late else self._train(part, new_states)
                if self._on_client:
                    for client in clients:
                        self._on_client(client)
        self._store(new_states)
        return replies.items()

    def _reached(
        self, requests: Sequence[TrainRequest], replies: dict[int, Reading]
    ) -> list[Reached]:
        """The requests to execute, each with its client's state; replies to the others."""
        reached: list[Reached] = []
        for request in requests:
            instruction = request.instruction
            try:
                reached.append((request, self.store.recall(instruction)))
                continue
            except MissingStateError:
                replies[instruction.client] = StateLost(instruction.accepted)
            except ValueError as error:
                replies[instruction.client] = describe(error)
            if self._on_client:
                self._on_client(instruction.client)
        return reached

    def _train(self, part: Sequence[Reached], new_states: NewStates) -> dict[int, Reading]:
        """The readings of requests executed together; adds their states to ``new_states``."""
        replies: dict[int, Reading] = {}
        size = nbytes(part[0][0].down)
        for (request, _), result in zip(part, self._rounds(part), strict=True):
            instruction = request.instruction
            if isinstance(result, str):
                replies[instruction.client] = result
            else:
                replies[instruction.client] = result[0]
                new_states.append((instruction, *result))
        if (
            self.home.type == "cpu"
            or not self.store.copies
            or len(new_states) * size > PENDING_BYTES
        ):
            self._store(new_states)
        return replies

    def _store(self, new_states: NewStates) -> None:
        """Store the new states; copying many of them synchronises a GPU once."""
        if new_states and self.store.copies:
            fetch(reply.loss for _, reply, _ in new_states)
        for instruction, _, state in new_states:
            self.store.remember(instruction, state)
        new_states.clear()

    def _rounds(self, part: Sequence[Reached]) -> Sequence[tuple[TrainReply, Any] | str]:
        failure = ""
        if self.vectorize and len(part) > 1:
            try:
                requests, states = zip(*part, strict=True)
                return local_rounds(requests, states, self.task, self.home)
            except NotImplementedError as error:  # the cohort cannot be stacked
                self._warn(f"one client at a time: {error}")
            except Exception as error:  # only one at a time shows which client failed
                failure = describe(error)
        results = [self._round(request, state) for request, state in part]
        if failure and not any(isinstance(it, str) for it in results):
            log.warning("%d clients at once failed, one at a time did not: %s", len(part), failure)
        return results

    def _warn(self, line: str) -> None:
        if line not in self._warnings:
            self._warnings.add(line)
            log.warning("%s", line)

    def _round(self, request: TrainRequest, state: Any) -> tuple[TrainReply, Any] | str:
        try:
            data = training_data(self.task, request.instruction)._replace(home=self.home)
            return local_round(request, state, data)
        except Exception as error:  # the server handles any error of a client
            return describe(error)

    def evaluate(
        self, requests: Sequence[EvaluateRequest], timeout: float
    ) -> list[Mapping[str, float] | str]:
        return [*map(self._evaluate, requests)]

    def _evaluate(self, request: EvaluateRequest) -> Mapping[str, float] | str:
        try:
            try:
                state = self.store.recall(request.instruction)
            except MissingStateError:
                state = None
            return local_evaluation(request, state, test_data(self.task, request.instruction))
        except Exception as error:
            return describe(error)


def _parts(reached: Sequence[Reached], task: Task) -> list[list[Reached]]:
    """Requests that are executed together: of one form, most steps first."""
    if len(reached) == 1:
        return [[*reached]]
    groups: dict[Any, list[Reached]] = {}
    for request, state in reached:
        groups.setdefault(form(request, state), []).append((request, state))
    most_bytes = CALL_BYTES if torch.device(task.device).type == "cpu" else GPU_CALL_BYTES
    parts = []
    for group in groups.values():
        group.sort(key=lambda pair: -task.num_examples(pair[0].instruction.client))
        size = nbytes(group[0][0].down) or 1
        most = max(1, min(CALL_CLIENTS, most_bytes // size))
        parts += [group[k : k + most] for k in range(0, len(group), most)]
    return parts


def describe(error: Exception) -> str:
    """A client's exception in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
