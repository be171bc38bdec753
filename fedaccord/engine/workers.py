"""The clients in Ray actors, on this machine or on a cluster.

The requests of a round are one Ray object; replies are arrays in Ray's shared memory, and states
stay there: Ray moves them to the worker that needs them, and to disk if memory is short. A client's
reply does not depend on its worker, and replies are summed in the order of clients: with equal
threads the weights are those of `LocalFleet`, bit for bit.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from fedaccord.core.request import (
    EvaluateRequest,
    StateLost,
    TrainInstruction,
    TrainReply,
    TrainRequest,
    round_of,
)
from fedaccord.core.vectors import nbytes
from fedaccord.engine.cluster import ray_for, share_tensors
from fedaccord.engine.fleet import CALL_BYTES, InProcessFleet, LocalFleet, describe
from fedaccord.federation.errors import FederationError, clean, last_line
from fedaccord.federation.fleet import LATE, TrainReplies
from fedaccord.process.allocator import keep_freed_memory
from fedaccord.process.threads import cores
from fedaccord.storage.on_ray import RayStore, is_lost, put
from fedaccord.storage.store import MissingStateError, packed_before
from fedaccord.task import Task

log = logging.getLogger("flwr")

PATIENCE = 60.0  # seconds in which workers usually start
SHARES = 4  # calls per worker and round: later ones balance the times of earlier ones
DIED = "its worker process died, even when run alone: perhaps it needs more memory than is free"


class Share(NamedTuple):
    """The requests of one call of a worker."""

    instructions: Sequence[TrainInstruction]
    states: Sequence[Any]  # the Ray object of each client's state before the visit, or None
    again: bool = False  # a worker died during this call

    def apart(self) -> "list[Share]":
        """A share for each client, for other workers."""
        return [Share([a], [s], True) for a, s in zip(self.instructions, self.states, strict=True)]


Send = Callable[[Any, Share], list[Any]]  # (actor, share) -> the Ray objects of its results


class Worker:
    """In an actor: the task, and one call after another; it stores no client's state."""

    def __init__(self, load: Callable[[], Task], threads: int, vectorize: bool) -> None:
        share_tensors()
        keep_freed_memory()  # FedAccord's own process
        torch.set_num_threads(threads)
        self.fleet = LocalFleet(load(), vectorize=vectorize)
        self.round: tuple[Any, Mapping[int, Any]] = (None, {})

    def device(self) -> str:
        return torch.device(self.fleet.task.device).type

    def train(
        self, round: Sequence[Any], clients: Sequence[int], timeout: float, *states: Any
    ) -> list[Any]:
        """The clients' readings, then each one's next state, None if it failed.

        round: one Ray object, client -> its request, in a list, which Ray does not resolve.
        """
        requests = self._requests(round, clients, states)
        readings = dict(self.fleet.train(requests, timeout))
        rounds = {it.instruction.client: it.instruction.round for it in requests}
        after = [
            self.fleet.store.state(i, t) if isinstance(readings[i], TrainReply) else None
            for i, t in rounds.items()
        ]
        return [[readings[i] for i in clients], *after]

    def evaluate(
        self, round: Sequence[Any], clients: Sequence[int], timeout: float, *states: Any
    ) -> list[Mapping[str, float] | str]:
        """The clients' evaluations; round: as of `train`."""
        return self.fleet.evaluate(self._requests(round, clients, states), timeout)

    def _requests(
        self, round: Sequence[Any], clients: Sequence[int], states: Iterable[Any]
    ) -> list[Any]:
        """The requests to these clients, after they were given their states."""
        if self.round[0] != round[0]:
            self.round = round[0], ray.get(round[0])
        requests = [self.round[1][i] for i in clients]
        pairs = zip((request.instruction for request in requests), states, strict=True)
        states = ((a.client, (round_of(a.accepted), s)) for a, s in pairs if s is not None)
        self.fleet.restore(states)
        return requests


