"""Replies that are still being sent, at Flower's own SuperLink without its network."""

import json
import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import (
    FLWR_IN_MEMORY_DB_NAME,
    HEAD_BODY_DIVIDER,
    NOOP_FEDERATION_ID,
    TaskType,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers

from fedaccord.compat import uploads
from fedaccord.federation.message_fleet import MessageFleet
from fedaccord.federation.polls import Polls
from fedaccord.federation.roster import Roster

REQUEST = httpx.Request("POST", "http://127.0.0.1")


class SuperLink:
    """The client of a SuperLink in this process, and its nodes' uploads part by part."""

    def __init__(self, num_nodes: int) -> None:
        factory = LinkStateFactory(
            FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
        )
        self.state = factory.state()
        words = (None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP)
        self.run_id = self.state.create_run(*words)
        self.nodes = []
        for i in range(num_nodes):
            node = self.state.create_node("", "", bytes([i]), 1000.0)
            self.state.acknowledge_node_heartbeat(node, 1000.0)
            self.nodes.append(node)
        self.pulled: list[str] = []  # parts that the server fetched

    def __getattr__(self, name: str) -> Any:
        handler = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)[1:]
        task = SimpleNamespace(run_id=self.run_id)

        def ask(request: Any) -> Any:
            answer = getattr(runtime_handlers, handler)(request, self.state, task)
            if name == "PullObject" and answer.object_available:
                self.pulled.append(request.object_id)
            return answer

        return ask

    def upload(self, message: Message, values: np.ndarray) -> Iterator[int]:
        """A node's reply, a part for each step, in a SuperNode's order."""
        reply = Message(RecordDict({"w": ArrayRecord({"w": Array(values)})}), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        session, bare = self.state.start_session(self.run_id), remove_content_from_message(reply)
        parts, tree = get_all_nested_objects(reply), get_object_tree(reply)
        success, missing = self.state.store_message_and_object_tree(bare, tree, session)
        assert success
        assert missing[-1] == reply.object_id  # the last part
        for k, part in enumerate(missing):
            yield k
            assert self.state.store_object(self.run_id, session, part, parts[part].deflate())


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    link = SuperLink(2)
    for name, value in {"_run_id": link.run_id, "_node_id": 1, "_task_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    return link


@pytest.fixture
def grid(link: SuperLink) -> HttpGrid:
    grid = HttpGrid(token="x")
    grid._client = cast(Any, link)
    grid.set_run(Run.create_empty(link.run_id))
    return grid


def sent(link: SuperLink, grid: HttpGrid) -> list[Message]:
    messages = [Message(RecordDict(), node, MessageType.TRAIN) for node in link.nodes]
    assert all(grid.push_messages(messages))
    return messages


TTL = "OBJECT_PUSH_SESSION_TTL_SECONDS"
VALUES = np.random.default_rng(0).normal(size=(2, 10**6))  # of a reply: two parts, and its records


def replies(messages: Any) -> dict[str, np.ndarray]:
    messages = [*messages]
    assert not any(reply.has_error() for reply in messages)
    return {r.metadata.reply_to_message_id: r.content["w"]["w"].numpy() for r in messages}


def test_an_incomplete_reply_delays_no_other_one(link: SuperLink, grid: HttpGrid) -> None:
    slow, fast = sent(link, grid)
    ids = [slow.metadata.message_id, fast.metadata.message_id]
    transfer = link.upload(slow, VALUES[0])
    next(transfer)
    assert [*link.upload(fast, VALUES[1])]
    start = time.monotonic()
    first = replies(uploads.pull_messages(grid, ids))
    assert time.monotonic() - start < 5
    assert first.keys() == {ids[1]}
    assert np.array_equal(first[ids[1]], VALUES[1])
    whole = {*link.pulled}
    for _ in transfer:  # a part more each time
        assert not replies(uploads.pull_messages(grid, ids[:1]))
    assert {*link.pulled} == whole  # no part is fetched before the last one has arrived
    last = replies(uploads.pull_messages(grid, ids[:1]))
    assert np.array_equal(last[ids[0]], VALUES[0])
    assert not [*uploads.pull_messages(grid, [])]
    assert not cast(Any, grid)._client._begun  # nothing is kept of what was read


def test_a_call_of_others_is_flowers_own(link: SuperLink, grid: HttpGrid) -> None:
    _, fast = sent(link, grid)
    assert [*link.upload(fast, VALUES[1])]
    assert not [*uploads.pull_messages(grid, [])]  # from now on the grid's client is ours
    (values,) = replies(grid.pull_messages([fast.metadata.message_id])).values()
    assert np.array_equal(values, VALUES[1])


def test_a_reply_whose_last_part_came_before_another_one_is_left_for_the_next_call(
    link: SuperLink, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperNode sends two parts at a time."""
    slow, _ = sent(link, grid)
    transfer = link.upload(slow, VALUES[0])
    next(transfer)
    monkeypatch.setattr(uploads._Client, "_has_last_part", lambda *_: True)
    start = time.monotonic()
    assert not replies(uploads.pull_messages(grid, [slow.metadata.message_id]))
    assert time.monotonic() - start < 5
    assert [*transfer]
    assert replies(uploads.pull_messages(grid, [slow.metadata.message_id]))


def test_a_superlink_that_fails_loses_no_reply(
    link: SuperLink, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that were read, which it has deleted, nor the one whose part it failed for."""
    messages = sent(link, grid)
    for message, values in zip(messages, VALUES, strict=True):
        assert [*link.upload(message, values)]
    ids = [message.metadata.message_id for message in messages]
    numbers, pull = count(), runtime_handlers.pull_object

    def fail_once(*words: Any) -> Any:
        if next(numbers) == 9:  # a reply has six parts, and the last one is asked for twice
            raise httpx.HTTPStatusError("locked", request=REQUEST, response=httpx.Response(500))
        return pull(*words)

    monkeypatch.setattr(runtime_handlers, "pull_object", fail_once)
    polls = Polls(grid, simulated=False)
    first = replies(polls.pull(ids))
    assert [*first] == ids[:1]
    second = replies(polls.pull(ids[1:]))
    for i, values in zip(ids, VALUES, strict=True):
        assert np.array_equal((first | second)[i], values)


def test_a_reply_that_the_superlink_gave_up_is_an_error(
    link: SuperLink, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, _ = sent(link, grid)
    monkeypatch.setattr("flwr.supercore.corestate.in_memory_corestate." + TTL, -1)
    next(link.upload(slow, VALUES[0]))
    (reply,) = uploads.pull_messages(grid, [slow.metadata.message_id])
    assert reply.has_error()
    assert reply.metadata.reply_to_message_id == slow.metadata.message_id
    assert "could not be found" in (reply.error.reason or "")


def upload_damaged(link: SuperLink, message: Message) -> None:
    """A node's reply whose metrics Flower cannot decode; a SuperLink only compares hashes."""

    def part(kind: str, children: list[str], body: bytes) -> tuple[str, bytes]:
        content = f"{kind} {','.join(children)} {len(body)}".encode() + HEAD_BODY_DIVIDER + body
        return get_object_id(content), content

    reply = Message(RecordDict(), reply_to=message)
    metrics, *_ = parts = [part("MetricRecord", [], b"\xff\xff")]
    parts.append(part("RecordDict", [metrics[0]], json.dumps({"m": metrics[0]}).encode()))
    body = reply.deflate().split(HEAD_BODY_DIVIDER, 1)[1]
    parts.append(part("Message", [parts[1][0]], body))
    tree = ObjectTree(object_id=metrics[0])
    for name, _ in parts[1:]:
        tree = ObjectTree(object_id=name, children=[tree])
    reply.metadata.__dict__["_message_id"] = parts[2][0]
    session, bare = link.state.start_session(link.run_id), remove_content_from_message(reply)
    assert link.state.store_message_and_object_tree(bare, tree, session)[0]
    for name, content in parts:
        assert link.state.store_object(link.run_id, session, name, content)


def test_a_reply_that_flower_cannot_decode_ends_no_run(
    link: SuperLink, grid: HttpGrid, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = sent(link, grid)
    ids = [bad.metadata.message_id, good.metadata.message_id]
    upload_damaged(link, bad)
    assert [*link.upload(good, VALUES[1])]
    assert replies(uploads.pull_messages(grid, ids)).keys() == {ids[1]}
    (reply,) = uploads.pull_messages(grid, ids[:1])
    assert reply.has_error()
    assert reply.metadata.reply_to_message_id == ids[0]
    (line,) = [line for line in caplog.messages if "cannot be read" in line]
    assert line.startswith("a reply cannot be read (")


def test_a_node_whose_handshake_cannot_be_decoded_is_asked_once(
    link: SuperLink, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    roster, pushed, push = Roster(lambda: 0.0), list[Message](), grid.push_messages

    def answered(messages: Any) -> list[str]:
        messages = [*messages]
        ids = [*push(messages)]
        upload_damaged(link, messages[0])
        pushed.extend(messages)
        return ids

    monkeypatch.setattr(grid, "push_messages", answered)
    link.state.deactivate_node(link.nodes[1])
    for _ in range(4):
        roster.update(grid)
    assert [message.metadata.dst_node_id for message in pushed] == link.nodes[:1]
    assert [*roster.refused] == link.nodes[:1]


def test_a_round_ends_at_its_timeout_with_the_replies_that_are_complete(
    link: SuperLink, grid: HttpGrid
) -> None:
    slow, fast = sent(link, grid)
    next(link.upload(slow, VALUES[0]))
    assert [*link.upload(fast, VALUES[1])]
    ids = [slow.metadata.message_id, fast.metadata.message_id]
    start = time.monotonic()
    sent_to = dict(zip(ids, link.nodes, strict=True))
    assert replies(MessageFleet(grid)._receive(sent_to, 1.0)).keys() == {ids[1]}
    assert 1 <= time.monotonic() - start < 5


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_reply_after_its_round_is_read_and_ignored_in_a_later_one(
    link: SuperLink, grid: HttpGrid, has_begun: bool
) -> None:
    """Its parts would stay at the SuperLink; a message without a reply is over after its TTL."""
    fleet, store = MessageFleet(grid), cast(Any, link.state.object_store).store

    def round_of(messages: list[Message]) -> set[str]:
        ids = [message.metadata.message_id for message in messages]
        assert [*link.upload(messages[1], VALUES[1])]
        sent_to = dict(zip(ids, link.nodes, strict=True))
        assert replies(fleet._receive(sent_to, 0.3)).keys() == {ids[1]}
        return {*fleet._late}

    slow, _ = first = sent(link, grid)
    transfer = link.upload(slow, VALUES[0])
    if has_begun:
        next(transfer)
    assert round_of(first) == {slow.metadata.message_id}
    assert len([*transfer]) >= 5
    kept = len(store)
    lost, _ = second = sent(link, grid)
    assert round_of(second) == {lost.metadata.message_id}
    assert len(store) < kept
    assert not cast(Any, grid)._client._begun
    stored = cast(Any, link.state).message_ins_store[lost.metadata.message_id]
    stored.metadata.__dict__["_ttl"] = 0.0
    last, _ = third = sent(link, grid)
    assert round_of(third) == {last.metadata.message_id}
    assert not cast(Any, grid)._client._begun


def test_the_reply_of_a_node_that_was_offline_for_a_while_counts(
    link: SuperLink, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink would give its message up if its reply were asked for in that time."""
    away, other = sent(link, grid)
    ids = [away.metadata.message_id, other.metadata.message_id]
    events = iter(
        [
            lambda: link.state.deactivate_node(link.nodes[0]),
            lambda: link.state.acknowledge_node_heartbeat(link.nodes[0], 1000.0),
            lambda: [*link.upload(away, VALUES[0])],
            lambda: [*link.upload(other, VALUES[1])],
        ]
    )
    fleet = MessageFleet(grid)
    monkeypatch.setattr(fleet._polls, "pause", lambda waited: next(events)() and 0.0)
    received = replies(fleet._receive(dict(zip(ids, link.nodes, strict=True)), 60.0))
    assert received.keys() == {*ids}


@pytest.mark.parametrize("returns", [False, True])
def test_a_node_that_was_offline_is_not_awaited_after_the_others(
    link: SuperLink, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """It is dead, or it may have restarted without the message: a round does not wait for it."""
    away, other = sent(link, grid)
    ids = [away.metadata.message_id, other.metadata.message_id]
    link.state.deactivate_node(link.nodes[0])
    link.state.acknowledge_node_heartbeat(link.nodes[1], 1000.0)  # as often: it stays online
    fleet, waits = MessageFleet(grid), count()
    monkeypatch.setattr(fleet._polls, "pause", lambda waited: next(waits) * 0.0)
    receiving = fleet._receive(dict(zip(ids, link.nodes, strict=True)), 5.0)
    assert [*link.upload(other, VALUES[1])]
    first = next(receiving)
    assert first.metadata.reply_to_message_id == ids[1]
    if returns:
        link.state.acknowledge_node_heartbeat(link.nodes[0], 1000.0)
    assert [reply.has_error() for reply in receiving] == [True] * (not returns)
    assert next(waits) < 2


def test_flowers_own_waits_are_as_before_afterwards(link: SuperLink, grid: HttpGrid) -> None:
    from flwr.supercore.constant import PULL_MAX_TRIES_PER_OBJECT
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    def tries() -> int:
        return cast(int, cast(Any, pull_objects).__kwdefaults__["max_tries_per_object"])

    _, fast = sent(link, grid)
    assert [*link.upload(fast, VALUES[1])]
    assert replies(uploads.pull_messages(grid, [fast.metadata.message_id]))
    assert tries() == PULL_MAX_TRIES_PER_OBJECT > 1
