"""Where client states lie: as asked, or where they fit; the run is the same."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedaccord import simulate
from fedaccord.config import RunConfig
from fedaccord.core.vectors import leaves
from fedaccord.engine import store_choice
from fedaccord.engine.store_choice import choose, make_store, state_bytes
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.storage.in_process import FileStore, InProcessStore, PageStore
from fedaccord.task import TaskConfig, load_task

GB = 10**9


def strategy(**keys: Any) -> FederatedStrategy:
    values = {key.replace("_", "-"): value for key, value in keys.items()}
    return RunConfig.make({"algo": "feddyn", "fraction-train": 1e-3} | values).strategy


@pytest.mark.parametrize(
    ("keys", "clients", "rounds", "visits"),
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
    keys: dict[str, Any], clients: int, rounds: int, visits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_choice, "free_memory", lambda: 1.0)
    method = strategy(**keys)
    choice = choose("auto", method, clients, rounds, method.cost.client * 4000)
    states = visits if method.cost.client else 0
    assert choice.size == 2 * states * 4000
    assert choice.on_disk == (states > 0)


@pytest.mark.parametrize(
    ("algo", "keys", "numbers"),
    [
        ("feddyn", {}, 650),
        ("fedavg", {}, 0),
        ("fedavg", {"local_parameters": "*bias"}, 10),
        ("feddyn", {"local_parameters": "*bias"}, 640 + 10),
        ("feddyn", {"local_parameters": "*weight"}, 10 + 640),
    ],
)
def test_a_state_has_the_parameters_of_the_clients_own(
    algo: str, keys: dict[str, Any], numbers: int
) -> None:
    method, task = strategy(algo=algo, **keys), load_task(TaskConfig(model="linear"), num_clients=2)
    assert state_bytes(method, task.model(method.model_settings)) == 4 * numbers
    stored = simulate(algo, num_clients=4, model="linear", rounds=1, participation=1.0, **keys)
    sizes = {sum(v.nbytes for _, v in leaves(state)) for state in stored.clients}
    assert sizes == {4 * numbers}


@pytest.mark.parametrize(("free", "on_disk"), [(0.4, True), (0.49, False)])
def test_files_are_taken_where_states_take_more_than_half_of_what_is_free(
    free: float, on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_choice, "free_memory", lambda: free * GB)
    choice = choose("auto", strategy(), 1_000_000, 30, 4000)  # 0.24 GB
    assert choice.on_disk == on_disk
    where = "on disk" if on_disk else "in memory"
    line = f"client states {where}: up to 0.2 GB of 30,000 clients, {free:.1f} GB of memory free"
    assert str(choice) == line


@pytest.mark.parametrize(
    ("place", "line"),
    [("memory", "client states in memory: as set"), ("disk", "client states on disk: as set")],
)
def test_what_is_asked_is_done(place: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_choice, "free_memory", lambda: 1.0)
    choice = choose(place, strategy(), 1_000_000, 30, 4000)
    assert (choice.on_disk, str(choice)) == (place == "disk", line)


def test_given_cohorts_may_visit_every_client(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_choice, "free_memory", lambda: 1.0)
    keys = {"dataset": "digits", "model": "linear", "num_clients": 20, "local_steps": 1}
    simulate("feddyn", participation=[[0]], rounds=1, **keys)
    simulate("feddyn", participation=0.05, rounds=1, **keys)
    counted = [record.message.split(" clients, ")[0].split()[-1] for record in caplog.records]
    assert counted == ["20", "1"]


def test_only_a_choice_of_files_that_nobody_asked_for_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task(RunConfig.make({}).task, num_clients=20)
    assert isinstance(make_store("disk", strategy(), task, 30, None), FileStore)
    assert type(make_store("auto", strategy(), task, 30, None)) is PageStore
    monkeypatch.setattr(store_choice, "free_memory", lambda: 1.0)
    assert isinstance(make_store("auto", strategy(), task, 30, None), FileStore)
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
            vectors, expected = dict(leaves(a)), dict(leaves(b))
            assert vectors.keys() == expected.keys()
            assert all(torch.equal(v, expected[name]) for name, v in vectors.items())


def test_states_that_come_from_a_gpu_are_not_copied() -> None:
    """They have no values yet when they are stored."""
    for device, kind in (("cpu", PageStore), ("cuda", InProcessStore)):
        config = RunConfig.make({"algo": "scaffold", "num-clients": 4})
        task: Any = SimpleNamespace(
            clients=range(4), device=device, model=lambda _: SimpleNamespace(w=torch.zeros(3))
        )
        assert type(make_store("memory", config.strategy, task, 1, None)) is kind
