"""Buffered rounds on nodes: replies count in the order in which they arrive, each once."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Error, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaccord import simulate
from fedaccord.core.rounds import broadcast
from fedaccord.core.vectors import leaves
from fedaccord.engine import quiet
from fedaccord.federation import checkpoint
from fedaccord.federation.device_profiles import write
from fedaccord.federation.fleet import LATE
from fedaccord.federation.message_fleet import RECONNECTED, REPLACED
from fedaccord.federation.round import Round
from fedaccord.federation.run import Run
from fedaccord.federation.session import Book
from fedaccord.strategies import METHODS, Scaffold
from fedaccord.wire.instruction import is_handshake
from tests.federation import half_square, linear, state_in
from tests.server.net import Clock, Net
from tests.server.runs import LEAST_SQUARES, W0, C, client_app, run_over

OWN: dict[str, dict[str, Any]] = {"feddyn": {"alpha": 1.0}, "afedpd": {"rho": 1.0}}
TIMEOUT = 60.0  # of each visit, in seconds of the test's clock
KINDS = ("lost", "error", "twice", "late", "forgets", "forged")  # what happens to a reply


def method_of(name: str, **more: Any) -> Any:
    plain: dict[str, Any] = {"lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": 0.0, "lr": 0.05}
    plain |= {"precision": "float64", "local_steps": 2, "batch_size": 0, "schedule": "buffered"}
    plain |= {"concurrency": 4, "buffer_size": 2}
    return METHODS[name](**plain | OWN.get(name, {}) | more)


class Nodes(Net):
    """Nodes whose replies come in ``order``, several in a look, or drawn; faults: of visits."""

    def __init__(
        self,
        order: Sequence[int] | random.Random,
        faults: Sequence[str | None] = (),
        at_once: int = 1,
    ) -> None:
        super().__init__(client_app())
        self.order = order if isinstance(order, random.Random) else [*order]
        self.faults, self.at_once = iter(faults), at_once
        self.pending: list[tuple[str, Message, str | None]] = []  # replies that have not come
        self.visits: set[str] = set()  # ids of their messages
        for i in range(C):
            self.join(10 + i, i, C)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = [*messages]
        ids = [*super().push_messages(messages)]
        for message_id, message in zip(ids, messages, strict=True):
            if not is_handshake(message):
                self.visits.add(message_id)
                self._spoil(message_id, message, next(self.faults, None))
        return ids

    def _spoil(self, message_id: str, message: Message, kind: str | None) -> None:
        reply = self._replies.pop(message_id)
        if kind == "forgets":
            self.contexts[message.metadata.dst_node_id].state = RecordDict()
        if kind == "error":
            reply = Message(Error(code=2, reason="broken"), reply_to=message)
        if kind == "forged":
            reply.metadata.__dict__["_src_node_id"] = 99
        if kind != "lost":
            self.pending += [(message_id, reply, kind)] * (2 if kind == "twice" else 1)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = {*message_ids}
        if not ids & self.visits:
            return super().pull_messages(ids)
        arrivals = self._drawn(ids) if isinstance(self.order, random.Random) else self._next()
        for each in arrivals:
            self.pending.remove(each)
        return [reply for _, reply, _ in arrivals]

    def _next(self) -> list[tuple[str, Message, str | None]]:
        at_work = {each[1].metadata.src_node_id - 10: each for each in self.pending}
        arrivals = []
        while self.order and self.order[0] in at_work and len(arrivals) < self.at_once:
            arrivals.append(at_work.pop(self.order.pop(0)))
        return arrivals

    def _drawn(self, ids: set[str]) -> list[tuple[str, Message, str | None]]:
        """Some of those that may come; a late one when no one waits for it any more."""
        ready = [each for each in self.pending if each[2] != "late" or each[0] not in ids]
        return self.order.sample(ready, min(len(ready), self.order.randrange(4)))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Waiting costs no time."""
    clock = Clock()
    time = SimpleNamespace(monotonic=clock, sleep=clock.sleep)
    monkeypatch.setattr("fedaccord.federation.message_fleet.time", time)
    return clock


