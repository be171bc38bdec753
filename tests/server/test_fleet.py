"""Clients behind a grid: how often it is asked for replies."""

from types import SimpleNamespace
from typing import Any

from flwr.superlink.grid import InMemoryGrid

from fedaccord.federation.fleet import MessageFleet
from tests.server.net import Net


def test_flowers_simulation_is_asked_more_often_than_it_would_be() -> None:
    no_state: Any = SimpleNamespace(state=lambda: None)
    grid = InMemoryGrid(no_state)
    before = grid.pull_interval
    MessageFleet(grid)
    assert grid.pull_interval <= before / 10
    other = Net()
    MessageFleet(other)
    assert not hasattr(other, "pull_interval")
