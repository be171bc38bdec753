"""The state between two rounds as tensors and plain values, and when it is written down."""

import pytest
import torch

from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import failed_round, first_state, server_round
from fedaccord.core.vectors import leaves
from fedaccord.federation.checkpoint import Pace, pack, unpack
from fedaccord.strategies import METHODS


@pytest.mark.parametrize("name", ["fedavg", "fedinit", "scaffold", "afedpd", "fedadam"])
def test_a_state_comes_back_whole(name: str) -> None:
    method = METHODS[name]()
    half, w = method.client_half(), torch.linspace(-1, 1, 4)
    s = first_state(method, w, 3)
    fields = len(half.rule.sends._fields)
    for i in range(2):
        replies = [Reply(i, half.rule.sends(*[w + i] * fields), 1, 1)]
        s = server_round(method, half, s, replies).state
    s = failed_round(failed_round(s, True), True)._replace(buffers=torch.arange(3.0), clock=2.5)
    copy = unpack(method, *pack(s))
    assert (copy.t, copy.failed) == (4, 2)
    assert copy.accepted.tolist() == [0, 1, -1]
    assert torch.equal(copy.w, s.w)
    assert copy.clock == 2.5
    assert torch.equal(copy.buffers, s.buffers)
    assert copy.w_init is None or torch.equal(copy.w_init, s.w_init)
    assert (copy.w_init is None) == (s.w_init is None) == (name != "fedinit")
    assert type(copy.server) is type(s.server)
    one, other = dict(leaves(copy.server)), dict(leaves(s.server))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[field], other[field]) for field in one)


def test_checkpoints_take_a_twentieth_of_the_time_or_come_every_so_many_rounds() -> None:
    now = 0.0
    every, pace = Pace(3), Pace(0, lambda: now)
    assert [every.is_due(number) for number in range(1, 7)] == [False, False, True] * 2
    assert not pace.is_due(1)
    now = 1.0  # twenty times what the first one is taken to cost
    assert pace.is_due(2)
    with pace.timed():
        now += 2.0
    now += 39.0
    assert not pace.is_due(3)
    now += 1.0
    assert pace.is_due(4)