def played(net: Nodes, method: Any, rounds: int, **more: Any) -> list[Round]:
    reports: list[Round] = []
    with net, quiet():
        run_over(net, method, rounds, on_round=reports.append, timeout=TIMEOUT, **more).play()
    return reports


def dropped(round: Round) -> list[tuple[int, str]]:
    """The clients whose replies do not count, with their statuses."""
    return [(row["client"], row["status"]) for row in round.clients if row["status"] != "ok"]


def restart(net: Net, node: int, again: int) -> None:
    """The node of client 0 ends, and a new one, perhaps of the same id, has its state."""
    state = net.contexts[node].state
    net.leave(node)
    net.join(again, 0, C)
    net.contexts[again].state = state


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "afedpd"])
def test_the_same_order_of_arrival_is_the_same_run(name: str, at_once: int, tmp_path: Path) -> None:
    """As in process, by the simulated clock: weights and server states bit for bit; also if a look
    finds more replies than a step takes."""
    file, rounds = tmp_path / "devices.csv", 8
    seconds = (1.0, 2.3, 20.0, 3.1, 0.8, 1.7)
    links = {"up_kbps": 1e15, "down_kbps": 1e15}
    write(file, {i: {"ms_per_sample": 1000 * s, **links} for i, s in enumerate(seconds)})
    simulated: list[Round] = []
    simulate(
        method_of(name, device_profile=str(file)),
        **{"clients": LEAST_SQUARES.clients(), "model": linear(W0), "loss": half_square},
        **{"rounds": rounds, "on_round": simulated.append},
    )
    ends = [sorted((row["clock"], row["client"]) for row in round.clients) for round in simulated]
    net = Nodes([i for some in ends for _, i in some], at_once=at_once)
    reports = played(net, method_of(name), rounds)
    assert len(reports) == len(simulated) == rounds + 1
    for report, expected in zip(reports, simulated, strict=True):
        assert torch.equal(report.w, expected.w)
        pairs = zip(leaves(report.state.server), leaves(expected.state.server), strict=True)
        for (_, v), (_, w) in pairs:
            assert torch.equal(v, w)
        assert report.state.accepted.tolist() == expected.state.accepted.tolist()
        own = [{k: row[k] for k in ("client", "status", "staleness")} for row in report.clients]
        assert own == [{k: row[k] for k in own[0]} for row in expected.clients]
    assert max(row["staleness"] for round in reports for row in round.clients) > 1


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "afedpd"])
@settings(max_examples=3)
@given(
    faults=st.lists(st.sampled_from([None, None, *KINDS]), min_size=12, max_size=12),
    seed=st.integers(0, 99),
    sizes=st.tuples(st.integers(1, C), st.integers(1, C)),
    kill=st.integers(1, 6),
)
def test_nothing_is_counted_twice(
    name: str, faults: list[str | None], seed: int, sizes: tuple[int, int], kill: int
) -> None:
    """The server knows the mean of the clients' memories after every step: for any order of
    arrival, if replies are lost, late, repeated, forged or errors, if clients lose their states,
    and if the server is killed and resumes."""
    own = {"concurrency": max(sizes), "buffer_size": min(sizes), "max_failed_rounds": 99}
    method, net = method_of(name, **own), Nodes(random.Random(seed), faults)
    with net, quiet():
        run = run_over(net, method, 8, timeout=TIMEOUT)
        run.begin()
        while run.state.t < 8:
            if run.state.t == kill and not run.session.book.attempt:
                packed = checkpoint.pack(run.state)
                run = run_over(net, method, 8, timeout=TIMEOUT, book=Book(attempt=1))
                run.begin(checkpoint.unpack(method, *packed))
                assert not run.state.visits
            run.train_round()
            check_memories(run, net)


