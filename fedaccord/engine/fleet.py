"""The clients in this process: a cohort's visits in one call, without messages."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedaccord.client import store
from fedaccord.client.data import test_data, training_data
from fedaccord.client.store import LostState, Memory, Version
from fedaccord.client.train import local_round, local_test
from fedaccord.core.visit import Lost, TrainInstruction, Visit
from fedaccord.federation.fleet import LATE, Reading
from fedaccord.task import Task


class LocalFleet:
    """C clients that share this process and its task; vectors pass by reference.

    A client that raises is dropped with what it raised, and keeps the state it had.
    """

    def __init__(self, task: Task, on_client: Callable[[int], None] | None = None) -> None:
        self.task = task
        self.num_clients = len(task.clients)
        self.memories: dict[int, Memory] = {}  # of the clients that were visited
        self._on_client = on_client  # called after each visit with the client's number

    def connect(self, seconds: float) -> None:
        pass

    def here(self) -> Sequence[int]:
        return range(self.num_clients)

    def train(self, visits: Sequence[Visit], timeout: float) -> Mapping[int, Reading]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Reading] = {}
        for visit in visits:
            client = visit.instruction.client
            answers[client] = LATE if time.monotonic() > deadline else self._train(visit)
            if self._on_client:
                self._on_client(client)
        return answers

    def _train(self, visit: Visit) -> Reading:
        asked = visit.instruction
        memory = self.memories.get(asked.client)
        try:
            state = store.recall(memory, asked)
            answer, state = local_round(visit, state, training_data(self.task, asked))
        except LostState:
            return Lost(asked.accepted)
        except Exception as error:  # whatever a client raises is the server's to judge
            return describe(error)
        self.memories[asked.client] = store.remember(memory, asked, state)
        return answer

    def kept(self, accepted: Sequence[int]) -> Mapping[int, tuple[int, Any]]:
        found = {i: store.version(memory, accepted[i]) for i, memory in self.memories.items()}
        return {i: tuple(version) for i, version in sorted(found.items()) if version is not None}

    def restore(self, states: Mapping[int, tuple[int, Any]]) -> None:
        self.memories = {i: Memory(Version(*state)) for i, state in states.items()}

    def state(self, client: int, round: int) -> Any:
        """The client's state after the step of a round; None: it has none."""
        version = store.version(self.memories.get(client), round)
        return version.state if version else None

    def test(
        self, questions: Sequence[TrainInstruction], timeout: float
    ) -> list[Mapping[str, float] | str]:
        return [*map(self._test, questions)]

    def _test(self, asked: TrainInstruction) -> Mapping[str, float] | str:
        try:
            state = store.recall(self.memories.get(asked.client), asked)
            return local_test(asked, state, test_data(self.task, asked))
        except Exception as error:
            return describe(error)


def describe(error: Exception) -> str:
    """What a client raised, in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
