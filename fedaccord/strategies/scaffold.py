"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020, arXiv:1910.06378, Algorithm 1, option II.

    client  w <- w - lr (g_i(w) - c_i + c)                            K steps from w^t
            c_i+ = c_i - c + d_bar,   d_bar = (w_{i,0} - w_{i,K}) / (K lr)
    server  w^{t+1} = w^t + server_lr (w_bar - w^t)
            c <- c + (1/C) sum over the active clients of (c_i+ - c_i)       C, not P

When to use: where the exact optimum counts and clients come back, as in cross-silo federations. It
is exact at any participation, but c_i ages while its client is away, and traffic is twice FedAvg's
both ways. On networks with noisy gradients it does not always beat FedAvg.

Where we differ: not from the paper. c and c_i start at zero, so mean over all clients of c_i = c
always; some released code starts them from the parameter values, which breaks that. d_bar is the
true displacement, so that c_i stays an average of gradients when relaxed initialisation moves the
start. With another optimiser than SGD a displacement is no such average: d_bar is the mean of the
steps' directions g_i(w) - c_i + c, and c_i+ the mean of their gradients. Clients count equally (no
weighting=examples): mean(c_i) = c is a plain mean.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fedaccord.core import (
    Cohort,
    Direction,
    LocalConfig,
    LocalResult,
    LocalRule,
    Vector,
    option,
)
from fedaccord.federation.strategy import FederatedStrategy


class Down(NamedTuple):
    w: Vector
    c: Vector


class Up(NamedTuple):
    w: Vector
    dc_i: Vector  # c_i+ - c_i


class ClientState(NamedTuple):
    c_i: Vector  # (..., d)


class ServerState(NamedTuple):
    c: Vector  # (..., d)


@dataclass(frozen=True)
class ScaffoldClient(LocalRule):
    receives = Down
    sends: ClassVar[Any] = Up
    reads_mean_direction = True

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(c_i=torch.zeros_like(w))

    def direction(self, down: Down, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=down.c - state.c_i)

    def upload(self, w_K: Vector, down: Down, state: ClientState, result: LocalResult) -> Any:
        return Up(w_K, dc_i=result.mean_direction().sub_(down.c))

    def remember(
        self, read: Any, down: Down, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(c_i=state.c_i + read.dc_i)


@dataclass(frozen=True, kw_only=True)
class Scaffold(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    linear = True
    synchronous = ""

    server_lr: float = option(1.0, "server rate: how far to go towards the average", low=0)

    def rule(self) -> ScaffoldClient:
        return ScaffoldClient()

    def init(self, w: Vector) -> ServerState:
        return ServerState(c=torch.zeros_like(w))

    def broadcast(self, w: Vector, state: ServerState, client: object) -> Down:
        return Down(w, state.c)

    def aggregate(
        self, w: Vector, ups: Up, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        w_bar = cohort.mean(ups.w)
        c = cohort.sum(ups.dc_i).div_(cohort.num_clients).add_(state.c)
        return torch.lerp(w, w_bar, self.server_lr), ServerState(c)
