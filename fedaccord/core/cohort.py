"""The input of the server step: the active clients, their replies, means and sums."""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.vectors import Vector

Cohorts = Sequence[Sequence[int]]  # the clients of each round


class Client(NamedTuple):
    """The server's record of a client."""

    id: int
    round: int  # t, the round that starts
    last_round: int  # of the model of its last accepted reply; -1: none yet
    delay: int = 0  # rounds until the server used that reply; 0 in synchronous rounds


class Decoded(NamedTuple):
    """An upload between the plug-ins' `decode` steps."""

    up: Any  # NamedTuple of vectors
    w_i0: Vector | None = None  # (d,), w_{i,0} if a plug-in moved it and the method reads it


class Reply(NamedTuple):
    """An accepted reply of one client."""

    client: int
    up: Any  # NamedTuple of vectors (d,)
    steps: int  # K_i
    examples: int  # samples of the client
    w_i0: Vector | None = None  # as in `Decoded`
    buffers: Vector | None = None  # (d_b,), as in `RoundState`
    delay: int = 0  # tau_i: rounds since the model that the client started from
    damping: float = 1.0  # omega(tau_i), factor of its models' distances from w


class PendingRequest(NamedTuple):
    """A training request without a reply yet during a server step, in buffered rounds."""

    client: int
    round: int  # s, whose model it received
    accepted: int  # as in `TrainInstruction`
    down: Any
    w_init: Vector | None = None
    buffers: Vector | None = None
    end: float = 0.0  # simulated seconds; 0: real time
    is_lost: bool = False  # the simulated device disconnects at the end


def seen(
    accepted: Tensor, delays: Tensor | None, pending: Sequence[PendingRequest]
) -> Tensor | None:
    """`Cohort.seen` of buffered rounds. A client whose reply to the model of round s was used in
    step t has missed the steps between s and t, and those after t; a pending request has missed
    all steps since s."""
    if delays is None:
        return None
    delays = delays.where(accepted >= 0, 0)  # a client that lost its state has no past rounds
    late = delays > 0
    step_rounds, begun = accepted + delays, accepted[late] - 1
    at_work = torch.tensor([request.round - 1 for request in pending], dtype=torch.int64)
    return torch.cat([step_rounds, step_rounds[late] - 1, begun, at_work])


def moved(reply: Reply, models: Iterable[str], base: Vector, w: Vector) -> Reply:
    """The reply with its models moved from the model ``base`` that the client received to w:
    w + damping (x - base)."""

    def move(x: Vector | None) -> Vector | None:
        return None if x is None else (x - base).mul_(reply.damping).add_(w)

    up = reply.up._replace(**{name: move(getattr(reply.up, name)) for name in models})
    return reply._replace(up=up, w_i0=move(reply.w_i0))


class Cohort:
    """The active clients P^t whose replies were accepted, in the order of their ids.

    Without a server every node is a server with one client, itself: a cohort of one client whose
    vectors are (m, d), and whose ``num_clients`` is 1.

    If a server step reads only sums, a cohort may have one upload, the mean of ``size`` uploads.
    """

    def __init__(
        self,
        clients: Sequence[int],
        *,
        round: int,
        num_clients: int,
        weights: Sequence[float],
        w: Vector,
        steps: Sequence[Any],
        lengths: Sequence[Any],
        starts: Sequence[Vector],
        anchor: Vector,
        accepted: Tensor,
        size: float | None = None,
        seen: Tensor | None = None,
        damping: Sequence[float] = (),
    ) -> None:
        self.clients = clients  # ids
        self.round = round  # t
        self.num_clients = num_clients  # C
        self.weights = weights  # of the mean, one for each client; all 1 for uniform
        self.w = w  # w^t, (d,); without a server (m, d)
        self.steps = steps  # K_i of each client; without a server one tensor (m, 1)
        self.lengths = lengths  # sum of the rates of each client, K_i eta_t, likewise
        self.starts = starts  # w_{i,0} of each client, (..., d); w^t if no plug-in moved it
        self.anchor = anchor  # (..., d), mean of the anchors of prox and dual terms; usually w^t
        self.accepted = accepted  # (C,) int64, last accepted round of every client, this one's too
        self.size = len(weights) if size is None else size  # P; of a mean alone, its clients
        # int64: the past rounds whose server state some client still needs
        self.seen = accepted if seen is None else seen
        self.damping = damping  # omega(tau_i) of each client; empty: all 1

    @property
    def participation(self) -> float:
        """P / C."""
        return self.size / self.num_clients

    def mean(self, xs: Iterable[Vector]) -> Vector:
        """A_P[x_i]: the mean over the active clients, with the run's weights; a fresh tensor.

        xs: a vector (..., d) for each active client, or (n, d).
        """
        return weighted_sum(xs, self.weights).div_(sum(self.weights))

    def of_mean(self) -> "Cohort":
        """The cohort of one upload, the mean of this one's, for a step that reads no more."""
        one = copy(self)
        one.weights, one.damping = [1.0], ()
        return one

    def undamped_mean(self, models: Iterable[Vector]) -> Vector:
        """A_P of w + (w_i - w) / omega(tau_i): the change of the clients' own memories."""
        if not self.damping:
            return self.mean(models)
        pairs = zip(models, self.damping, strict=True)
        return self.mean((x - self.w).div_(omega).add_(self.w) for x, omega in pairs)

    def sum(self, xs: Iterable[Vector]) -> Vector:
        """The plain sum over the active clients; a fresh tensor."""
        return weighted_sum(xs, [self.size / len(self.weights)] * len(self.weights))


def weighted_sum(xs: Iterable[Vector], weights: Sequence[float]) -> Vector:
    """The sum of weights[i] x_i, in their order, in one vector.

    Raises ValueError if there are no vectors, or not as many as weights.
    """
    total: Vector | None = None
    for weight, x in zip(weights, xs, strict=True):
        total = weight * x if total is None else total.add_(x, alpha=weight)
    if total is None:
        raise ValueError("expected at least one active client, got none")
    return total


def rows(replies: Sequence[Reply]) -> Any:
    """The replies' uploads as one NamedTuple with a tuple of vectors, one per client, in a field.

    A field that no client sent is None.
    """
    kind = type(replies[0].up)
    columns = zip(*(reply.up for reply in replies), strict=True)
    return kind(*(None if column[0] is None else column for column in columns))
