"""The roster: what is wrong with a node concerns that node alone, never the run."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedaccord.compat import uploads
from fedaccord.federation.errors import FederationError
from fedaccord.federation.roster import ASK_AGAIN, GRACE, Roster
from fedaccord.wire.handshake import HandshakeReply, read_handshake
from tests.server.net import Clock, Net


@pytest.fixture
def roster(clock: Clock) -> Roster:
    return Roster(clock)


def ready(roster: Roster, net: Net, num_clients: int = 3) -> Roster:
    """Before round 1, node 10 + i is client i."""
    for i in range(num_clients):
        net.join(10 + i, i, num_clients)
    roster.wait_for_all(net, 600)
    assert roster.nodes == {i: 10 + i for i in range(num_clients)}
    return roster


def one_line(text: str) -> bool:
    return bool(text) and "\n" not in text


# --- before round 1 -------------------------------------------------------------------------------


def test_clients_are_known_by_their_partition_ids(roster: Roster, net: Net, clock: Clock) -> None:
    net.join(7, 1, 2)
    clock.at(100, lambda: net.join(3, 0, 2))
    roster.wait_for_all(net, 600)
    assert roster.nodes == {1: 7, 0: 3}
    assert roster.num_clients == 2
    assert net.hellos == [7, 3]
    assert 100 <= clock.now < 101


def test_a_lost_hello_is_repeated(roster: Roster, net: Net, clock: Clock) -> None:
    net.join(10, 0, 2)
    net.join(11, 1, 2)
    net.lost.add(11)
    clock.at(1, net.lost.clear)
    roster.wait_for_all(net, 600)
    assert roster.nodes == {0: 10, 1: 11}
    assert net.hellos == [10, 11, 11]
    assert ASK_AGAIN <= clock.now < ASK_AGAIN + 1


def test_a_handshake_that_was_read_counts_although_the_superlink_fails_after_it(
    roster: Roster, net: Net, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink deletes a reply that was read."""
    pull, left = uploads.pull_messages, [1]

    def failing(grid: Any, message_ids: Any) -> Any:
        for reply in pull(grid, message_ids):
            yield reply
            if left:
                left.pop()
                raise ConnectionError("HTTP status 500")

    def ask(update: Any) -> None:
        with suppress(ConnectionError):
            update()

    monkeypatch.setattr(uploads, "pull_messages", failing)
    for i in range(3):
        net.join(10 + i, i, 3)
    roster.wait_for_all(net, 600, ask)
    assert roster.nodes == {0: 10, 1: 11, 2: 12}
    assert not left
    assert net.hellos.count(10) == 1


