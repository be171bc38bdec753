"""FedAvgM: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.

Hsu, Qi, Brown. 2019, arXiv:1909.06335, section 4.

    client  w <- w - lr g_i(w)                                        K steps from w^t
    server  v <- beta v + (w_bar - w^t);   w^{t+1} = w^t + server_lr v

When to use: if FedAvg's updates oscillate from round to round. The memory is one vector on
the server; clients are stateless and may join and leave. The fixed point is FedAvg's. Momentum
multiplies a constant update by up to 1 / (1 - beta), so lower server_lr or lr if it oscillates.

Where we differ: clients count equally; the paper weights them by their examples
(weighting=examples). Nesterov's form, as in Flower's FedAvgM, steps along (w_bar - w^t) + beta v
instead.
"""  # noqa: E501 - the paper's title

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fedaccord.core import Cohort, LocalRule, Model, Vector, option
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies.fedavg import FedAvgClient


class ServerState(NamedTuple):
    v: Vector  # (..., d), momentum


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FederatedStrategy):
    assumes_sgd = False
    linear = True
    takes_weights = True
    averages = True
    synchronous = ""

    beta: float = option(0.9, "server momentum", low=0, high=1)
    server_lr: float = option(1.0, "server rate", low=0)

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def init(self, w: Vector) -> ServerState:
        return ServerState(v=torch.zeros_like(w))

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        v = self.beta * state.v + (cohort.mean(ups.w) - w)
        return w + self.server_lr * v, ServerState(v)
