"""Whether clients take their local steps one at a time or many in one call: measured on a trial."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedaccord import server_app
from fedaccord.client.cohort import local_rounds
from fedaccord.client.data import training_data
from fedaccord.client.train import local_round
from fedaccord.core import rounds
from fedaccord.core.visit import Visit
from fedaccord.engine.fleet import BYTES, MOST, LocalFleet
from fedaccord.federation.session import Session
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.task import Task

CLIENTS, TRIALS = 4, 3  # of the trial of one at a time; the best of so many counts
SLOW = 0.02  # seconds a step: a model whose steps alone fill a core gains nothing
STEPS, SECONDS = 10, 0.06  # of a client in the trial, where it takes so many; but no longer


class Choice(NamedTuple):
    vectorize: bool
    why: str  # in one line

    def __str__(self) -> str:
        return self.why


def choose(asked: str, task: Task, strategy: FederatedStrategy) -> Choice:
    """on and off as asked; auto: the faster of both, on visits whose outcome is forgotten."""
    if asked != "auto":
        how = "many clients in one call" if asked == "on" else "one client at a time"
        return Choice(asked == "on", f"{how}: as set")
    num_clients = len(task.clients)
    size = min(strategy.cohort_size(num_clients), MOST)
    visits = _visits(task, strategy, size)
    together = max(1, min(size, BYTES // task.model(strategy.precision).w.nbytes))
    if together < 2:
        return Choice(False, "one client at a time: the model fills the caches")
    clock = time.process_time if task.model(strategy.precision).w.is_cpu else time.perf_counter

    def trial(steps: int) -> float:
        few = _of(steps, visits[:CLIENTS])
        return _seconds(lambda: _one_by_one(task, few), clock) / len(few)

    try:
        step = trial(1)
        if step > SLOW:
            return Choice(False, "one client at a time: a step of the model is work enough")
        asked_for = visits[0].instruction
        most = asked_for.steps(task.num_examples(asked_for.client))
        steps = max(1, min(most, STEPS, int(SECONDS / max(step, 1e-9))))
        alone = trial(steps)
    except Exception:  # told in the first round, of the client that it concerns
        return Choice(False, "one client at a time: a trial failed")
    part, states = _of(steps, visits[:together]), [None] * together
    try:
        both = _seconds(lambda: local_rounds(part, states, task), clock) / len(part)
    except Exception:
        return Choice(False, "one client at a time: the model takes no stack of clients")
    if both < alone:
        gain = f"{alone / both:.1f} times faster in a trial"
        return Choice(True, f"{together} clients in one call: {gain}")
    return Choice(False, f"one client at a time: {both / alone:.1f} times faster in a trial")


def _visits(task: Task, strategy: FederatedStrategy, size: int) -> list[Visit]:
    """First visits of the largest clients."""
    initial = server_app.initial_arrays(task, strategy.precision)
    session = Session(strategy, initial, LocalFleet(task))
    s = rounds.first_state(strategy, session.vector(initial), len(task.clients))
    largest = task.clients.largest(size)
    return [*session.visits(strategy, s, largest)]


def _of(steps: int, visits: Sequence[Visit]) -> list[Visit]:
    """The visits, but of so many steps."""
    return [
        visit._replace(instruction=visit.instruction._replace(local_steps=steps, local_epochs=1))
        for visit in visits
    ]


def _one_by_one(task: Task, visits: Sequence[Visit]) -> None:
    for visit in visits:
        local_round(visit, None, training_data(task, visit.instruction))


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """The best of some trials; on a CPU seconds of this process, as others' work does not count."""
    work()  # what is loaded and allocated once
    best = float("inf")
    for _ in range(TRIALS):
        began = clock()
        work()
        best = min(best, clock() - began)
    return best
