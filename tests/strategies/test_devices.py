"""On a GPU a client's local round never waits for it, and nothing of a round is stored elsewhere.

PyTorch's fake tensors know their device and no values: what would read one, and what mixes devices,
raises.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fedaccord.core.client_half import GradientHook
from fedaccord.core.cohort import Client, Reply
from fedaccord.core.plugin import joined
from fedaccord.core.rounds import (
    RoundState,
    Solution,
    client_round,
    descend,
    first_moments,
    server_round,
)
from fedaccord.core.rule import Direction, LocalConfig
from fedaccord.core.vectors import Vector, leaves, norm
from fedaccord.strategies import METHODS
from tests.wire.methods import COMBINATIONS, make

SHAPES = ((3, 4), (3,))
ON_THE_HOST = ("afedpd", "afedpdsam")  # count who is absent, on the host, which needs values
FULLEST = {name: plugins for name, plugins in COMBINATIONS if "gossip" not in plugins}


@pytest.fixture(scope="module", autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", lambda x: x)  # which needs a driver
        yield


def solve(w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
    w, g = w_i0.clone(), torch.empty_like(w_i0)

    def gradient_at(point: Vector) -> Tensor:
        g.copy_(2 * point)
        return norm(point).squeeze(-1)

    return descend(w, g, [gradient_at] * 2, direction, hook)


@pytest.mark.parametrize("name", METHODS)
def test_a_round_stays_on_the_gpu_and_does_not_wait(name: str) -> None:
    method = make(name, FULLEST[name])
    half, w = method.client_half(), torch.empty(15, dtype=torch.float64, device="cuda")
    clients = 2
    nodes, server = method.topology.begin(w, method.init(w), clients)
    replies = []
    for i in range(clients):
        config = LocalConfig(0, 2, 0.1, 0.01, 1.0, i, 0, SHAPES, steps=2)
        down = method.broadcast(*method.topology.view(nodes, server, i), Client(i, 0, -1))
        down = joined(down, first_moments(method))
        state = half.init(down.w, w, config)
        for _ in range(2):
            up, state, result = client_round(half, down, state, config, solve)
        assert on_the_gpu(up, state, result.w_K, result.loss)
        decoded = half.decode(up, down, w)
        replies.append(Reply(i, decoded.up, 2, 5, decoded.w_i0))
    if not method.topology.is_decentralised and name not in ON_THE_HOST:
        accepted = torch.tensor([-1] * clients)
        s = RoundState(0, nodes, w, server, accepted, moments=first_moments(method))
        step = server_round(method, half, s, replies)
        assert on_the_gpu(step.state.w, step.state.server)
        assert on_the_gpu(step.state.to(torch.device("cuda", 0)).w)


def on_the_gpu(*values: object) -> bool:
    return {v.device.type for value in values for _, v in leaves(value)} <= {"cuda"}


def test_what_waits_would_be_seen() -> None:
    w = torch.empty(3, device="cuda")
    with pytest.raises(DataDependentOutputException):
        float(norm(w))
    with pytest.raises(RuntimeError, match="same device"):
        w + torch.empty(3)
    assert not on_the_gpu((w.cpu(),)[0])
