"""Nodes that bring data and no number: the server numbers them, and remembers it."""

import re
from functools import partial
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedaccord.federation.errors import FederationError
from fedaccord.federation.partition_ids import PartitionIds
from fedaccord.federation.roster import Roster
from tests.server.net import Clock, Net

KEYS = [912, 35, 401]  # node ids, of registered keys


def join(net: Net, node: int, **config: Any) -> None:
    config = config or {"data-dir": "/data/train.npz"}
    net.contexts[node] = Context(
        run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
    )


def roster_of(clock: Clock, of: dict[int, int] | None = None, num_clients: int = 3) -> Roster:
    return Roster(clock, PartitionIds(num_clients, of or {}))


@pytest.mark.parametrize("order", [KEYS, KEYS[::-1]])
def test_nodes_are_numbered_by_their_ids_whoever_answers_first(
    order: list[int], net: Net, clock: Clock
) -> None:
    roster = roster_of(clock)
    for k, node in enumerate(order):
        clock.at(10 * k, partial(join, net, node))
    roster.wait_for_all(net, 600)
    assert roster.nodes == {0: 35, 1: 401, 2: 912}
    assert roster.refused == {}


@pytest.mark.parametrize("key", ["data-dir", "data-path"])
def test_either_key_names_a_nodes_own_data(key: str, net: Net, clock: Clock) -> None:
    roster = roster_of(clock, num_clients=1)
    join(net, 7, **{key: "/data"})
    roster.wait_for_all(net, 600)
    assert roster.nodes == {0: 7}


def test_numbers_are_remembered_across_a_restart_of_the_server(net: Net, clock: Clock) -> None:
    saves: list[dict[int, int]] = []
    first = Roster(clock, PartitionIds(3, {}, lambda of: saves.append(dict(of))))
    for node in KEYS:
        join(net, node)
    first.wait_for_all(net, 600)
    assert saves == [{35: 0, 401: 1, 912: 2}]
    net.leave(35)
    join(net, 1)  # sorts first, but number 0 is that of node 35
    again = roster_of(clock, saves[0])
    again.update(net)
    assert again.nodes == {1: 401, 2: 912}
    assert again.refused[1].startswith("expected 3 clients, and every id is assigned")
    join(net, 35)
    again.wait_for_all(net, 600)
    assert again.nodes == {0: 35, 1: 401, 2: 912}


def test_a_number_waits_for_its_key_while_the_run_goes_on(net: Net, clock: Clock) -> None:
    roster = roster_of(clock)
    for node in KEYS:
        join(net, node)
    roster.wait_for_all(net, 600)
    net.leave(401)
    join(net, 402)
    for _ in range(3):
        roster.update(net)
    assert roster.nodes == {0: 35, 2: 912}
    assert "start it with its earlier key" in roster.refused[402]
    join(net, 401)
    roster.update(net)
    roster.update(net)
    assert roster.nodes == {0: 35, 1: 401, 2: 912}


def test_nodes_that_say_their_number_keep_it(net: Net, clock: Clock) -> None:
    roster = roster_of(clock, num_clients=20)  # what most nodes say goes before the run config
    net.join(5, 1, 3)
    net.join(6, 2, 3)
    join(net, 4, **{"data-dir": "/data", "num-partitions": 3})
    roster.wait_for_all(net, 600)
    assert roster.nodes == {0: 4, 1: 5, 2: 6}


def test_too_few_nodes_are_told_apart_from_none(net: Net, clock: Clock) -> None:
    roster = roster_of(clock, num_clients=20)
    join(net, 5)
    with pytest.raises(FederationError) as error:
        roster.wait_for_all(net, 60)
    assert "expected 20 clients within 60 s, got 0" in str(error.value)
    line = r"nodes without a partition-id: 1, fewer than are missing: .* with num-clients=1\."
    assert re.search(line, str(error.value))


def test_a_server_that_numbers_nobody_says_so(net: Net, clock: Clock) -> None:
    roster = Roster(clock)
    join(net, 5)
    with pytest.raises(FederationError, match="this server assigns no ids"):
        roster.wait_for_all(net, 60)


@pytest.mark.parametrize("number", [0, -3, 1.5, 10**9])
def test_a_wrong_number_of_clients_is_refused(number: Any, net: Net, clock: Clock) -> None:
    roster = roster_of(clock)
    for node in KEYS:
        join(net, node)
    join(net, 5, **{"data-dir": "/data", "num-partitions": number})
    roster.wait_for_all(net, 600)
    assert "num-partitions" in roster.refused[5]
    assert set(roster.nodes.values()) == set(KEYS)
