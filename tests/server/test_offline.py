"""Devices that are offline between rounds: the server waits for as many as a round needs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fedaccord.federation.errors import FederationError
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.roster import Roster
from fedaccord.federation.round import Round
from fedaccord.federation.run import Run
from fedaccord.plugins import DP
from tests.server.net import Clock, Net
from tests.server.runs import client_app, run_over, strategy

C = 3
WAIT = 100.0  # wait-timeout
BUFFERED = {"schedule": "buffered", "buffer_size": 1, "concurrency": 2}


@pytest.fixture
def devices(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    monkeypatch.setattr("fedaccord.federation.message_fleet.Roster", partial(Roster, clock))
    with Net(client_app()) as net:
        for i in range(C):
            net.join(10 + i, i, C)
        yield net


def run_of(net: Net, **more: Any) -> Run:
    run = run_over(net, strategy(wait_timeout=WAIT, **more), 4)
    run.begin()
    return run


def go_offline(net: Net, *nodes: int) -> None:
    for node in nodes:
        net.leave(node)


@pytest.mark.parametrize("more", [{}, BUFFERED])
def test_a_round_waits_until_a_device_is_back(
    more: dict[str, Any], devices: Net, clock: Clock, lines: list[str]
) -> None:
    run = run_of(devices, **more)
    run.train_round()
    run._state = run.state._replace(visits=())  # of which a reply may have arrived
    go_offline(devices, 10, 11, 12)
    began = clock.now
    clock.at(began + 30, lambda: devices.join(21, 1, C))
    round = run.train_round()
    assert 30 <= clock.now - began < 31
    assert [row["client"] for row in round.clients] == [1]
    assert run.state.failed == 0
    waits = [line for line in lines if "waiting for clients" in line]
    assert len(waits) == 1
    assert "expected at least 1 of 3 clients to be connected within 100 s, got 0" in waits[0]


@pytest.mark.parametrize(
    ("more", "least", "leave"),
    [
        ({}, 1, (10, 11, 12)),
        ({"min_replies": 2}, 2, (10, 12)),
        ({"min_replies": 2, **BUFFERED, "buffer_size": 2}, 2, (10, 12)),
    ],
)
def test_a_round_without_enough_devices_fails_after_the_wait(
    more: dict[str, Any], least: int, leave: tuple[int, ...], devices: Net, clock: Clock
) -> None:
    run = run_of(devices, **more)
    go_offline(devices, *leave)
    before, began = run.state, clock.now
    round = run.train_round()
    assert WAIT <= clock.now - began < WAIT + 1
    assert round.failure.startswith(
        f"expected at least {least} of 3 clients to be connected within 100 s, got {C - len(leave)}"
    )
    assert run.state.failed == 1
    assert torch.equal(run.state.w, before.w)
    assert round.metrics.items() >= {"replies": 0, "dropped": 0, "counted": 0}.items()


def test_a_refused_device_does_not_end_the_wait_for_others(devices: Net, clock: Clock) -> None:
    run = run_of(devices)
    run.train_round()
    go_offline(devices, 10, 11, 12)
    began = clock.now
    clock.at(began + 1, lambda: devices.join(30, 0, C + 1))  # of another federation
    clock.at(began + 30, lambda: devices.join(21, 1, C))
    assert [row["client"] for row in run.train_round().clients] == [1]
    assert 30 <= clock.now - began < 31


def test_the_error_of_a_run_without_devices_names_them(devices: Net, clock: Clock) -> None:
    def leave(round: Round) -> None:
        if round.number == 1:
            go_offline(devices, 10, 11, 12)

    method = strategy(wait_timeout=WAIT, max_failed_rounds=2)
    with pytest.raises(FederationError) as error:
        run_over(devices, method, 9, on_round=leave).play()
    assert str(error.value) == (
        "2 rounds in a row failed (see above), the last one: expected at least 1 of 3 clients to "
        "be connected within 100 s, got 0; missing partition-ids: [0, 1, 2]. Start their "
        "SuperNodes or give them more time with wait-timeout or raise max-failed-rounds"
    )
    assert clock.now >= 2 * WAIT


@pytest.mark.parametrize(("leave", "resumes"), [((12,), True), ((11, 12), False)])
def test_a_run_resumes_with_the_devices_that_a_round_needs(
    leave: tuple[int, ...], resumes: bool, devices: Net, clock: Clock, warnings: list[str]
) -> None:
    """After it has waited for the others, which may be broken for good."""
    first = run_of(devices, min_replies=2)
    first.train_round()
    go_offline(devices, *leave)
    again, began = run_over(devices, strategy(wait_timeout=WAIT, min_replies=2), 4), clock.now
    if not resumes:
        with pytest.raises(FederationError, match="expected 3 clients within 100 s, got 1"):
            again.begin(first.state)
        return
    again.begin(first.state)
    assert WAIT <= clock.now - began < WAIT + 1
    (line,) = [line for line in warnings if "resumes without" in line]
    assert "missing partition-ids: [2]" in line
    assert [row["client"] for row in again.train_round().clients] == [0, 1]


def test_a_server_without_data_waits_once(devices: Net, clock: Clock, warnings: list[str]) -> None:
    """It connects for the shape of a sample, and again when the run begins."""
    fleet, began = MessageFleet(devices), clock.now
    go_offline(devices, 12)
    for least in (1, 2):
        fleet.connect(WAIT, least=least)
    assert WAIT <= clock.now - began < WAIT + 1
    assert len([line for line in warnings if "resumes without" in line]) == 1


def test_a_visit_in_progress_counts_as_a_connected_device(devices: Net, clock: Clock) -> None:
    """Its reply may have arrived before its device went offline."""
    run = run_of(devices, **BUFFERED)
    devices.late |= {10, 11, 12}
    clock.at(1.0, devices.late.clear)
    run.train_round()
    (visit,) = run.state.visits
    go_offline(devices, 10, 11, 12)
    began = clock.now
    round = run.train_round()
    assert clock.now == began
    assert [row["client"] for row in round.clients] == [visit.client]


@pytest.mark.parametrize("back", [True, False])
def test_noise_is_drawn_and_counted_only_for_a_round_with_a_connected_device(
    back: bool, devices: Net, clock: Clock
) -> None:
    run = run_of(devices, sampling="bernoulli", plugins=[DP(noise_multiplier=1.0)])
    go_offline(devices, 10, 11, 12)
    before, began = run.state.w, clock.now
    if back:
        clock.at(began + 30, lambda: devices.join(21, 1, C))
    round = run.train_round()
    assert (clock.now - began) // 10 * 10 == (30 if back else WAIT)
    assert (round.metrics["replies"], run.state.failed) == ((1, 0) if back else (0, 1))
    assert torch.equal(run.state.w, before) != back
    assert run.state.privacy
    assert run.state.privacy.releases == back


def test_an_interrupt_ends_the_wait(
    devices: Net, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    run = run_of(devices)
    go_offline(devices, 10, 11, 12)
    clock.at(clock.now + 5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.train_round()
    assert run.state.t == 0
