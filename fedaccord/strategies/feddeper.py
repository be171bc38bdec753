"""FedDeper: Depersonalized Federated Learning: Tackling Statistical Heterogeneity by Alternating Stochastic Gradient Descent.

Zhou, Li, Tang, Wang. 2022, arXiv:2210.03444, Algorithm 1.

    state   v_i, the personalised model, w^0 at first
    client  y = w^t, v = v_i; K times, on one batch, with the old v in both lines:
                y <- y - lr g_i(y) - rho (v + y - 2 w^t)
                v <- v - lr g_i(v)
            v_i <- (1 - lam) v + lam y
    server  w^{t+1} = w^t + server_lr (mean over active of y - w^t)

The y line splits into the direction that all methods share, rho / lr (y - 2 w^t), and the rest,
rho / lr v, which changes within the round and is therefore added to the gradient:

    lr g_i(y) + rho (v + y - 2 w^t) = lr ((g_i(y) + rho / lr v) + rho / lr (y - 2 w^t))

rho is a factor of the step, not scaled by lr: well below 1. When a client returns, w^t differs from
its v, and y overshoots by a = 1 - (1 - rho)^K times the difference, as relaxed initialisation does
by beta. If a round draws a share p of the clients, then in directions without curvature, where the
gradients change nothing, the mean of v_i - w^t over all clients is multiplied by
1 + a - p lam (1 + a) a round on average (server_lr 1). It grows, slowly at first, unless

    1 - (1 - rho)^K < p lam / (1 - p lam)             0.026 at 5%, 0.053 at 10% with lam 0.5

The default, 0.0005, allows K up to 108 with 10% of the clients and up to 51 with 5%, for example
the 50 steps of 5 epochs of 500 samples; fewer steps, larger cohorts or a larger lam allow more. On
Fashion-MNIST with 10 of 100 clients and K = 55, rho 0.002 and lam 0.5 ended 200 rounds with a loss
of 587,000 after a best one of 0.54, and on CIFAR-10 with K = 10, 0.03 diverged after 30 rounds;
0.0008 with lam 0.8, below the bound, ended 800 rounds above FedAvg at 10% and at 5%
(docs/results/full-length.md, docs/results/full-length-200.md).

When to use: if each client needs a model of its own beside the global one. v_i is that model; it
stays on the client, which should return. Traffic is FedAvg's at twice the gradients, and the
global fixed point is biased.

Where we differ: the paper does not say whether y and v use the same batch; here they do. Weight
decay acts on y and v alike, and the two gradients are clipped separately. The paper's rho and lam
are not known to us: the defaults are our own. Parameters that stay at the client are v_i's: they
follow its gradient, and y trains with them, so that rho = 0 is no longer FedAvg. With buffers = mean
they are y's.
"""  # noqa: E501 - the paper's title

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fedaccord.core import (
    Direction,
    LocalConfig,
    LocalResult,
    LocalRule,
    Model,
    Vector,
    option,
)
from fedaccord.strategies._own_model import ClientState, OwnModelClient, ends_at_v
from fedaccord.strategies.fedavg import FedAvg


class Buffers(NamedTuple):
    v: Vector  # (..., d), v_i during the steps
    first: Vector  # (..., d), the first of a step's gradients


@dataclass(frozen=True)
class FedDeperClient(OwnModelClient):
    rho: float
    lam: float

    def direction(self, down: Model, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(rho=self.rho / config.lr, anchor=2 * down.w)  # rho (y - 2 w^t)

    def gradient_init(
        self, w: Vector, down: Model, state: ClientState, config: LocalConfig
    ) -> Buffers:
        return Buffers(state.v.clone(), torch.empty_like(state.v))

    def step(self, g: Vector, g_v: Vector, buffers: Buffers, config: LocalConfig) -> None:
        v, lr = buffers.v, config.lr
        g.add_(v, alpha=self.rho / lr)  # rho v of the y line, with the old v
        v.mul_(1 - lr * config.weight_decay).add_(g_v, alpha=-lr)

    def remember(
        self, read: Model, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(v=torch.lerp(result.gradient, result.w_K, self.lam))


@dataclass(frozen=True, kw_only=True)
class FedDeper(FedAvg):
    assumes_sgd = True  # y and v have steps of their own
    tied = False

    rho: float = option(0.0005, "strength of the pull away from v, a factor of the step", low=0)
    lam: float = option(0.5, "mixing rate of y into v", low=0.5, high=1)

    def rule(self) -> LocalRule:
        own = ends_at_v(self.buffers, self.local_parameters)
        return FedDeperClient(own, self.rho, self.lam)
