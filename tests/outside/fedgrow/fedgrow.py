"""FedGrow: FedAvg with a proximal term that grows over the run.

An example for CONTRIBUTING.md, without a paper.

    client  w <- w - lr (g_i(w) + mu_t (w - w^t)),   mu_t = mu (t + 1) / T      K steps from w^t
    server  w^{t+1} = w_bar, the mean of the active clients' models

When to use: to see how a method of another package is written.
"""

from dataclasses import dataclass
from typing import Any

from fedaccord.core import Cohort, Direction, LocalConfig, LocalRule, Model, Vector, option
from fedaccord.strategies import FederatedStrategy


@dataclass(frozen=True)
class FedGrowClient(LocalRule):
    mu: float

    def direction(self, down: Model, state: Any, config: LocalConfig) -> Direction:
        mu_t = self.mu * (config.round + 1) / config.rounds
        return Direction(rho=mu_t, anchor=down.w)


@dataclass(frozen=True, kw_only=True)
class FedGrow(FederatedStrategy):
    linear = True  # the mean of server steps is the server step of the mean: gossip may mix them
    takes_weights = True  # weighting=examples is allowed
    averages = True  # the server step reads cohort.mean(ups.w) alone: dp and robust means are fine
    anneals = True  # mu_t depends on the number of rounds

    mu: float = option(0.1, "strength of the proximal term in the last round", low=0)

    def rule(self) -> LocalRule:
        return FedGrowClient(self.mu)

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        return cohort.mean(ups.w), state
