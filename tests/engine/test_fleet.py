"""Clients in this process: what a checkpoint keeps of them."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from fedaccord import simulate
from fedaccord.client.train import Data
from fedaccord.engine import fleet as module
from fedaccord.engine.fleet import LocalFleet
from fedaccord.storage.store import Memory, Version


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
