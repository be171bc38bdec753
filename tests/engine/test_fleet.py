"""Clients in this process: what a checkpoint keeps of them."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedaccord import recorded_run, simulate
from fedaccord.client.train import Data
from fedaccord.config import RunConfig
from fedaccord.core.request import StateLost
from fedaccord.engine import fleet as module
from fedaccord.engine.faults import FaultyFleet
from fedaccord.engine.fleet import InProcessFleet, LocalFleet
from fedaccord.federation.fleet import LATE
from fedaccord.federation.run import Run
from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.storage.store import Memory, Version
from fedaccord.task import load_task


def fleet(num_clients: int) -> LocalFleet:
    task: Any = SimpleNamespace(clients=range(num_clients))
    return LocalFleet(task)


def test_the_states_that_the_server_accepted_are_kept_for_a_checkpoint() -> None:
    """Client 0's last reply was lost; of client 2 none was accepted; client 3 was never asked."""
    whole = fleet(4)
    whole.store.save(1, Memory(Version(3, "b after 3"), Version(1, "b after 1")))
    whole.store.save(0, Memory(Version(3, "a after 3"), Version(1, "a after 1")))
    whole.store.save(2, Memory(Version(3, "c after 3")))
    states = whole.client_states([1, 3, -1, -1])
    assert states == {0: (1, "a after 1"), 1: (3, "b after 3")}
    again = fleet(4)
    again.restore(states.items())
    own = again.store
    assert [own.state(i, 1) for i in range(4)] == ["a after 1", None, None, None]
    assert own.state(1, 3) == "b after 3"
    assert again.client_states([1, 3, -1, -1]) == states


def test_answers_go_where_the_servers_vectors_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is sent down, as local training has it after a first visit."""
    homes: list[Any] = []
    nothing: Any = None
    monkeypatch.setattr(module, "local_round", lambda *words: homes.append(words[2].home))
    monkeypatch.setattr(module, "training_data", lambda *_: Data(nothing, [], nothing))
    task: Any = SimpleNamespace(clients=range(2))
    request: Any = SimpleNamespace(instruction=None)
    for own in (LocalFleet(task), LocalFleet(task, home="cuda:1")):
        own._round(request, None)
        assert own.home == homes[-1]
    assert [*map(str, homes)] == ["cpu", "cuda:1"]


@pytest.mark.parametrize(("timeout", "seconds", "replies"), [(2.5, 1, 2), (3600.0, 9999, 4)])
def test_who_has_not_begun_by_the_deadline_is_late(
    timeout: float, seconds: int, replies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that advances at every look: a round has time for two clients; by default the
    machine's speed decides nothing."""
    ticks = itertools.count(step=seconds)
    clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: next(ticks)})
    monkeypatch.setattr(module, "time", clock)
    history = simulate(
        "scaffold",
        rounds=2,
        num_clients=4,
        model="linear",
        local_steps=1,
        vectorize="off",
        fraction_train=1.0,
        round_timeout=timeout,
    )
    assert [*history.metrics["replies"][1:]] == [replies] * 2
    assert [state is None for state in history.clients] == [i >= replies for i in range(4)]


SMALL: dict[str, Any] = {
    **{"num-clients": 4, "num-server-rounds": 2, "model": "linear", "local-epochs": 1},
    **{"threads": 1, "algo": "scaffold", "fraction-train": 1.0},
}


def run_over(fleet_of: Any = LocalFleet, **settings: Any) -> Run:
    """A run without a simulated clock, before its first round."""
    config = RunConfig.make(SMALL | settings)
    task, method = load_task(config.task, num_clients=4), config.strategy
    initial = recorded_run.initial_arrays(task, method.model_settings)
    run = Run(method, fleet_of(task), initial, 3)
    run.begin()
    return run


def test_requests_are_executed_in_their_order_when_their_replies_are_received() -> None:
    """A request that is sent again is the last, one of no counted client is dropped, and one
    without a reply is not among the wanted ones."""
    trained: list[int] = []

    def fleet_of(task: Any) -> InProcessFleet:
        return FaultyFleet(
            LocalFleet(task, trained.append), lambda _, i: "lost-reply" if i == 3 else None
        )

    run = run_over(fleet_of)
    fleet, requests = run.session.fleet, run.session.requests(run.state, range(4))
    fleet.send(requests, 9.0)
    fleet.send(requests[:1], 9.0)
    assert trained == []
    without_state = requests[2].instruction._replace(accepted=1)
    fleet.send([requests[2]._replace(instruction=without_state)], 9.0)
    received = fleet.receive([1, 3, 0, 2], 2)
    assert [*received] == trained == [1, 3, 0]
    assert received[3] == LATE
    assert fleet.receive([2], 2) == {2: StateLost(1)}
    assert trained == [1, 3, 0, 2]  # a visit without a state counts in the progress, too
    fleet.send(requests, 9.0)
    assert [*fleet.receive([1], 9)] == [1]
    assert fleet.receive(range(4), 9) == {}


def test_a_buffer_of_all_clients_is_a_synchronous_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `send` and `receive` as by `train`, bit for bit; smaller ones have the oldest requests."""
    monkeypatch.setattr("fedaccord.federation.run.check_real_time", lambda *_: None)
    buffered = {"schedule": "buffered", "concurrency": 4}
    whole, other = run_over(), run_over(**buffered, **{"buffer-size": 4})
    for _ in range(3):
        whole.train_round()
        other.train_round()
    assert whole.state.w.equal(other.state.w)
    assert whole.state.server.c.equal(other.state.server.c)
    some = run_over(**buffered, **{"buffer-size": 3})
    rounds = [some.train_round() for _ in range(3)]
    cohorts = [sorted(row["client"] for row in round.clients) for round in rounds]
    assert cohorts == [[0, 1, 2], [0, 1, 3], [0, 1, 2]]
    assert rounds[1].metrics["staleness"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_server_without_data_builds_the_model_of_clients_in_process(
    is_faulty: bool, tmp_path: Path
) -> None:
    config = RunConfig.make(SMALL | {"evaluation": "clients", "out-dir": str(tmp_path)})
    fleet = LocalFleet(load_task(config.task, num_clients=4))
    own = FaultyFleet(fleet, lambda *_: None) if is_faulty else fleet
    path = recorded_run.run(lambda _: own, config, None).path
    assert (path / "model.safetensors").exists()
    assert Checkpoints(path / "checkpoint").load().facts["clients"] == own.place == "in process"