def check_memories(run: Run, net: Nodes) -> None:
    s = run.state
    accepted = s.accepted.tolist()
    states = [None if t < 0 else state_in(run.session, net, i, t) for i, t in enumerate(accepted)]
    if any(t >= 0 and state is None for t, state in zip(accepted, states, strict=True)):
        return  # the server learns of it when it asks that client
    memories, zero = list[torch.Tensor](), torch.zeros_like(s.w)
    for i, state in enumerate(states):
        if isinstance(run.method, Scaffold):
            memories.append(zero if state is None else state.c_i)
            continue
        lam = zero if state is None else state.lam
        missed = getattr(broadcast(run.method, s, i), "missed", None)
        memories.append(lam if missed is None else lam + missed)
    summed = s.server.c if isinstance(run.method, Scaffold) else s.server.lam_bar
    torch.testing.assert_close(torch.stack(memories).mean(0), summed, rtol=0, atol=1e-12)


def test_a_lost_visit_frees_its_seat_at_its_deadline(clock: Clock) -> None:
    """The step does not wait for it while others reply; its client is asked again, and counts."""
    net = Nodes(random.Random(1), ["lost"])
    method = method_of("scaffold", concurrency=C, buffer_size=C)
    reports = played(net, method, 3)
    assert dropped(reports[1]) == [(0, LATE)]
    assert clock.now >= TIMEOUT
    assert [round.metrics["replies"] for round in reports[1:]] == [C - 1, C, C]


def test_a_step_waits_for_as_many_good_replies_as_the_buffer_holds() -> None:
    net = Nodes(range(C), ["error"])
    (last,) = played(net, method_of("scaffold", concurrency=C, buffer_size=2), 1)[1:]
    assert (last.metrics["replies"], last.metrics["dropped"]) == (2, 1)


def test_the_staleness_of_a_step_is_that_of_its_good_replies() -> None:
    net = Nodes(range(1, C), [None, None, None, "error"])
    *_, last = played(net, method_of("scaffold", concurrency=C, buffer_size=2), 2)
    assert (last.metrics["dropped"], last.metrics["staleness"]) == (1, 1.0)


def test_a_visit_that_could_not_be_sent_frees_its_seat_at_once(clock: Clock) -> None:
    class Unsent(Nodes):
        """Flower gives no id to a message for a node that has just left."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = [*super().push_messages(messages)]
            lost = self.visits - {message_id for message_id, _, _ in self.pending}
            return ["" if message_id in lost else message_id for message_id in ids]

    net = Unsent(range(1, C), ["lost"])
    reports = played(net, method_of("scaffold", concurrency=C, buffer_size=C), 1)
    assert dropped(reports[1]) == [(0, LATE)]
    assert clock.now < TIMEOUT


def test_another_node_of_a_client_ends_its_visit(clock: Clock) -> None:
    """Without a wait for the deadline, with the state that the server accepted last."""
    net = Nodes(random.Random(1), ["lost"])
    net.leave(10)
    net.join(20, 0, C)
    clock.at(1.0, lambda: restart(net, 20, 21))
    method = method_of("scaffold", concurrency=C, buffer_size=C)
    reports = played(net, method, 3)
    assert dropped(reports[1]) == [(0, REPLACED)]
    assert clock.now < TIMEOUT
    assert [round.metrics["replies"] for round in reports[1:]] == [C - 1, C, C]


@pytest.mark.parametrize(("slots", "status"), [(C, "ok"), (C - 1, RECONNECTED)])
def test_a_visit_survives_a_connection_that_is_lost_for_a_while(
    slots: int, status: str, clock: Clock
) -> None:
    """Unless an idle client can take its place: then its reply is asked for, and is lost."""

    class Dropping(Nodes):
        """As a SuperLink, which drops the message of an offline node whose reply is asked for."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ids = [*message_ids]
            gone = {i for i in ids if self._node_of[i] not in self.contexts}
            self.pending = [each for each in self.pending if each[0] not in gone]
            return super().pull_messages(ids)

    net = Dropping([1])
    lost = net.contexts[10]

    def back() -> None:
        net.contexts[10] = lost
        net._starts[10] += 1
        net.late.add(10)  # it answers the handshake after the visit

    def upload() -> None:
        net.order += [0, 3, 4, 5, 2]
        clock.at(clock.now + 1, net.late.clear)

    clock.at(0.0, lambda: net.leave(10))
    clock.at(5.0, back)
    clock.at(9.0, upload)
    method = method_of("scaffold", concurrency=slots, buffer_size=slots)
    (_, report) = played(net, method, 1)
    assert {row["client"]: row["status"] for row in report.clients}[0] == status


