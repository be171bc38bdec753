"""FedCM: Federated Learning with Client-level Momentum.

Xu, Wang, Wang, Yao. 2021, arXiv:2106.10874, Algorithm 2.

    client  w <- w - lr (alpha g_i(w) + (1 - alpha) delta)            K steps from w^t
    server  delta = mean over active of (w_{i,0} - w_{i,K}) / (K_i lr),   delta = 0 in round 1
            w^{t+1} = w^t + server_lr (w_bar - w^t)

When to use: at low participation, with stateless clients. The server's momentum carries the recent
updates of other clients, at the cost of a second vector down; it suits cross-device federations. A
small alpha gives it more weight and can fail, as on VGG-11 in FedInit's experiments. A bias
remains. In our tuned runs it is above FedAvg on CIFAR-10, in short trainings, and below it on
Fashion-MNIST after 800 rounds in three settings of four ([side by side](../results/overview.md)).

Where we differ: server_lr multiplies the mean displacement, as released code does; the paper's
multiplies delta, the displacement divided by K lr, so the same step needs a rate of K lr server_lr
there. Each displacement is divided by its own client's K_i: delta is the mean of the clients' mean
steps, and a client with more steps has no more weight. Without a server every node has its own
delta, mixed like the models; an absent node keeps its delta. decay = outside
adds weight decay wd after the mixture, as the simulator of FedInit's authors does: delta contains
it, so it is amplified to wd / alpha. decay = inside is alpha (g + wd w). Under relaxed
initialisation delta uses the true displacement, and the plug-in also sends w_{i,0}. With another
optimiser than SGD a displacement is not a mean of directions: clients send d_bar, the mean of
alpha g_i(w) + (1 - alpha) delta over their steps, and delta is its mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from fedaccord.core.optimizer import SGD
from fedaccord.federation.strategy import FederatedStrategy


class Down(NamedTuple):
    w: Vector
    delta: Vector


class ServerState(NamedTuple):
    delta: Vector  # (..., d)


@dataclass(frozen=True)
class FedCMClient(LocalRule):
    receives = Down

    alpha: float
    decay: str

    def direction(self, down: Down, state: Any, config: LocalConfig) -> Direction:
        return Direction(
            scale=self.alpha,
            shift=(1 - self.alpha) * down.delta,
            decay=1.0 if self.decay == "outside" else self.alpha,
        )


class Up(NamedTuple):
    w: Vector
    d_bar: Vector  # mean of the directions of the steps


@dataclass(frozen=True)
class FedCMMeanClient(FedCMClient):
    """With another optimiser than SGD, whose displacement is not a mean of directions."""

    sends = Up
    reads_mean_direction = True

    def upload(self, w_K: Vector, down: Down, state: Any, result: LocalResult) -> Up:
        return Up(w_K, result.mean_direction())


def mean_step(local: Iterable[Vector], cohort: Cohort) -> Vector:
    """The mean over the active clients of (w_{i,0} - w_{i,K}) / (K_i lr); local: w_{i,K}."""
    clients = zip(cohort.starts, local, cohort.lengths, strict=True)  # lengths: K_i lr
    return cohort.mean((w_i0 - w_K) / K_lr for w_i0, w_K, K_lr in clients)


@dataclass(frozen=True, kw_only=True)
class FedCM(FederatedStrategy):
    assumes_sgd = False
    linear = True
    takes_weights = True
    reads_starts = True
    synchronous = "delta is a mean of steps along one earlier delta; the paper defines no other"
    cost_note = "up 2 under relaxed initialisation"

    alpha: float = option(
        0.1,
        "share of the gradient in a step",
        above=0,
        high=1,
        tried="0.05, 0.1, 0.5, 0.9 (FedCM); 0.05, 0.1 (MoFedSAM)",
    )
    server_lr: float = option(1.0, "server rate", low=0)
    decay: str = option(
        "outside", "weight decay after the mixture or in it", choices=("outside", "inside")
    )

    @property
    def beyond_sums(self) -> str:
        return "" if self.local_steps else "the number of steps of each client (set local-steps)"

    def rule(self) -> LocalRule:
        is_sgd = isinstance(self.own_optimizer(), SGD)
        return (FedCMClient if is_sgd else FedCMMeanClient)(self.alpha, self.decay)

    def init(self, w: Vector) -> ServerState:
        return ServerState(delta=torch.zeros_like(w))

    def broadcast(self, w: Vector, state: ServerState, client: object) -> Down:
        return Down(w, state.delta)

    def aggregate(
        self, w: Vector, ups: Any, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        delta = cohort.mean(ups.d_bar) if "d_bar" in ups._fields else mean_step(ups.w, cohort)
        return torch.lerp(w, cohort.mean(ups.w), self.server_lr), ServerState(delta)
