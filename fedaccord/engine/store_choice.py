"""Storage of the states of clients in this process: memory, or files if they do not fit."""

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from fedaccord.federation.method import Method
from fedaccord.process.allocator import free_memory
from fedaccord.storage.in_process import FileStore, InProcessStore, PageStore
from fedaccord.task import Task
from fedaccord.task.flat_model import FlatModel

log = logging.getLogger("flwr")

FREE_MEMORY_SHARE = 1 / 2  # share of the free memory that states may use
PLACES = ("in memory", "on disk")


class StorageChoice(NamedTuple):
    on_disk: bool
    size: float  # bytes of all states at the end
    why: str  # in one line

    def __str__(self) -> str:
        return self.why


def state_bytes(method: Method, model: FlatModel) -> float:
    """Bytes of a client's state, with the parameters and buffers that stay at the client."""
    local = model.initial_local.nbytes if method.client_half().keeps_local else 0
    return method.cost.client * model.w.nbytes + local


def choose(
    setting: str, method: Method, num_clients: int, rounds: int, state: float, drawn: bool = True
) -> StorageChoice:
    """memory or disk as set; auto: disk if the states of the clients that the rounds can visit
    need more than `FREE_MEMORY_SHARE` of the free memory. state: bytes of a client's, as of
    `state_bytes`; drawn: cohorts are drawn, not given."""
    visited = num_clients
    if drawn and method.sampling == "fixed" and not method.topology.is_decentralised:
        visited = min(num_clients, rounds * method.cohort_size(num_clients))
    size = 2 * visited * state  # the last two versions
    if setting != "auto":
        return StorageChoice(
            setting == "disk", size, f"client states {PLACES[setting == 'disk']}: as set"
        )
    free = free_memory()
    on_disk = size > FREE_MEMORY_SHARE * free
    why = f"up to {size / 1e9:,.1f} GB of {visited:,} clients, {free / 1e9:,.1f} GB of memory free"
    return StorageChoice(on_disk, size, f"client states {PLACES[on_disk]}: {why}")


def make_store(
    setting: str, method: Method, task: Task, rounds: int, folder: Path | None, drawn: bool = True
) -> InProcessStore:
    """The store of the clients' states; folder: of files, which are made when the first state is
    stored; None: the system's temporary one."""
    state = state_bytes(method, task.model(method.model_settings))
    choice = choose(setting, method, len(task.clients), rounds, state, drawn)
    log.log(logging.WARNING if choice.on_disk and setting == "auto" else logging.INFO, "%s", choice)
    if choice.on_disk:
        return FileStore(folder)
    # vectors from a GPU are in pinned memory, and their copy may not be complete
    return InProcessStore() if torch.device(task.device).type == "cuda" else PageStore()