def test_a_restarted_node_ends_its_visit(clock: Clock) -> None:
    """With the same node id: it has lost the message, and answers the handshake alone."""
    net = Nodes(range(1, C), ["lost"])
    clock.at(1.0, lambda: restart(net, 10, 10))
    method = method_of("scaffold", concurrency=C, buffer_size=C)
    reports = played(net, method, 1)
    assert dropped(reports[1]) == [(0, RECONNECTED)]
    assert clock.now < TIMEOUT


def test_a_new_visit_drops_the_reply_to_the_one_before() -> None:
    """Also one that has arrived: the server gives visits up when all memories begin anew."""
    with Nodes([1, 0], at_once=2) as net, quiet():
        run = run_over(net, method_of("scaffold"), 2)
        s, fleet = run.begin(), run.session.fleet
        fleet.send(run.session.requests(s, [0, 1]), TIMEOUT)
        assert [*fleet.receive([0, 1], 1)] == [1]
        fleet.send(run.session.requests(s._replace(t=1), [0]), TIMEOUT)
        assert fleet.receive([0], 1) == {0: LATE}


def test_a_visit_that_is_given_up_is_not_awaited() -> None:
    """One of a client that is no longer counted, though its reply has arrived."""
    with Nodes([0, 1], at_once=2) as net, quiet():
        run = run_over(net, method_of("scaffold"), 1)
        s, fleet = run.begin(), run.session.fleet
        fleet.send(run.session.requests(s, [0, 1]), TIMEOUT)
        assert [*fleet.receive([1], 9)] == [1]
        assert fleet.receive([0, 1], 9) == {}


def test_a_reply_that_could_not_be_read_is_awaited_though_its_node_reconnected(
    clock: Clock,
) -> None:
    class Locked(Nodes):
        """A SuperLink that fails twice, and a node whose connection returns meanwhile."""

        fails = 2

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ids = [*message_ids]
            if {*ids} & self.visits and self.fails:
                self.fails -= 1
                if self.fails:
                    restart(self, 10, 10)
                request = httpx.Request("POST", "http://superlink")
                httpx.Response(500, request=request).raise_for_status()
            return super().pull_messages(ids)

    net = Locked(range(C))
    method = method_of("scaffold", concurrency=C, buffer_size=C)
    (_, report) = played(net, method, 1)
    assert net.fails == 0
    assert dropped(report) == []


def test_of_large_replies_no_more_are_fetched_than_a_step_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others wait in the SuperLink's store, beyond their deadlines too, in the same order."""
    counts: list[int] = []

    class Counted(Net):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = [*super().pull_messages(message_ids)]
            counts.append(len(replies))
            return replies

    def play(timeout: float) -> list[Round]:
        counts.clear()
        with Counted(client_app()) as net, quiet():
            for i in range(C):
                net.join(10 + i, i, C)
            reports: list[Round] = []
            own = {"on_round": reports.append, "timeout": timeout}
            run_over(net, method_of("scaffold", concurrency=C), 4, **own).play()
        return reports

    expected = play(TIMEOUT)
    assert counts[:2] == [C, C]  # the handshakes, and all replies to the first model
    monkeypatch.setattr("fedaccord.federation.polls.READ_AT_ONCE", 1)
    result = play(0.0)
    assert counts == [C] + [1] * 8
    assert all(torch.equal(one.w, other.w) for one, other in zip(result, expected, strict=True))


def test_a_simulation_refuses() -> None:
    net = Nodes([])
    net.pull_interval = 0.1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="expected synchronous without simulated devices or Super"):
        run_over(net, method_of("fedavg"), 1)
