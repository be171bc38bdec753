"""A federation as nothing but the round's pure functions, on the least squares of the references.

`federate` goes through `fedaccord.core.rounds` alone: no messages, no modules, no files. Vectors
are float64, gradients A^T (A w - b) exactly. It has the settings of a run (rates, weight decay,
clip, weighting, plug-ins, graph) from the method itself, so a case is a method and a schedule.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedaccord.core.client_half import GradientHook
from fedaccord.core.cohort import Reply
from fedaccord.core.privacy import Normal
from fedaccord.core.rounds import (
    ClientRound,
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
from tests.reference.problem import Array, Batches, Cohorts, LeastSquares, steps_of

Rows = Sequence[Any] | None  # the rows of every step's batch; None: all of them


class History(NamedTuple):
    """What `federate` returns: T rounds, C clients, d parameters; m nodes without a server."""

    weights: Tensor  # (T+1, d), w^t; without a server (T+1, m, d)
    averages: Tensor  # (T+1, d): A_P[w_{i,K}], w^{t+1} where it is not sent; row 0: w^0
    clients: list[Any]  # every client's last state; None: never active
    states: list[list[Any]]  # every client's state after every round; row 0: before the first
    server: list[Any]  # the method's server state after every round; row 0: before the first
    metrics: list[dict[str, float]]  # of every round: what the topology says, "down", "up"
    headline: Tensor  # (d,), the model that is evaluated and returned
    end: RoundState


class Dense:
    """The local steps of one client (A (n, d), b (n,)), or of clients in a stack (A (C, n, d)).

    steps: for each step the rows of its batch.
    """

    def __init__(self, A: Tensor, b: Tensor, steps: Sequence[Any]) -> None:
        self.A, self.b, self.steps = A, b, steps
        self.gradients = 0

    def __call__(self, w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
        w, g = w_i0.clone(), torch.empty_like(w_i0)
        gradients = (self._at(rows, g) for rows in self.steps)
        solution = descend(w, g, gradients, direction, hook)
        if w.ndim == 1:
            return solution
        return solution._replace(steps=torch.full((len(w), 1), float(solution.steps)).to(w))

    def _at(self, rows: Any, g: Vector) -> Any:
        A = self.A if rows is None else _take(self.A, rows, -2)
        b = self.b if rows is None else _take(self.b, rows, -1)

        def gradient_at(point: Vector) -> Tensor:
            self.gradients += 1
            error = (A @ point[..., None]).squeeze(-1) - b
            g.copy_((A.mT @ error[..., None]).squeeze(-1))
            return 0.5 * error.square().sum(-1)

        return gradient_at


def _take(x: Tensor, rows: Any, dim: int) -> Tensor:
    """Rows (n,) of one client, or (C, n), as many of each."""
    index = torch.as_tensor(np.asarray(rows))
    if x.ndim + dim == 0:
        return x.index_select(dim, index)
    return torch.stack([x_i.index_select(dim, r) for x_i, r in zip(x, index, strict=True)])


def config_of(method: FederatedStrategy, t: int, T: int, client: Any, shapes: Any) -> LocalConfig:
    """The settings of one local round, as a method's run has them."""
    return LocalConfig(
        round=t,
        rounds=T,
        lr=method.rate(t),
        weight_decay=method.weight_decay,
        clip_norm=method.clip_norm,
        client=client,
        seed=method.seed,
        shapes=shapes,
        hidden=[i for i, shape in enumerate(shapes) if len(shape) > 1][:-1],
    )


