"""Scaffnew, or ProxSkip: Local Gradient Steps Provably Lead to Communication Acceleration.

Mishchenko, Malinovsky, Stich, Richtarik: ProxSkip: Yes! Local Gradient Steps Provably Lead to
Communication Acceleration! Finally! ICML 2022, arXiv:2202.09357, Algorithm 2.

    server  K_t ~ Geometric(p), one draw per round for all clients
    client  w <- w - lr (g_i(w) - h_i)                                K_t steps from w^t
    server  w^{t+1} = w_bar
    client  h_i <- h_i + (p / lr) (w^{t+1} - w_{i,K})

The paper flips a coin after every step, which ends a round with probability p: K_t is the number of
flips. A client receives w^{t+1} at its next visit, so until then it keeps

    h = h_i - (p / lr) w_{i,K},   from which h_i = h + (p / lr) w^t at the next visit

When to use: as SCAFFOLD, if every client takes part in every round: it is exact, sends one model
each way and keeps one vector. On smooth and strongly convex problems it needs the square root
of the number of rounds of gradient descent. sum of h_i = 0 in every round.

Where we differ: we follow the paper. All clients must take part (fraction-train=1), and a round
with a lost reply does not count. The rate is constant and a round has 1 / p steps on average:
lr-decay, local-steps and local-epochs have no effect.
"""

import random
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
from fedaccord.plugins.gossip import Gossip


class ClientState(NamedTuple):
    h: Vector  # (..., d), h_i - (p / lr) w_{i,K}


@dataclass(frozen=True)
class ScaffnewClient(LocalRule):
    p: float

    @property
    def needs_w_init(self) -> bool:
        return True  # a rounded w^0 would stay in the sum of h_i

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(h=(-self.p / config.lr) * w_init)  # h_i = 0

    def h_i(self, down: Model, state: ClientState, config: LocalConfig) -> Vector:
        return state.h + (self.p / config.lr) * down.w

    def direction(self, down: Model, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=-self.h_i(down, state, config))

    def remember(
        self, read: Model, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        h_i = self.h_i(down, state, result.config)
        return ClientState(h=h_i.sub_(read.w, alpha=self.p / result.config.lr))


@dataclass(frozen=True, kw_only=True)
class Scaffnew(FederatedStrategy):
    takes_weights = True
    beyond_sums = ""  # but not `averages`: the h_i sum to zero for the plain mean alone
    fixed_anchor = "h_i is computed from the models received, not from a separate anchor"
    all_clients = True
    assumes_sgd = True  # h_i is in units of its rate
    replaces: ClassVar = {
        "local_steps": "scaffnew draws the steps of a round, with scaffnew.p",
        "local_epochs": "scaffnew draws the steps of a round, with scaffnew.p",
        "lr_decay": "the rate of scaffnew is constant",
    }
    refuses: ClassVar = {Gossip: "h_i needs the mean of all clients; use scaffold"}

    p: float = option(0.1, "probability that a local step is the last of a round", above=0, high=1)

    def rate(self, t: int) -> float:
        return self.lr

    def steps_of_round(self, t: int) -> int:
        coin, K = random.Random(f"scaffnew {self.seed} {t}"), 1
        while coin.random() >= self.p:
            K += 1
        return K

    @property
    def local_length(self) -> str:
        return f"{1 / self.p:.4g} steps on average"

    def rule(self) -> LocalRule:
        return ScaffnewClient(self.p)

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        return cohort.mean(ups.w), state
