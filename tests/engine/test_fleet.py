"""Clients in this process: what a checkpoint keeps of them."""

from types import SimpleNamespace
from typing import Any

from fedaccord.client.store import Memory, Version
from fedaccord.engine.fleet import LocalFleet


def fleet(num_clients: int) -> LocalFleet:
    task: Any = SimpleNamespace(clients=range(num_clients))
    return LocalFleet(task)


def test_the_states_that_the_server_accepted_are_kept_for_a_checkpoint() -> None:
    """Client 0's last reply was lost; of client 2 none was accepted; client 3 was never asked."""
    whole = fleet(4)
    whole.memories = {
        1: Memory(Version(3, "b after 3"), Version(1, "b after 1")),
        0: Memory(Version(3, "a after 3"), Version(1, "a after 1")),
        2: Memory(Version(3, "c after 3")),
    }
    kept = whole.kept([1, 3, -1, -1])
    assert kept == {0: (1, "a after 1"), 1: (3, "b after 3")}
    again = fleet(4)
    again.restore(kept.items())
    assert [again.state(i, 1) for i in range(4)] == ["a after 1", None, None, None]
    assert again.state(1, 3) == "b after 3"
    assert again.kept([1, 3, -1, -1]) == kept