def test_a_newcomer_that_was_read_is_one_although_the_superlink_fails_after_it(
    roster: Roster, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that restarted takes the place of its old node, which is online for a while."""
    for i in range(3):
        net.join(10 + i, i, 3)
    roster.wait_for_all(net, 600)
    pull, left = uploads.pull_messages, [1]

    def failing(grid: Any, message_ids: Any) -> Any:
        yield from pull(grid, message_ids)
        if left:
            left.pop()
            raise ConnectionError("HTTP status 500")

    monkeypatch.setattr(uploads, "pull_messages", failing)
    net.join(20, 1, 3)
    with pytest.raises(ConnectionError):
        roster.update(net)
    roster.update(net)
    assert (roster.nodes[1], roster.refused) == (20, {})


def test_a_slow_answer_is_waited_for_and_the_node_is_not_asked_all_the_time(
    roster: Roster, net: Net, clock: Clock
) -> None:
    net.join(10, 0, 1)
    net.late.add(10)
    clock.at(0.9 * ASK_AGAIN, net.late.clear)
    roster.wait_for_all(net, 600)
    assert net.hellos == [10]


def test_a_device_that_is_slow_to_reply_is_asked_less_and_less(
    roster: Roster, net: Net, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Every handshake starts a process on the device: as many as time allows would never end."""
    net.join(10, 0, 1)
    net.late.add(10)
    clock.at(20 * ASK_AGAIN, net.late.clear)
    with caplog.at_level(logging.INFO, "flwr"):
        roster.wait_for_all(net, 600 + ASK_AGAIN)
    assert net.hellos == [10] * 5  # after 1, 1 + 2, 1 + 2 + 4 and 15 times as long
    lines = [line for line in caplog.messages if "waiting for clients" in line]
    assert 5 < len(lines) < 15
    assert "got 0; missing partition-ids: all" in lines[0]


@pytest.mark.parametrize(
    ("others", "line"),
    [
        (["cat", "dog"], ""),
        (["", ""], ""),  # its data name none
        (["0", "1"], "expected the classes ['cat', 'dog'] in this order, got ['0', '1']"),
        (["", "", ""], "expected the classes ['cat', 'dog'] in this order, got ['0', '1', '2']"),
        (["dog", "cat"], "expected the classes ['cat', 'dog'] in this order, got ['dog', 'cat']"),
        (["cat", "cow"], "expected the classes ['cat', 'dog'] in this order, got ['cat', 'cow']"),
        (["cat"], "expected the classes ['cat', 'dog'] in this order, got ['cat']"),
    ],
)
def test_a_node_that_numbers_its_classes_otherwise_is_left_out(
    net: Net, clock: Clock, monkeypatch: pytest.MonkeyPatch, others: list[str], line: str
) -> None:
    def read(reply: Message) -> HandshakeReply:
        return read_handshake(reply)._replace(card={"class-names": others})

    monkeypatch.setattr("fedaccord.federation.roster.read_handshake", read)
    roster = Roster(clock, card={"class-names": ["cat", "dog"]})
    net.join(10, 0, 1)
    roster.update(net)
    assert (line in roster.refused[10]) if line else not roster.refused
    assert one_line(roster.refused.get(10, "none"))


def test_a_node_that_takes_longer_than_the_next_question_is_heard(
    roster: Roster, net: Net, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small device starts a process for every message, and answers one after another."""
    push, pull, ready_at = net.push_messages, net.pull_messages, dict[str, float]()

    def push_slowly(messages: Iterable[Message]) -> list[str]:
        ids = list(push(messages))
        ready_at.update(dict.fromkeys(ids, clock.now + 1.5 * ASK_AGAIN))
        return ids

    monkeypatch.setattr(net, "push_messages", push_slowly)
    monkeypatch.setattr(
        net, "pull_messages", lambda ids: pull([i for i in ids if ready_at[i] <= clock.now])
    )
    net.join(10, 0, 1)
    roster.wait_for_all(net, 600)
    assert roster.nodes == {0: 10}
    assert net.hellos == [10, 10]
    assert 1.5 * ASK_AGAIN <= clock.now < 2 * ASK_AGAIN


@pytest.mark.parametrize("order", [[5, 3, 3, 3], [3, 5, 3], [3, 3, 5], [5, 4, 3, 3, 3]])
def test_the_number_of_clients_is_what_most_nodes_say(
    order: list[int], roster: Roster, net: Net, clock: Clock, warnings: list[str]
) -> None:
    """In whatever order they come: a minority's first node neither ends the run nor decides C."""
    clients = iter(range(3))
    for k, number in enumerate([*order, *[3] * (3 - order.count(3))]):
        client = next(clients) if number == 3 else 0
        clock.at(10 * k, lambda k=k, client=client, number=number: net.join(10 + k, client, number))
    roster.wait_for_all(net, 600)
    assert roster.num_clients == 3
    assert sorted(roster.nodes) == [0, 1, 2]
    wrong = {10 + k for k, number in enumerate(order) if number != 3}
    assert set(roster.refused) == wrong
    for node in wrong:
        assert roster.refused[node].startswith("expected num-partitions=3, as most nodes report")
        assert sum(roster.refused[node] in line for line in warnings) == 1


def test_of_two_nodes_with_one_partition_id_the_second_is_left_out(
    roster: Roster, net: Net, warnings: list[str]
) -> None:
    net.join(12, 1, 2)
    net.join(11, 1, 2)
    net.join(10, 0, 2)
    roster.wait_for_all(net, 600)
    assert roster.nodes == {0: 10, 1: 11}  # by node id, whoever answers first
    for _ in range(3):
        roster.update(net)
    assert roster.nodes == {0: 10, 1: 11}
    (line,) = warnings
    assert one_line(line)
    assert line.startswith("node 12 is left out: expected one SuperNode per partition-id, got two ")
    assert "partition-id=1 (nodes 11 and 12)" in line
    assert "--node-config" in line


@pytest.mark.parametrize("is_running", [False, True])
def test_the_second_takes_the_place_when_the_first_is_gone(
    is_running: bool, roster: Roster, net: Net
) -> None:
    for node, client in ((10, 0), (11, 1), (12, 1)):
        net.join(node, client, 2 if is_running else 3)
    roster.wait_for_all(net, 600) if is_running else roster.update(net)
    assert roster.nodes[1] == 11
    net.leave(11)
    roster.update(net)
    assert roster.nodes == {0: 10, 1: 12}
    assert roster.refused == {}


def test_a_second_node_of_a_client_stays_left_out_when_connections_break(
    roster: Roster, net: Net
) -> None:
    """Its data are others, and a method with memories would find none."""
    for node, client in ((10, 0), (11, 1), (12, 1)):
        net.join(node, client, 2)
    roster.wait_for_all(net, 600)
    for lost in (12, 11, 11, 12):
        net.join(lost, 1, 2)  # with the same node id, as a device whose connection returns
        for _ in range(3):
            roster.update(net)
            assert roster.nodes.get(1) in (11, None)
        assert roster.nodes == {0: 10, 1: 11}
        assert "got two with partition-id=1 (nodes 11 and 12)" in roster.refused[12]
    net.leave(11)
    roster.update(net)
    assert roster.nodes == {0: 10, 1: 12}  # the only one


BAD_NODES: dict[str, tuple[dict[str, Any], str]] = {
    "no partition-id": ({"num_clients": 3}, "expected an integer 'partition-id'"),
    "no num-partitions": ({"client": 0}, "expected an integer 'num-partitions'"),
    "partition-id too high": (
        {"client": 3, "num_clients": 3},
        "expected partition-id below num-partitions, got partition-id=3 num-partitions=3",
    ),
    "partition-id negative": ({"client": -1, "num_clients": 3}, "expected partition-id below"),
    "text": ({"client": "one", "num_clients": 3}, "expected an integer 'partition-id'"),
    "another num-partitions": (
        {"client": 0, "num_clients": 4},
        "expected num-partitions=3, as most nodes report, got partition-id=0 num-partitions=4",
    ),
}


@pytest.mark.parametrize("bad", BAD_NODES)
@pytest.mark.parametrize("is_running", [False, True])
def test_a_node_with_a_wrong_config_concerns_itself_alone(
    is_running: bool, bad: str, roster: Roster, net: Net, warnings: list[str]
) -> None:
    config, reason = BAD_NODES[bad]
    if not is_running:
        net.join(1, **config)
    ready(roster, net)
    if is_running:
        net.join(1, **config)
        for _ in range(3):
            roster.update(net)
    assert roster.nodes == {0: 10, 1: 11, 2: 12}
    assert roster.num_clients == 3
    assert reason in roster.refused[1]
    (line,) = warnings
    assert one_line(line)
    assert line.startswith("node 1 is left out: ")
    net.leave(1)
    roster.update(net)
    assert roster.refused == {}
    net.join(1, 0, 3)  # it reconnects with a good one, as a restarted device
    roster.update(net)
    assert roster.nodes == {0: 1, 1: 11, 2: 12}


def test_a_node_that_the_superlink_reports_lost_is_asked_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report comes from the SuperLink, not from the node: nothing is wrong with its config."""
    with Net() as net:
        net.join(10, 0, 1)
        pull = net.pull_messages

        def unavailable(ids: Any) -> Any:
            monkeypatch.setattr(net, "pull_messages", pull)
            replies = list(pull(ids))
            for reply in replies:
                reply.metadata.__dict__["_src_node_id"] = 1
                reply.__dict__["_error"] = Error(code=3, reason="node unavailable")
                reply.__dict__["_content"] = None
            return replies

        monkeypatch.setattr(net, "pull_messages", unavailable)
        roster = Roster(clock)
        roster.update(net)
        assert roster.nodes == roster.refused == {}
        roster.update(net)
        assert roster.nodes == {0: 10}


def test_the_last_error_names_who_is_missing_and_who_was_left_out(
    roster: Roster, net: Net, clock: Clock
) -> None:
    net.join(10, 0, 4)
    net.join(11, 0, 4)
    net.join(12, 1, 4)
    net.join(13, 2)
    net.join(14, 3, 4)
    net.lost.add(14)
    with pytest.raises(FederationError) as error:
        roster.wait_for_all(net, 80)
    text = str(error.value)
    assert text.startswith(
        "expected 4 clients within 80 s, got 2; missing partition-ids: [2, 3]; left out: "
        "node 11: expected one SuperNode per partition-id, got two with partition-id=0"
    )
    assert "; node 13: ValueError: expected an integer 'num-partitions' in this node's" in text
    assert "wait-timeout" in text
    assert one_line(text)
    assert 80 <= clock.now < 81
    assert net.hellos.count(14) == 2  # after ASK_AGAIN seconds, then after twice as many


@pytest.mark.parametrize(
    "reason",
    [
        "KeyError: 'arrays'",  # in process
        "<class 'KeyError'>:<''arrays''>",  # on a device
        "Traceback\n\nException ClientAppException occurred. Message: 'arrays'",  # in a simulation
    ],
)
def test_a_clientapp_for_flowers_own_strategies_is_one_line(
    reason: str, roster: Roster, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        message.content["arrays"]  # as Flower's quickstart reads its model
        raise AssertionError

    with Net(app) as net:
        for i in range(2):
            net.join(10 + i, i, 2)
        pull = net.pull_messages

        def reported(ids: Any) -> Any:
            replies = [*pull(ids)]
            for reply in replies:
                assert reply.error.reason == "KeyError: 'arrays'"
                reply.__dict__["_error"] = Error(code=2, reason=reason)
            return replies

        monkeypatch.setattr(net, "pull_messages", reported)
        with pytest.raises(FederationError, match=r"^no client could start: its ClientApp") as e:
            roster.wait_for_all(net, 600)
    assert "looked for 'arrays'; if in the handshake, the first message, which has" in str(e.value)
    assert "return fedaccord.train_locally(message, context" in str(e.value)
    assert one_line(str(e.value))
    assert clock.now < 2 * GRACE


def test_where_nobody_comes_the_error_says_so(roster: Roster, net: Net, clock: Clock) -> None:
    with pytest.raises(FederationError, match=r"expected some clients within 20 s, got 0; .*: all"):
        roster.wait_for_all(net, 20)


def test_where_all_are_refused_the_run_fails_soon_with_the_reason(
    roster: Roster, net: Net, clock: Clock
) -> None:
    net.join(10, num_clients=3)
    net.join(11, num_clients=3)
    with pytest.raises(FederationError, match=r"^no client could start: .*'partition-id'") as error:
        roster.wait_for_all(net, 600)
    assert "--node-config" in str(error.value)
    assert GRACE < clock.now < GRACE + 1


def test_a_good_node_within_the_grace_is_waited_for(roster: Roster, net: Net, clock: Clock) -> None:
    net.join(10, num_clients=1)
    clock.at(GRACE / 2, lambda: net.join(11, 0, 1))
    roster.wait_for_all(net, 600)
    assert roster.nodes == {0: 11}


def test_a_node_that_answers_later_than_the_grace_is_waited_for(
    roster: Roster, net: Net, clock: Clock
) -> None:
    net.join(10, num_clients=1)  # refused
    net.join(11, 0, 1)
    net.late.add(11)
    clock.at(2 * GRACE, net.late.clear)
    roster.wait_for_all(net, 600)
    assert roster.nodes == {0: 11}


# --- during a run ---------------------------------------------------------------------------------


def test_a_node_that_was_away_is_met_again_under_its_id(
    roster: Roster, net: Net, warnings: list[str]
) -> None:
    """A node that reconnects keeps its id where its key is registered."""
    ready(roster, net)
    net.leave(11)
    roster.update(net)
    assert roster.nodes == {0: 10, 2: 12}
    assert warnings == ["client 1 is offline"]
    net.join(11, 1, 3)
    roster.update(net)
    assert roster.nodes == {0: 10, 1: 11, 2: 12}


def test_a_restart_between_two_updates_is_noticed(
    roster: Roster, net: Net, warnings: list[str]
) -> None:
    """With a registered key the node has the same id; its client may be another."""
    ready(roster, net)
    net.leave(11)
    net.join(11, 1, 3)
    net.late.add(11)
    roster.update(net)
    assert roster.nodes == {0: 10, 2: 12}
    assert warnings == ["client 1 reconnected"]
    net.late.clear()
    roster.update(net)
    assert roster.nodes == {0: 10, 1: 11, 2: 12}
    assert net.hellos == [10, 11, 12, 11]


def test_a_refused_node_that_restarted_is_asked_again(roster: Roster, net: Net) -> None:
    net.join(11, 1, 2)
    net.join(12, "one", 2)
    roster.update(net)
    assert "partition-id" in roster.refused[12]
    net.leave(12)
    net.join(12, 0, 2)
    roster.update(net)
    assert roster.nodes == {0: 12, 1: 11}
    assert not roster.refused


def test_a_node_that_was_away_while_it_was_asked_is_asked_anew(roster: Roster, net: Net) -> None:
    ready(roster, net)
    net.join(20, 1, 3)
    net.late.add(20)
    roster.update(net)
    net.leave(20)
    roster.update(net)
    net.late.clear()
    net.join(20, 1, 3)
    roster.update(net)
    assert net.hellos.count(20) == 2
    assert roster.nodes[1] == 20


def test_a_late_node_is_never_waited_for(roster: Roster, net: Net, clock: Clock) -> None:
    ready(roster, net)
    net.leave(11)
    net.join(21, 1, 3)
    net.late.add(21)
    began = clock.now
    for _ in range(4):
        roster.update(net)
        assert roster.nodes == {0: 10, 2: 12}
    net.late.clear()
    roster.update(net)
    assert roster.nodes == {0: 10, 1: 21, 2: 12}
    assert clock.now == began  # there was no wait
    assert net.hellos.count(21) == 1


def test_a_hello_that_got_lost_during_a_run_is_repeated(
    roster: Roster, net: Net, clock: Clock
) -> None:
    ready(roster, net)
    net.leave(11)
    net.join(21, 1, 3)
    net.lost.add(21)
    roster.update(net)
    net.lost.clear()
    clock.now += ASK_AGAIN / 2
    roster.update(net)
    assert 1 not in roster.nodes
    clock.now += ASK_AGAIN / 2
    roster.update(net)
    assert roster.nodes[1] == 21


def test_a_device_that_restarted_takes_its_place_and_keeps_it(
    roster: Roster, net: Net, warnings: list[str]
) -> None:
    """Its old node stays online until its heartbeat is missed, under a lower or a higher id."""
    ready(roster, net)
    for node, client in ((21, 1), (5, 2)):
        net.join(node, client, 3)
    for _ in range(3):
        roster.update(net)
        assert roster.nodes == {0: 10, 1: 21, 2: 5}
    assert warnings.count("client 1 reconnected as a new node, which replaces the old one") == 1
    net.leave(11)
    net.leave(12)
    roster.update(net)
    assert roster.nodes == {0: 10, 1: 21, 2: 5}
    assert roster.refused == {}


def test_a_duplicate_from_before_round_1_takes_no_place_however_slow_its_answer(
    roster: Roster, net: Net, clock: Clock
) -> None:
    """Else it would depend on chance which of the two trains, and on what state."""
    net.join(20, 1, 3)
    net.late.add(20)
    ready(roster, net)
    net.late.clear()
    net.lost.add(20)
    roster.update(net)
    net.lost.clear()
    clock.now += ASK_AGAIN
    roster.update(net)
    assert roster.nodes == {0: 10, 1: 11, 2: 12}
    assert "got two with partition-id=1" in roster.refused[20]


def test_the_number_of_clients_stays_once_round_1_has_begun(roster: Roster, net: Net) -> None:
    ready(roster, net)
    for node in range(30, 35):
        net.join(node, node - 30, 5)
    roster.update(net)
    assert roster.num_clients == 3
    assert roster.nodes == {0: 10, 1: 11, 2: 12}
    assert sorted(roster.refused) == [30, 31, 32, 33, 34]


# --- a tie, and long lists ------------------------------------------------------------------------


def test_a_tie_about_the_number_of_clients_names_both(
    net: Net, clock: Clock, warnings: list[str]
) -> None:
    for node, client, num_clients in ((1, 0, 2), (2, 1, 2), (3, 0, 10**6), (4, 1, 10**6)):
        net.join(node, client, num_clients)
    with pytest.raises(FederationError) as error:
        Roster(clock).wait_for_all(net, 60.0)
    line = (
        "expected one num-partitions from most nodes, got 2 from nodes [1, 2] and 1000000 from "
        "nodes [3, 4]: give all SuperNodes the same in --node-config"
    )
    assert str(error.value) == line
    assert warnings == [line]


def test_another_node_ends_a_tie(net: Net, clock: Clock) -> None:
    """It comes later: no node was seated before, and only the minority is refused for it."""
    net.join(1, 0, 2)
    net.join(2, 1, 10**6)
    clock.at(30.0, lambda: net.join(3, 1, 2))
    roster = Roster(clock)
    roster.wait_for_all(net, 60.0)
    assert roster.nodes == {0: 1, 1: 3}
    assert [*roster.refused] == [2]


def test_missing_clients_are_named_up_to_ten(net: Net, clock: Clock) -> None:
    net.join(1, 0, 10**4)
    with pytest.raises(FederationError) as error:
        Roster(clock).wait_for_all(net, 60.0)
    assert "missing partition-ids: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, and 9989 more]." in str(
        error.value
    )


def test_refused_nodes_are_named_up_to_ten(net: Net, clock: Clock) -> None:
    for node in range(30):
        net.join(node, 0, 2)
    with pytest.raises(FederationError) as error:
        Roster(clock).wait_for_all(net, 60.0)
    assert str(error.value).count("expected one SuperNode per partition-id") == 10
    assert "; and 19 more. Start" in str(error.value)
