"""Clients behind a grid: how often it is asked for replies, and they who they are."""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import httpx
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedaccord.core import rounds
from fedaccord.engine import quiet
from fedaccord.federation.errors import FederationError
from fedaccord.federation.fleet import LATE
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.polls import Polls
from fedaccord.federation.roster import ASK_AGAIN, Roster
from fedaccord.federation.round import Round
from fedaccord.storage.mapped import in_file
from fedaccord.strategies import FedDeper, Scaffold
from fedaccord.wire.instruction import is_handshake
from tests.grid import InProcessGrid
from tests.server.net import Clock, Net
from tests.server.runs import INITIAL, W0, client_app, run_over, strategy


@pytest.mark.parametrize(
    ("simulated", "timeout", "pauses"),
    [
        (True, 0.055, [0.01] * 5 + [0.005]),
        (False, 0.9, [0.05] * 10 + [0.05, 0.055, 0.0605, 0.06655, 0.073205, 0.0805255]),
    ],
)
def test_pauses_between_polls_grow_with_the_time_since_the_messages_were_sent(
    simulated: bool, timeout: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, polls = Clock(), []
    sleeps: list[float] = []
    monkeypatch.setattr(
        "fedaccord.federation.message_fleet.time",
        SimpleNamespace(
            monotonic=clock, sleep=lambda seconds: (sleeps.append(seconds), clock.sleep(seconds))
        ),
    )
    with Net() as net:
        if simulated:
            net.pull_interval = 0.1  # type: ignore[attr-defined]
        net.join(10)
        monkeypatch.setattr(net, "pull_messages", lambda ids: polls.append(sorted(ids)) or [])
        assert not [*MessageFleet(net)._receive({"b": 10, "a": 10}, timeout)]
    assert sleeps[: len(pauses)] == pytest.approx(pauses)
    assert sum(sleeps) == pytest.approx(timeout)
    assert polls == [["a", "b"]] * (len(sleeps) + 1)


@pytest.mark.parametrize("schedule", ["synchronous", "buffered"])
def test_a_reply_that_came_during_the_last_poll_is_not_late(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching other replies may take longer than the rest of the time."""
    clock, timeout = Clock(), 60.0
    time = SimpleNamespace(monotonic=clock, sleep=clock.sleep)
    monkeypatch.setattr("fedaccord.federation.message_fleet.time", time)

    class Slow(Net):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = [*super().pull_messages(message_ids)]
            if self.late:
                clock.sleep(2 * timeout)
                self.late.clear()
            return replies

    with Slow(client_app()) as net, quiet():
        for i in range(6):
            net.join(10 + i, i, 6)
        own = {"schedule": schedule, **({"buffer_size": 6} if schedule == "buffered" else {})}
        run = run_over(net, strategy(**own), 1, timeout=timeout)
        run.begin()
        net.late.add(12)
        assert {row["status"] for row in run.train_round().clients} == {"ok"}


@pytest.mark.parametrize("schedule", ["synchronous", "buffered"])
def test_a_late_reply_does_not_stay_at_the_superlink(schedule: str) -> None:
    """Client 2's reply arrives in round 2, which waits for client 3."""
    own = {"schedule": schedule, **({"buffer_size": 6} if schedule == "buffered" else {})}
    with Net(client_app()) as net, quiet():
        for i in range(6):
            net.join(10 + i, i, 6)
        run = run_over(net, strategy(Scaffold, **own), 2, timeout=0.3)
        run.begin()
        for late in (12, 13):
            net.late = {late}
            rows = run.train_round().clients
            assert [row["client"] for row in rows if row["status"] == LATE] == [late - 10]
            assert [net._node_of[i] for i in net._replies] == [late]


@pytest.mark.parametrize("is_online", [True, False])
def test_a_reply_to_a_visit_that_a_reset_ended_does_not_stay_at_the_superlink(
    is_online: bool,
) -> None:
    """Client 2 has a new request at once, unless it is offline."""
    with Net(client_app()) as net, quiet():
        for i in range(6):
            net.join(10 + i, i, 6)
        run = run_over(net, strategy(Scaffold, schedule="buffered", buffer_size=3), 2)
        run.begin()
        net.late = {12}
        run.train_round()
        net.late = set()
        if not is_online:
            net.leave(12)
        run._state = run.state._replace(visits=())
        run.train_round()
        assert not net._replies


@pytest.mark.parametrize(("timeout", "ttl"), [(7.0, 37.0), (90_000.0, 90_030.0)])
def test_a_message_lives_as_long_as_its_reply_is_awaited(timeout: float, ttl: float) -> None:
    """Not Flower's twelve hours: a device that was away would work off all of them."""
    ttls: list[float] = []
    inner, app = client_app(), ClientApp()

    @app.train()
    def look(message: Message, context: Context) -> Message:
        if not is_handshake(message):
            ttls.append(message.metadata.ttl)
        return inner(message, context)

    with InProcessGrid(app, 3) as grid, quiet():
        strategy(round_timeout=timeout).start(grid, INITIAL, 1)
    assert ttls == [ttl] * 3


def test_a_message_that_flower_refuses_has_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower returns an empty one, for a node that has just left."""
    with Net() as net:
        monkeypatch.setattr(net, "push_messages", lambda messages: ["a", "", "b"])
        assert Polls(net, simulated=False).push([None] * 3, 1.0) == ["a", None, "b"]  # type: ignore[list-item]


def test_nobody_waits_three_seconds_for_a_reply_or_for_ever() -> None:
    with Net() as net:
        fleet = MessageFleet(net)
        assert [fleet._polls.pause(waited) for waited in (0.0, 0.4, 10.0, 1e6)] == [
            0.05,
            0.05,
            1.0,
            2.0,
        ]
        assert not [*fleet._receive({}, 1e9)]


@pytest.mark.parametrize(("simulated", "hellos"), [(True, 1), (False, 3)])
def test_a_simulation_is_asked_once(
    simulated: bool,
    hellos: int,
    net: Net,
    clock: Clock,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It handles two messages to a client at once: a late hello would put a used state back."""
    if simulated:
        net.pull_interval = 0.1  # type: ignore[attr-defined]
    monkeypatch.setattr("fedaccord.federation.message_fleet.Roster", partial(Roster, clock))
    net.join(10, 0, 1)
    net.late.add(10)
    clock.at(3.5 * ASK_AGAIN, net.late.clear)
    fleet = MessageFleet(net)
    fleet.connect(600)
    assert fleet.available() == [0]
    assert net.hellos == [10] * hellos
    assert any("Free memory (Ray starts" in line for line in lines) == simulated


@pytest.mark.parametrize("simulated", [True, False])
def test_more_simulated_clients_are_suggested_in_a_simulation_alone(
    simulated: bool, net: Net, lines: list[str]
) -> None:
    """Two devices of a real deployment are not Flower's default number of simulated clients."""
    if simulated:
        net.pull_interval = 0.1  # type: ignore[attr-defined]
    for i in range(2):
        net.join(10 + i, i, 2)
    fleet = MessageFleet(net)
    fleet.connect(5.0)
    assert fleet.place == ("simulated by Flower" if simulated else "devices")  # in run directories
    assert any("for more simulated clients" in line for line in lines) == simulated


@pytest.mark.parametrize("simulated", [True, False])
def test_a_simulation_names_the_cluster_that_nobody_answers_for(
    simulated: bool, net: Net, warnings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray, which Flower starts beside this, waits for it without a word."""
    if simulated:
        net.pull_interval = 0.1  # type: ignore[attr-defined]
    net.join(10, 0, 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text(address)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    MessageFleet(net).connect(5.0)
    line = f"no cluster answers at {address}, and a simulation would wait for it for minutes; "
    line += f"rm {file}"
    assert [line in warning for warning in warnings] == [True] * simulated
    file.unlink()
    MessageFleet(net).connect(5.0)
    assert len(warnings) == simulated


@pytest.mark.parametrize(("simulated", "requests"), [(True, [2, 3, 3]), (False, [4, 4, 4])])
def test_a_simulations_client_is_at_one_visit_at_a_time(
    simulated: bool, requests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 0 is at its first visit until round 3 is over, the others at their second."""
    replies: list[float] = []
    seconds: list[float] = []  # that a round has for its replies
    with Net(client_app()) as net, quiet():
        if simulated:
            net.pull_interval = 0.1  # type: ignore[attr-defined]
        for i in range(3):
            net.join(10 + i, i, 3)

        def report(round: Round) -> None:
            replies.append(round.metrics.get("replies", 0))
            net.late |= {0: {10}, 1: {11, 12}}.get(round.number, set())
            if round.number == 3:
                net.late.clear()

        receive = MessageFleet._receive

        def timed(fleet: MessageFleet, ids: Any, timeout: float, *size: int) -> Iterator[Message]:
            seconds.append(timeout)
            return receive(fleet, ids, timeout, *size)

        monkeypatch.setattr(MessageFleet, "_receive", timed)
        run_over(net, strategy(round_timeout=0.2), 4, on_round=report).play()
        counts = Counter(net._node_of.values()) - Counter(net.hellos)
    assert replies[1:] == [2, 0, 0, 3]
    assert [s > 0.1 for s in seconds] == [True, True, not simulated, True]  # all were late
    assert [counts[10 + i] for i in range(3)] == requests


def test_a_late_evaluation_is_over_before_the_next_visit() -> None:
    with Net(client_app()) as net, quiet():
        net.pull_interval = 0.1  # type: ignore[attr-defined]
        for i in range(3):
            net.join(10 + i, i, 3)
        deper = run_over(net, strategy(FedDeper, round_timeout=0.2), 3)
        deper.begin()
        deper.train_round()
        net.late.add(10)
        answers = deper.session.fleet.evaluate(deper.session.evaluate_requests(deper.state), 0.2)
        assert answers[0] == LATE
        assert deper.train_round().metrics["replies"] == 2
        assert [*net._node_of.values()].count(10) == 3  # a hello, a visit, an evaluation
        net.late.clear()
        assert deper.train_round().metrics["replies"] == 3


def test_of_large_replies_few_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages: as many as are fetched together, and the one before them, which is being read.
    Vectors: `REPLIES` bytes, the others are in files. The numbers are those of small replies."""
    counts, alive, files = list[int](), WeakSet[Message](), list[bool]()
    d, server_round = len(W0), rounds.server_round

    class Counted(Net):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = [*super().pull_messages(message_ids)]
            alive.update(replies)
            counts.append(len(replies))
            assert len(alive) <= 3 or counts[-1] == 6
            return replies

    def watched(*values: Any) -> rounds.ServerRound:
        files.extend(in_file(v) for reply in values[3] for v in reply.up)
        return server_round(*values)

    def play() -> list[Any]:
        with Counted(client_app()) as net, quiet():
            for i in range(6):
                net.join(10 + i, i, 6)
            run = run_over(net, strategy(Scaffold), 2)
            run.play()
        return [run.state.w, run.state.server.c]

    monkeypatch.setattr(rounds, "server_round", watched)
    expected = play()
    assert counts == [6, 6, 6]  # the handshakes, and two rounds
    assert files == [False] * 24
    monkeypatch.setattr("fedaccord.federation.polls.READ_AT_ONCE", 2 * 16 * d + 8)
    monkeypatch.setattr("fedaccord.storage.mapped.REPLIES", 3 * 8 * d)
    assert all(map(torch.equal, play(), expected))
    assert counts[3:] == [6, 2, 2, 2, 2, 2, 2]
    assert files[24:] == ([False] * 3 + [True] * 9) * 2


class Failing(Net):
    """A SuperLink whose database is locked for some requests of a kind."""

    fails, status, kind = 0, 500, "pull"

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._fail("pull")
        return super().pull_messages(message_ids)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._fail("push")
        return super().push_messages(messages)

    def _fail(self, kind: str) -> None:
        if self.fails and kind == self.kind:
            self.fails -= 1
            request = httpx.Request("POST", "http://superlink")
            httpx.Response(self.status, request=request).raise_for_status()


@pytest.mark.parametrize("kind", ["pull", "push"])
@pytest.mark.parametrize("schedule", ["synchronous", "buffered"])
def test_a_superlink_that_fails_for_a_while_is_asked_again(
    schedule: str, kind: str, warnings: list[str]
) -> None:
    """With one line, and the weights of a run without."""

    def play(fails: int, status: int = 500, timeout: float = 60.0) -> Round:
        with Failing(client_app()) as net, quiet():
            net.status, net.kind = status, kind
            for i in range(6):
                net.join(10 + i, i, 6)
            run = run_over(net, strategy(Scaffold, schedule=schedule), 2, timeout=timeout)
            run.begin()
            net.fails = fails
            return run.train_round()

    def lines() -> int:
        return sum("the SuperLink fails" in line for line in warnings)

    assert torch.equal(play(3).w, play(0).w)
    assert lines() == 1
    with pytest.raises(httpx.HTTPStatusError):
        play(1, status=403)
    assert {row["status"] for row in play(10**9, timeout=0.2).clients} == {LATE}
    assert lines() == 2


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_a_superlink_that_fails_again_is_told_again(kind: str, warnings: list[str]) -> None:
    with Failing() as net:
        net.kind, polls = kind, Polls(net, simulated=False)
        for _ in range(2):
            net.fails = 2
            for _ in range(3):
                assert not [*(polls.pull([]) if kind == "pull" else polls.push([], 60.0))]
    assert sum("the SuperLink fails" in line for line in warnings) == 2


def test_replies_of_nodes_that_may_be_offline_are_not_asked_for() -> None:
    """Unless none is awaited of a node that stayed online, for the last time."""
    awaited, first = {"a": 1, "b": 2}, {1: "then", 2: "then"}
    with Net() as net:
        due = Polls(net, simulated=False).due
    assert due(awaited, first, first) == (["a", "b"], False)
    assert due(awaited, first, {1: "then", 2: "later"}) == (["a", "b"], False)
    assert due(awaited, first, {1: "then"}) == (["a"], False)
    assert due(awaited, first, {2: "later"}) == (["a", "b"], True)
    assert due(awaited, first, None) == ([], False)  # the SuperLink fails
    assert due(awaited, None, first) == (["a", "b"], False)  # as in a simulation


def test_the_last_look_at_nodes_that_reconnected_is_repeated_if_it_failed() -> None:
    class Breaking(Failing):
        """All connections break, and return, when it fails."""

        def _fail(self, kind: str) -> None:
            if self.fails and kind == "pull":
                self._starts = {node: number + 1 for node, number in self._starts.items()}
            super()._fail(kind)

    with Breaking(client_app()) as net, quiet():
        for i in range(6):
            net.join(10 + i, i, 6)
        run = run_over(net, strategy(Scaffold), 1, timeout=60.0)
        run.begin()
        net.fails = 2
        assert {row["status"] for row in run.train_round().clients} == {"ok"}


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_a_superlink_that_fails_before_the_first_round_is_asked_again(kind: str) -> None:
    with Failing(client_app()) as net, quiet():
        net.fails, net.kind = 2, kind
        for i in range(6):
            net.join(10 + i, i, 6)
        run = run_over(net, strategy(Scaffold), 1)
        run.begin()
        assert net.fails == 0
        assert {row["status"] for row in run.train_round().clients} == {"ok"}


@pytest.mark.parametrize("more", [{}, {"schedule": "buffered", "buffer_size": 1}])
def test_messages_that_a_proxy_refuses_as_too_large_end_the_run_in_one_line(more: Any) -> None:
    """Flower returns no ids for them."""

    class Proxy(Net):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = super().push_messages(messages := [*messages])
            return ids if all(map(is_handshake, messages)) else []

    with Proxy(client_app()) as grid, quiet():
        grid.join(20, 0, 1)
        with pytest.raises(
            FederationError, match=r"^the SuperLink, or a proxy .* \(HTTP status 413"
        ):
            run_over(grid, strategy(**more), 2).play()