class Slot:
    """A worker in this process's view: idle, executing a share, or starting (no share)."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self.begin()

    def begin(self) -> None:
        self.actor = self._start()
        self.is_doubtful = False  # idle while another died, perhaps with their machine
        self.share: Share | None = None
        self.waits: list[Any] = [self.actor.device.remote()]  # Ray objects; empty: idle

    def begin_again(self) -> None:
        ray.kill(self.actor)
        self.begin()

    def take(self, share: Share, send: Send) -> None:
        self.share, self.waits = share, send(self.actor, share)

    def free(self) -> tuple[Share | None, list[Any]]:
        work = self.share, self.waits
        self.share, self.waits = None, []
        return work


class WorkersFleet(InProcessFleet):
    """C clients whose local rounds are distributed over workers, the largest clients first.

    A worker that dies is replaced, and its requests are repeated; one that exceeds the time of a
    round is killed. A client whose state was lost with a machine replies `StateLost`, and evaluates
    without it.
    """

    def __init__(
        self,
        task: Task,
        start: Callable[[], Any],
        workers: int,
        vectorize: bool = False,
        on_client: Callable[[int], None] | None = None,
    ) -> None:
        """start: starts an actor of `Worker`. Raises ValueError if one does not start."""
        super().__init__(task, RayStore(), vectorize, on_client)
        self._slots = [Slot(start) for _ in range(workers)]
        try:
            beginning = [slot.free()[1][0] for slot in self._slots]
            _, missing = ray.wait(beginning, num_returns=workers, timeout=PATIENCE)
            if missing:
                log.warning(
                    "%d of %d workers have not started after %.0f s: they load the data, or wait "
                    "for room in Ray",
                    len(missing),
                    workers,
                    PATIENCE,
                )
            devices = ray.get(beginning)
        except RayError as error:
            raise ValueError(f"workers: a worker did not start: {last_line(str(error))}") from None
        here = torch.device(task.device).type
        # batches that the server evaluates at a time while the workers are idle
        free = cores() // torch.get_num_threads()
        self.evaluators = max(1, min(workers, free)) if here == "cpu" else 1
        if here != "cpu" and "cpu" in devices:
            raise ValueError(
                f"gpus-per-worker: expected a share for workers on {here}, got 0; or device=cpu"
            )

    def train(self, requests: Sequence[TrainRequest], timeout: float) -> TrainReplies:
        deadline = time.monotonic() + timeout
        round = put({request.instruction.client: request for request in requests})

        def send(actor: Any, share: Share) -> list[Any]:
            method = actor.train.options(num_returns=1 + len(share.instructions))
            clients = [it.client for it in share.instructions]
            references: list[Any] = method.remote(
                [round], clients, deadline - _now(), *share.states
            )
            return references

        questions = [request.instruction for request in requests]
        most = CALL_BYTES // max(1, nbytes(requests[0].down)) if requests else 1
        for instruction, reading, state in self._ask(questions, send, deadline, max(1, most)):
            if isinstance(reading, TrainReply):
                self.store.remember(instruction, state)
            if self._on_client:
                self._on_client(instruction.client)
            yield instruction.client, reading

    def evaluate(
        self, requests: Sequence[EvaluateRequest], timeout: float
    ) -> list[Mapping[str, float] | str]:
        deadline = time.monotonic() + timeout
        round = put({request.instruction.client: request for request in requests})
        questions = [request.instruction for request in requests]

        def send(actor: Any, share: Share) -> list[Any]:
            clients = [it.client for it in share.instructions]
            return [actor.evaluate.remote([round], clients, deadline - _now(), *share.states)]

        asked = self._ask(questions, send, deadline, stateless=True)
        answers = {a.client: reading for a, reading, _ in asked}
        return [answers[it.client] for it in questions]

    def close(self) -> None:
        for slot in self._slots:
            ray.kill(slot.actor)

    # --- shares and workers -----------------------------------------------------------------------

    def _ask(
        self,
        questions: Sequence[TrainInstruction],
        send: Send,
        deadline: float,
        most: int = 100,
        stateless: bool = False,
    ) -> Iterator[tuple[TrainInstruction, Any, Any]]:
        """(request, reading, Ray object of the next state) as they arrive; most: requests in a
        share; stateless: clients whose state was lost reply without it.

        Raises FederationError if no worker is left.
        """
        pairs: list[tuple[TrainInstruction, Any]] = []
        for instruction in questions:
            try:
                memory = self.store.load(instruction.client)
                pairs.append((instruction, packed_before(memory, instruction)))
            except MissingStateError:
                if stateless:
                    pairs.append((instruction, None))
                else:
                    yield instruction, StateLost(instruction.accepted), None
            except ValueError as error:
                yield instruction, describe(error), None
        left = deque(self._deal(pairs, most))

        def employ() -> None:
            for slot in self._slots:
                if left and not slot.waits:
                    slot.take(left.popleft(), send)

        while left or any(slot.share for slot in self._slots):
            employ()
            waiting = {slot.waits[0]: slot for slot in self._slots if slot.waits}
            ready, _ = ray.wait([*waiting], timeout=max(0.0, deadline - _now()))
            if not ready:
                break
            slot = waiting[ready[0]]
            share, (first, *after) = slot.free()
            try:
                readings = ray.get(first)
            except ObjectLostError:
                assert share is not None
                lost = [s is not None and is_lost(s) for s in share.states]
                for part, without in zip(share.apart(), lost, strict=True):
                    if without and not stateless:
                        yield part.instructions[0], StateLost(part.instructions[0].accepted), None
                    else:
                        states = [None] if without else part.states
                        left.append(part._replace(states=states, again=False))
            except RayTaskError as error:  # errors that LocalFleet does not count as a client's
                assert share is not None
                reason = describe(error.cause)
                yield from ((it, reason, None) for it in share.instructions)
            except RayError as error:
                if share is None:
                    self._give_up(slot, error)
                    continue
                was_alive = not slot.is_doubtful
                slot.begin_again()
                for other in self._slots if was_alive else ():  # once for those that die together
                    other.is_doubtful |= not other.waits
                what = "a worker process died: another starts"
                if share.again and was_alive:
                    log.warning("%s", what)
                    yield share.instructions[0], DIED, None
                else:
                    log.warning("%s, %d clients repeat their visit", what, len(share.instructions))
                    left.extend(share.apart())
            else:
                slot.is_doubtful = False
                employ()  # the caller validates the readings meanwhile
                if share is not None:
                    states = after or [None] * len(readings)
                    yield from zip(share.instructions, readings, states, strict=True)
        for slot in self._slots:
            if slot.share is not None:
                left.append(slot.share)
                slot.begin_again()
        yield from ((it, LATE, None) for share in left for it in share.instructions)

    def _deal(self, pairs: Sequence[tuple[TrainInstruction, Any]], most: int) -> Iterator[Share]:
        """Shares of about equal work, the largest clients first."""
        pairs = sorted(pairs, key=lambda pair: -self.task.num_examples(pair[0].client))
        wanted = len(self._slots) * (1 if self.vectorize else SHARES)
        number = max(min(wanted, len(pairs)), math.ceil(len(pairs) / most))
        for k in range(number):
            instructions, states = zip(*pairs[k::number], strict=True)
            yield Share(instructions, states)

    def _give_up(self, slot: Slot, error: RayError) -> None:
        """Continue without a worker that cannot be restarted."""
        reason = last_line(str(error))
        self._slots.remove(slot)
        if not self._slots:
            raise FederationError(f"no worker process is left: {reason}")
        log.warning("a worker did not start again: %s; %d left", reason, len(self._slots))


def sent(task: Task) -> Any:
    """Ray's object of a task. Raises ValueError, in one line, if it cannot be sent."""
    try:
        return put(task)
    except (OSError, RayError):  # no room
        raise
    except Exception as error:  # what the user's objects raise
        raise ValueError(
            "workers: expected clients, test samples, model and loss that can be sent to other "
            f"processes, got {clean(str(error.__cause__ or error))}; set workers=0"
        ) from None


@contextmanager
def workers_fleet(
    task: Task,
    load: Callable[[], Task] | None,
    *,
    workers: int,
    address: str,
    threads: int,
    gpus: float,
    vectorize: bool = False,
    on_client: Callable[[int], None] | None = None,
) -> Iterator[WorkersFleet]:
    """A block with ``workers`` workers, which end with it; their resources: `ray_for`.

    load: makes a worker's task; None: it is sent this one.
    """
    with ray_for(workers, address, threads, gpus) as resources:
        get: Callable[[], Any] = load or partial(ray.get, sent(task))
        start = partial(ray.remote(Worker).options(**resources).remote, get, threads, vectorize)
        fleet = WorkersFleet(task, start, workers, vectorize, on_client)
        try:
            yield fleet
        finally:
            fleet.close()


_now = time.monotonic
