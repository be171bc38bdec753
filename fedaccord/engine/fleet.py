"""The clients in this process: visits and answers pass by reference, one or many in a call."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fedaccord.client import store
from fedaccord.client.cohort import form, local_rounds
from fedaccord.client.data import test_data, training_data
from fedaccord.client.store import LostState, Memory, Version
from fedaccord.client.train import local_round, local_test
from fedaccord.core.vectors import leaves
from fedaccord.core.visit import Answer, Lost, TrainInstruction, Visit
from fedaccord.federation.fleet import LATE, Reading
from fedaccord.task import Task

log = logging.getLogger("flwr")

MOST = 100  # clients in one call: beyond it nothing is gained
BYTES = 2**24  # of their models: what goes on together should stay in the caches


class LocalFleet:
    """C clients that share this process and its task; vectors pass by reference.

    A client that raises is dropped with what it raised, and keeps the state it had.
    """

    def __init__(
        self, task: Task, on_client: Callable[[int], None] | None = None, vectorize: bool = False
    ) -> None:
        self.task = task
        self.num_clients = len(task.clients)
        self.memories: dict[int, Memory] = {}  # of the clients that were visited
        self.vectorize = vectorize  # many clients in one call; the last bits may differ
        self._on_client = on_client  # called after each visit with the client's number

    def connect(self, seconds: float) -> None:
        pass

    def here(self) -> Sequence[int]:
        return range(self.num_clients)

    def train(self, visits: Sequence[Visit], timeout: float) -> Mapping[int, Reading]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Reading] = {}
        for part in self._parts(visits) if self.vectorize else [[v] for v in visits]:
            late = time.monotonic() > deadline
            clients = [visit.instruction.client for visit in part]
            answers |= dict.fromkeys(clients, LATE) if late else self._train(part)
            if self._on_client:
                for client in clients:
                    self._on_client(client)
        return {visit.instruction.client: answers[visit.instruction.client] for visit in visits}

    def _parts(self, visits: Sequence[Visit]) -> list[list[Visit]]:
        """Visits that go on together: of one form, the most steps first, not too many."""
        groups: dict[Any, list[Visit]] = {}
        for visit in visits:
            asked, state = visit.instruction, None
            with suppress(LostState, ValueError):
                state = store.recall(self.memories.get(asked.client), asked)
            groups.setdefault(form(visit, state), []).append(visit)
        parts = []
        for group in groups.values():
            group.sort(key=lambda visit: -self.task.num_examples(visit.instruction.client))
            size = sum(v.numel() * v.itemsize for _, v in leaves(group[0].down)) or 1
            most = max(1, min(MOST, BYTES // size))
            parts += [group[k : k + most] for k in range(0, len(group), most)]
        return parts

    def _train(self, visits: Sequence[Visit]) -> dict[int, Reading]:
        """What becomes of visits that go on together."""
        answers: dict[int, Reading] = {}
        reached: list[tuple[Visit, Any]] = []
        for visit in visits:
            asked = visit.instruction
            try:
                reached.append((visit, store.recall(self.memories.get(asked.client), asked)))
            except LostState:
                answers[asked.client] = Lost(asked.accepted)
            except ValueError as error:
                answers[asked.client] = describe(error)
        for (visit, _), done in zip(reached, self._rounds(reached), strict=True):
            asked = visit.instruction
            if isinstance(done, str):
                answers[asked.client] = done
            else:
                answers[asked.client], state = done
                memory = self.memories.get(asked.client)
                self.memories[asked.client] = store.remember(memory, asked, state)
        return answers

    def _rounds(self, reached: Sequence[tuple[Visit, Any]]) -> Sequence[tuple[Answer, Any] | str]:
        if len(reached) > 1:
            try:
                visits, states = zip(*reached, strict=True)
                return local_rounds(visits, states, self.task)
            except Exception as error:  # of which client, only one at a time tells
                log.debug("one client at a time: %s", describe(error))
        return [self._round(visit, state) for visit, state in reached]

    def _round(self, visit: Visit, state: Any) -> tuple[Answer, Any] | str:
        try:
            return local_round(visit, state, training_data(self.task, visit.instruction))
        except Exception as error:  # whatever a client raises is the server's to judge
            return describe(error)

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