class Federation:
    """A method and its clients, between two rounds."""

    def __init__(
        self,
        method: FederatedStrategy,
        problem: LeastSquares,
        w0: Array,
        rounds: int,
        *,
        local_steps: int | Sequence[int] = 0,
        batches: Batches | None = None,
        examples: Sequence[int] | None = None,
        shapes: Any = None,
        states: Mapping[int, Any] | None = None,
        server: Any = None,
    ) -> None:
        self.method, self.half = method, method.client_half()
        self.A, self.b = torch.from_numpy(problem.A), torch.from_numpy(problem.b)
        self.w0, self.T = torch.from_numpy(np.array(w0)), rounds
        self.local_steps = local_steps
        self.batches, self.examples = batches, examples
        self.shapes = shapes or [[1, problem.dim]]
        self.s = first_state(method, self.w0, problem.num_clients)
        if server is not None:
            self.s = self.s._replace(server=server)
        self.states: dict[int, Any] = dict(states or {})
        self.normal: Normal | None = None  # the noise of private sums

    def state(self, i: int, down: Any) -> Any:
        """The client's state; before its first visit it has w^0 where its rule asks for it."""
        if i not in self.states:
            w = self.w0 if getattr(down, "w", None) is None else down.w
            assert not self.half.needs_w_init or self.s.w_init is not None
            w_init = self.w0 if self.half.needs_w_init else torch.full_like(w, torch.nan)
            self.states[i] = self.half.init(w, w_init, self.config(i))
        return self.states[i]

    def config(self, client: Any) -> LocalConfig:
        config = config_of(self.method, self.s.t, self.T, client, self.shapes)
        first = client if isinstance(client, int) else client[0]  # a stack takes equal steps
        return config._replace(steps=len(self.steps(first)))

    def steps(self, i: int) -> Sequence[Any]:
        if self.batches is not None:
            return self.batches[self.s.t][i]
        return [None] * steps_of(self.local_steps or self.method.steps_of_round(self.s.t), i)

    def train(self, i: int, down: Any) -> ClientRound:
        solver = Dense(self.A[i], self.b[i], self.steps(i))
        return client_round(self.half, down, self.state(i, down), self.config(i), solver)

    def take(self, active: Sequence[int]) -> tuple[Tensor, dict[str, float]]:
        """One round: the average of the local models, and the metrics."""
        replies, traffic, like = [], {"down": 0.0, "up": 0.0}, self.w0.to("meta")
        for i in active:
            down = broadcast(self.method, self.s, i)
            visit = self.train(i, down)
            self.states[i] = visit.state
            traffic["down"] += size(down) / len(self.w0)
            traffic["up"] += size(visit.up) / len(self.w0)
            decoded, examples = self.half.decode(visit.up, down, like), (self.examples or {i: 1})[i]
            steps = int(visit.result.steps)
            replies.append(Reply(i, decoded.up, steps, examples, decoded.w_i0))
        result = server_round(self.method, self.half, self.s, replies, self.normal)
        self.s = result.state
        w_bar = self.method.topology.average(self.s.w)
        if not self.method.topology.is_decentralised and getattr(result.ups, "w", None) is not None:
            w_bar = result.cohort.mean(result.ups.w)
        return w_bar, result.metrics | traffic


def federate(
    method: FederatedStrategy, problem: LeastSquares, w0: Array, schedule: Cohorts, **more: Any
) -> History:
    """A run over the cohorts of ``schedule``; ``more`` as in `Federation`."""
    clients = range(problem.num_clients)
    f = Federation(method, problem, w0, len(schedule), **more)
    weights, averages, metrics = [f.s.w], [f.w0], []
    states, server = [[f.states.get(i) for i in clients]], [f.s.server]
    for active in schedule:
        w_bar, row = f.take(active)
        weights.append(f.s.w)
        averages.append(w_bar)
        metrics.append(row)
        states.append([f.states.get(i) for i in clients])
        server.append(f.s.server)
    headline = method.topology.average(method.output_model(f.s.w, f.s.server))
    return History(
        *(torch.stack(weights), torch.stack(averages), states[-1], states, server, metrics),
        *(headline, f.s),
    )


def size(value: Any) -> int:
    return sum(vector.numel() for _, vector in leaves(value))


def base(state: Any) -> Any:
    """The method's own part of a client's state."""
    while hasattr(state, "base"):
        state = state.base
    return state


def client_vectors(states: Sequence[Any], name: str) -> Tensor:
    """(C, d) of one field of the clients' states, a plug-in's or the method's own."""

    def field(state: Any) -> Tensor:
        while not hasattr(state, name):
            assert hasattr(state, "base"), f"no client state has {name!r}: {type(state)._fields}"
            state = state.base
        return getattr(state, name)  # type: ignore[no-any-return]

    return torch.stack([field(state) for state in states])


def close(values: Any, expected: Any, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(
        np.asarray(values), np.asarray(expected), rtol=tolerance, atol=tolerance
    )
