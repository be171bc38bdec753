"""The cost of a method per client and round, and its states, computed from its types."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.client_half import ClientHalf, GradientHook
from fedaccord.core.cohort import Reply
from fedaccord.core.privacy import Privacy, guarantee_of
from fedaccord.core.rounds import (
    Solution,
    broadcast,
    client_round,
    descend,
    first_state,
    server_round,
)
from fedaccord.core.rule import Direction, LocalConfig
from fedaccord.core.topology import ServerHalf
from fedaccord.core.vectors import Vector, leaves

SHAPES = ((6, 8), (8,))  # of a model without values
CLIENTS, ROUNDS = (0, 1, 2), 3  # client 0 takes part in the first round and in the last


class Cost(NamedTuple):
    """The cost of a round for an active client, and the size of the states, in vectors of d."""

    down: float
    up: float  # as the server reads them; see `upload_bytes` for uploads that plug-ins encode
    gradients: float  # evaluations per local step
    client: float  # persistent client state
    server: float  # server state with the model, without vectors of past rounds


def cost_of(method: ServerHalf, half: ClientHalf) -> Cost:
    """The cost of a client that returns after a missed round, measured with a tiny model of zeros.

    PyTorch's meta device would need no values, but its first use loads the compiler: seconds.
    """
    promise = guarantee_of(half.plugins)
    if promise and promise.local:  # its noise is known only when a run has begun
        privacy = Privacy(
            releases=0, multiplier=0.0, clip=promise.clip, share=1.0, adaptive=False, local=True
        )
        half = half.at(privacy)
    d = sum(torch.Size(shape).numel() for shape in SHAPES)
    w = torch.zeros(d)
    s, states = first_state(method, w, len(CLIENTS)), {}
    is_decentralised = method.topology.is_decentralised
    for t in range(ROUNDS):
        replies = []
        for i in CLIENTS if is_decentralised or t != 1 else CLIENTS[1:]:
            down = broadcast(method, s, i)
            config = LocalConfig(
                round=t,
                rounds=ROUNDS,
                lr=0.1,
                weight_decay=0.1,
                clip_norm=1.0,
                client=i,
                seed=0,
                shapes=SHAPES,
            )
            if i not in states:
                states[i] = half.init(w, w, config)
            solve = _Solver(1)
            visit = client_round(half, down, states[i], config._replace(steps=1), solve)
            if (t, i) == (ROUNDS - 1, 0):
                twice = _Solver(2)
                client_round(half, down, states[i], config._replace(steps=2), twice)
                server = [part for part in s.server if not isinstance(part, dict)]
                return Cost(
                    down=_size(down) / d,
                    up=sum(v.nbytes for v in _read(half, visit.up, down, w)) / w.nbytes,
                    gradients=twice.gradients - solve.gradients,
                    client=_size(visit.state) / d,
                    server=(s.w.numel() + sum(map(_size, (*server, s.moments)))) / s.w.numel(),
                )
            states[i] = visit.state
            decoded = half.decode(visit.up, down, w)
            replies.append(Reply(i, decoded.up, 1, 1, decoded.w_i0))
        if is_decentralised:  # no server step changes the states' sizes
            s = s._replace(t=t + 1)
        else:
            s = server_round(method, half, s, replies).state
    raise AssertionError("client 0 takes part in the last round")


def upload_bytes(cost: Cost, half: ClientHalf, like: Vector) -> float:
    """Bytes of an upload of a model like ``like`` (d,), as the plug-ins encode it."""
    share = math.prod(plugin.wire_share(like) for plugin in half.plugins)
    return cost.up * like.nbytes * share


def _read(half: ClientHalf, up: Any, down: Any, like: Vector) -> list[Tensor]:
    """The vectors of an upload, without single numbers."""
    decoded = half.decode(up, down, like)
    return [v for _, v in leaves(decoded) if v.numel() > 1]


class _Solver:
    """Takes steps without values and counts the gradients."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.gradients = 0

    def __call__(self, w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
        def at(point: Vector) -> Tensor:
            self.gradients += 1
            return point.new_zeros(())

        w, g = torch.zeros_like(w_i0), torch.zeros_like(w_i0)
        return descend(w, g, [at] * self.steps, direction, hook)


def _size(value: Any) -> int:
    """Elements of the vectors, without single numbers."""
    return sum(vector.numel() for _, vector in leaves(value) if vector.numel() > 1)
