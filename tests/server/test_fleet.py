"""Clients behind a grid: how often it is asked for replies, and they who they are."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.superlink.grid import InMemoryGrid

from fedaccord.federation.fleet import MessageFleet
from fedaccord.federation.roster import ASK_AGAIN, Roster
from tests.server.net import Clock, Net


def test_flowers_simulation_is_asked_more_often_than_it_would_be() -> None:
    no_state: Any = SimpleNamespace(state=lambda: None)
    grid = InMemoryGrid(no_state)
    before = grid.pull_interval
    MessageFleet(grid)
    assert grid.pull_interval <= before / 10
    other = Net()
    MessageFleet(other)
    assert not hasattr(other, "pull_interval")


@pytest.mark.parametrize(("simulated", "asked"), [(True, 1), (False, 4)])
def test_a_simulation_is_asked_once(
    simulated: bool, asked: int, net: Net, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It handles two messages to a client at once: a late hello would put a used state back."""
    if simulated:
        net.pull_interval = 0.1  # type: ignore[attr-defined]
    monkeypatch.setattr("fedaccord.federation.fleet.Roster", partial(Roster, clock))
    net.join(10, 0, 1)
    net.late.add(10)
    clock.at(3.5 * ASK_AGAIN, net.late.clear)
    fleet = MessageFleet(net)
    fleet.connect(600)
    assert fleet.here() == [0]
    assert net.hellos == [10] * asked
