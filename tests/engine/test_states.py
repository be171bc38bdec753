"""Where client states lie: as asked, or where they fit; the run is the same."""

import gc
import logging
import mmap
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fedaccord import simulate
from fedaccord.config import RunConfig
from fedaccord.core.vectors import leaves
from fedaccord.engine import states
from fedaccord.engine.states import InMemory, choose, memories
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.storage.shards import Shards
from fedaccord.storage.store import Memory, Version
from fedaccord.task import load_task

GB = 10**9


def strategy(**keys: Any) -> FederatedStrategy:
    values = {key.replace("_", "-"): value for key, value in keys.items()}
    return RunConfig.make({"algo": "feddyn", "fraction-train": 1e-3} | values).strategy


@pytest.mark.parametrize(
    ("keys", "clients", "rounds", "visited"),
    [
        ({}, 1_000_000, 30, 30_000),  # 1,000 a round
        ({}, 1_000_000, 2000, 1_000_000),
        ({"sampling": "bernoulli"}, 5000, 1, 5000),
        ({"algo": "dpsgd"}, 5000, 1, 5000),  # all train in every round
        ({"algo": "fedavg"}, 5000, 1, 0),  # nothing is kept
        ({"algo": "fedpd", "fraction_train": 1.0}, 70, 1, 3 * 70),  # three vectors
    ],
)
def test_states_are_weighed_by_the_clients_that_are_visited(
    keys: dict[str, Any], clients: int, rounds: int, visited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "free_memory", lambda: 1.0)
    choice = choose("auto", strategy(**keys), clients, rounds, 4000)
    kept = visited if strategy(**keys).cost.client else 0
    assert choice.size == 2 * kept * 4000
    assert choice.on_disk == (kept > 0)


@pytest.mark.parametrize(("free", "on_disk"), [(0.4, True), (0.49, False)])
def test_files_are_taken_where_states_take_more_than_half_of_what_is_free(
    free: float, on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "free_memory", lambda: free * GB)
    choice = choose("auto", strategy(), 1_000_000, 30, 4000)  # 0.24 GB
    assert choice.on_disk == on_disk
    where = "on disk" if on_disk else "in memory"
    line = f"client states {where}: up to 0.2 GB of 30,000 clients, {free:.1f} GB of memory free"
    assert str(choice) == line


@pytest.mark.parametrize(
    ("asked", "line"),
    [("memory", "client states in memory: as set"), ("disk", "client states on disk: as set")],
)
def test_what_is_asked_is_done(asked: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "free_memory", lambda: 1.0)
    choice = choose(asked, strategy(), 1_000_000, 30, 4000)
    assert (choice.on_disk, str(choice)) == (asked == "disk", line)


def test_only_a_choice_of_files_that_nobody_asked_for_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task(RunConfig.make({}).task, num_clients=20)
    assert isinstance(memories("disk", strategy(), task, 30, None), Shards)
    assert isinstance(memories("auto", strategy(), task, 30, None), InMemory)
    monkeypatch.setattr(states, "free_memory", lambda: 1.0)
    assert isinstance(memories("auto", strategy(), task, 30, None), Shards)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.INFO, logging.WARNING]


@pytest.mark.parametrize("algo", ["scaffold", "afedpd"])
def test_what_simulate_returns_lies_in_memory_and_is_the_same(algo: str) -> None:
    """The states of every round, also after later ones took their places."""
    torch.manual_seed(0)
    clients = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(5)]

    def run(where: str) -> Any:
        return simulate(
            algo,
            clients=clients,
            model=torch.nn.Linear(3, 1),
            loss=torch.nn.functional.mse_loss,
            rounds=8,
            participation=0.6,
            record="weights",
            faults=lambda t, i: {(2, 1): "lost-reply", (3, 4): "duplicate"}.get((t, i)),
            client_state=where,
            local_steps=2,
        )

    torch.manual_seed(1)
    memory = run("memory")
    torch.manual_seed(1)
    disk = run("disk")
    assert torch.equal(disk.weights, memory.weights)
    for of_disk, of_memory in zip(disk.states, memory.states, strict=True):
        for a, b in zip(of_disk, of_memory, strict=True):
            found, expected = dict(leaves(a)), dict(leaves(b))
            assert found.keys() == expected.keys()
            assert all(torch.equal(v, expected[name]) for name, v in found.items())


def test_large_vectors_in_memory_have_pages_of_their_own() -> None:
    class State(NamedTuple):
        large: Tensor
        small: Tensor

    given = State(torch.randn(2**18 + 1), torch.randn(3, dtype=torch.float64))
    kept = InMemory()
    kept[7] = Memory(Version(0, given), None, 5)
    first = kept[7].latest.state
    assert torch.equal(first.large, given.large)
    assert first.large.data_ptr() % mmap.PAGESIZE == 0
    assert first.large.data_ptr() != given.large.data_ptr()
    assert first.small is given.small
    kept[7] = Memory(Version(1, State(given.large + 1, given.small)), kept[7].latest)
    assert kept[7].before is not None
    before = kept[7].before.state
    assert before.large.data_ptr() == first.large.data_ptr()  # not copied again
    assert before.small is given.small
    assert torch.equal(kept[7].latest.state.large, given.large + 1)
    assert torch.equal(first.large, given.large)  # what was shown stays
    assert (len(kept), [*kept], kept[7].attempt) == (1, [7], 0)
    del kept[7]
    assert not kept
    assert torch.equal(first.large, given.large)


def test_no_tensor_of_a_large_vector_is_kept() -> None:
    """What a tensor itself takes in the heap would lie in the place of a freed vector."""

    class State(NamedTuple):
        large: Tensor

    kept, before = InMemory(), tensors_alive()
    for i in range(20):
        kept[i] = Memory(Version(0, State(torch.zeros(2**18))))
    assert tensors_alive() <= before + 2  # the form that all share, a view, and what it shows
    assert kept[3].latest.state.large.shape == (2**18,)


def tensors_alive() -> int:
    gc.collect()
    return sum(type(found) is Tensor for found in gc.get_objects())


def test_small_states_are_kept_as_they_are() -> None:
    class State(NamedTuple):
        small: Tensor

    kept, memory = InMemory(), Memory(Version(3, State(torch.zeros(5))))
    kept[0] = memory
    assert kept[0].latest is memory.latest


def test_states_that_come_from_a_gpu_are_not_copied() -> None:
    """They have no values yet when they are kept."""
    for device, kind in (("cpu", InMemory), ("cuda", dict)):
        config = RunConfig.make({"algo": "scaffold", "num-clients": 4})
        task: Any = SimpleNamespace(
            clients=range(4), device=device, model=lambda _: SimpleNamespace(w=torch.zeros(3))
        )
        assert type(memories("memory", config.strategy, task, 1, None)) is kind
