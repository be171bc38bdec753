"""What every method exchanges and remembers, with each plug-in it takes, as records and back."""

from typing import Any, NamedTuple

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from fedaccord.core.client_half import GradientHook, state_like
from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import (
    RoundState,
    Solution,
    broadcast,
    client_round,
    descend,
    first_state,
    server_round,
)
from fedaccord.core.rule import Direction, LocalConfig
from fedaccord.core.vectors import Vector, leaves
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.wire.records import pack, unpack, unpack_state
from tests.wire.methods import COMBINATIONS, COMPRESSED, make
from tests.wire.wires import through_protobuf

C, T = 3, 3
SHAPES = ((3, 2), (3,))
D = 9


class Run(NamedTuple):
    server: RoundState
    clients: dict[int, Any]  # the last state of each client
    downs: list[Any]
    ups: list[Any]


def run(method: FederatedStrategy) -> Run:
    """Some rounds on f_i(w) = 1/2 ||w - i||^2; client 0 misses the second where it may."""
    half, w = method.client_half(), torch.linspace(-1, 2, D, dtype=torch.float64)
    s, states, downs, ups = first_state(method, w, C), {}, [], []
    for t in range(T):
        everyone = t != 1 or method.topology.is_decentralised or method.needed_replies(C) == C
        replies = []
        for i in range(0 if everyone else 1, C):
            config = LocalConfig(t, T, 0.1, 0.01, 1.0, i, 0, SHAPES, steps=2)
            downs.append(broadcast(method, s, i))
            state = states[i] if i in states else half.init(downs[-1].w, w, config)
            result = client_round(half, downs[-1], state, config, Solver(float(i)))
            states[i] = result.state
            ups.append(result.up)
            decoded = half.decode(result.up, downs[-1], w.to("meta"))
            replies.append(Reply(i, decoded.up, 2, 5, decoded.w_i0))
        s = server_round(method, half, s, replies).state
    return Run(s, states, downs, ups)


class Solver:
    def __init__(self, target: float) -> None:
        self.target = target

    def __call__(self, w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
        g = torch.empty_like(w_i0)

        def at(point: Vector) -> Tensor:
            torch.sub(point, self.target, out=g)
            return (point - self.target).square().sum() / 2

        return descend(w_i0.clone(), g, [at, at], direction, hook)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return type(a) is type(b) and all(map(same, a, b))
    return a is None and b is None


def packed(value: Any) -> list[ArrayRecord]:
    """As it stays in process, and as it comes out of a real message."""
    record = pack(value)
    copy = through_protobuf(RecordDict({"x": record}))["x"]
    assert isinstance(copy, ArrayRecord)
    return [record, copy]


@pytest.mark.parametrize(("name", "plugins"), COMBINATIONS + COMPRESSED)
def test_messages_and_states_come_back_equal(name: str, plugins: str) -> None:
    method = make(name, plugins)
    result = run(method)
    half = method.client_half()
    template = state_like(half, SHAPES)
    for state in result.clients.values():
        for record in packed(state):
            assert same(unpack_state(template, record), state)
    for record in packed(result.server.server):
        server = unpack_state(method.init(torch.empty(0)), record)
        assert same(server, result.server.server)
    like = torch.empty(D, dtype=torch.float64, device="meta")
    form = None if any(plugin.loses for plugin in half.plugins) else like
    for kind, messages, expected in (
        (half.receives, result.downs, like),
        (half.sends, result.ups, form),
    ):
        for record in packed(messages[-1]):
            assert same(unpack(kind, record, like=expected), messages[-1])


def test_the_server_of_afedpd_keeps_a_vector_for_each_last_seen_round() -> None:
    """Its `lam_bar_after` is the one dict of vectors that travels."""
    method = make("afedpd", "sam+ri")
    server = run(method).server.server
    assert [name for name, _ in leaves(server)] == ["lam_bar", "lam_bar_after.2"]
    half, w = method.client_half(), torch.ones(D, dtype=torch.float64)
    s = first_state(method, w, C)
    for t, i in enumerate((2, 0, 1)):
        config = LocalConfig(t, T, 0.1, 0.0, 0.0, i, 0, SHAPES)
        result = client_round(
            half, broadcast(method, s, i), half.init(w, w, config), config, Solver(i)
        )
        s = server_round(method, half, s, [Reply(i, result.up, 2, 5)]).state
    for record in packed(s.server):
        assert [*record] == ["lam_bar", "lam_bar_after.0", "lam_bar_after.1", "lam_bar_after.2"]
        copy = unpack_state(method.init(torch.empty(0)), record)
        assert same(copy, s.server)
        assert len({v.sum().item() for v in copy.lam_bar_after.values()}) == 3
