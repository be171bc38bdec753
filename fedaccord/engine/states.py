"""Where the states of clients in this process lie: in memory, or in files where they do not fit."""

import logging
from collections.abc import MutableMapping
from typing import NamedTuple

from fedaccord.client.shards import Shards
from fedaccord.client.store import Memory
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.memory import free_memory
from fedaccord.task import Task

log = logging.getLogger("flwr")

SHARE = 1 / 2  # of the free memory that states may take


class Choice(NamedTuple):
    on_disk: bool
    size: float  # bytes of all states at the end of the run
    why: str  # in one line

    def __str__(self) -> str:
        return self.why


def choose(
    asked: str, strategy: FederatedStrategy, num_clients: int, rounds: int, vector: int
) -> Choice:
    """memory and disk as asked; auto: disk where the states of the clients that so many rounds
    can visit do not fit into the free memory. vector: bytes of a vector of d."""
    visited = num_clients
    if strategy.sampling == "fixed" and not (strategy.topology.everyone or strategy.participation):
        visited = min(num_clients, rounds * strategy.cohort_size(num_clients))
    size = 2 * visited * strategy.cost.client * vector  # the last two versions
    if asked != "auto":
        return Choice(asked == "disk", size, f"client states {PLACES[asked == 'disk']}: as set")
    free = free_memory()
    on_disk = size > SHARE * free
    why = f"up to {size / 1e9:,.1f} GB of {visited:,} clients, {free / 1e9:,.1f} GB of memory free"
    return Choice(on_disk, size, f"client states {PLACES[on_disk]}: {why}")


PLACES = ("in memory", "on disk")


def memories(
    asked: str, strategy: FederatedStrategy, task: Task, rounds: int
) -> MutableMapping[int, Memory]:
    """Where the clients' memories will lie; files are made when the first state is kept."""
    vector = task.model(strategy.precision).w.nbytes
    choice = choose(asked, strategy, len(task.clients), rounds, vector)
    log.log(logging.WARNING if choice.on_disk and asked == "auto" else logging.INFO, "%s", choice)
    return Shards(lambda: strategy.scratch) if choice.on_disk else {}
