"""FedExP: Speeding Up Federated Averaging via Extrapolation.

Jhunjhunwala, Wang, Joshi. ICLR 2023, arXiv:2301.09604, Algorithm 1.

    client  w <- w - lr g_i(w)                                        K steps from w^t
    server  D_i = w^t - w_{i,K},   D_bar = their mean over the P active clients
            eta_g = max(1, sum of ||D_i||^2 / (2 P (||D_bar||^2 + epsilon)))
            w^{t+1} = w^t - eta_g D_bar
    output  (w^t + w^{t-1}) / 2,   w^{-1} = w^0

When to use: for longer server steps without a rate to tune. The less the clients' updates agree,
the larger the step along their mean. Traffic is FedAvg's, and clients are stateless and may join
and leave. The steps oscillate, so it returns the mean of the last two models.

Where we differ: we follow the paper. The released code multiplies epsilon by P and lets it fall
with the square of the local rate. epsilon is 0.001, as in its runs on CIFAR; updates with a mean
square of less than 2 epsilon leave eta_g at 1. Uploads by randk or qsgd without error feedback have
longer D_i, but nearly the same D_bar: eta_g is then up to 4 with updates that agree (randk, a tenth
of the numbers, 40 clients).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedaccord.core import Cohort, LocalRule, Model, Vector, option
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.dp import DP
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies.fedavg import FedAvgClient


class ServerState(NamedTuple):
    w_before: Vector  # (d,), w^{t-1}


@dataclass(frozen=True, kw_only=True)
class FedExP(FederatedStrategy):
    assumes_sgd = False
    takes_weights = True
    beyond_sums = "the norm of each client's update"
    synchronous = ""
    refuses: ClassVar = {
        Gossip: "its server rate is one number of all clients; use dfedavg",
        DP: "its server rate is of the norms of single updates, to which noise adds; use fedavg",
    }

    epsilon: float = option(
        0.001, "bounds the server rate for small updates", above=0, tried="0.001, 0.1"
    )

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def init(self, w: Vector) -> ServerState:
        return ServerState(w_before=w)

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        D_bar = w - cohort.mean(ups.w)
        squares = cohort.mean((w - w_K).square_().sum(-1, keepdim=True) for w_K in ups.w)
        spread = squares / (2 * (D_bar.square().sum(-1, keepdim=True) + self.epsilon))
        return w - spread.clamp_(min=1.0) * D_bar, ServerState(w_before=w)

    def output_model(self, w: Vector, state: ServerState) -> Vector:
        return (w + state.w_before) / 2
