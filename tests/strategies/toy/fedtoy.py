"""FedToy: FedAvg whose clients remember the mean gradient of their last visit.

A method that tests add to a copy of this repository; without a paper.

    client  w <- w - lr (g_i(w) + gamma m_i)       K steps from w^t; m_i = 0 before the first visit
            m_i <- (w^t - w_{i,K}) / (K lr)
    server  w^{t+1} = w^t + server_lr (w_bar - w^t), w_bar the mean of the active clients' models

When to use: to see that a method is its file, its reference and nothing else.

Where we differ: there is no paper to differ from.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fedaccord.core import (
    Cohort,
    Direction,
    LocalConfig,
    LocalResult,
    LocalRule,
    Model,
    Vector,
    option,
)
from fedaccord.federation.strategy import FederatedStrategy


class ClientState(NamedTuple):
    m: Vector  # (..., d), mean direction of the last visit


@dataclass(frozen=True)
class FedToyClient(LocalRule):
    gamma: float

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(torch.zeros_like(w))

    def direction(self, down: Model, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=self.gamma * state.m)

    def remember(
        self, read: Model, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(m=(result.w_i0 - result.w_K) / (result.steps * result.config.lr))


@dataclass(frozen=True, kw_only=True)
class FedToy(FederatedStrategy):
    linear = True
    averages = True
    takes_weights = True

    gamma: float = option(0.1, "share of the last visit's mean direction in each step", low=0)
    server_lr: float = option(0.5, "server rate", above=0)

    def rule(self) -> LocalRule:
        return FedToyClient(self.gamma)

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        return w + self.server_lr * (cohort.mean(ups.w) - w), state
