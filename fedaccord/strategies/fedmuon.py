"""FedMuon: Accelerating Federated Learning with Matrix Orthogonalization.

Liu, Shang, Zhou, Liu, Liu, Liu. 2025, arXiv:2510.27403, Algorithm 2.

    client  the optimiser's vectors start at their mean over the last round's clients
            w <- w - lr ((1 - beta) p + beta G)                       K steps from w^t
            p = Muon's step along g_i(w), see core/optimizer.py
    server  w^{t+1} = w_bar;   the mean of the optimiser's vectors after the last step
            G = mean over active of (w_{i,0} - w_{i,K}) / (K_i lr),   G = 0 in round 1

When to use: to train matrices, as in transformers and convolutions, with few clients in a round: a
common momentum and direction align the orthogonalised steps of different clients. Clients are
stateless; four vectors are sent down and three up. Choose lr as for AdamW. G is FedCM's delta, and
a bias remains as there.

Where we differ: beta is the paper's alpha. Its code uses Muon for all matrices, with a rate of
their own, and resets the moments of all other parameters in every round; here embeddings and the
output layer use AdamW too, at one rate, and all moments are averaged. Weight decay is a part of p,
as in the code: otherwise G, which contains it, would amplify it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fedaccord.core import Cohort, Direction, LocalConfig, LocalRule, Model, Vector, option
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies.fedcm import mean_step


class Down(NamedTuple):
    w: Vector
    G: Vector


class ServerState(NamedTuple):
    G: Vector  # (d,)


@dataclass(frozen=True)
class FedMuonClient(LocalRule):
    receives = Down

    beta: float

    def direction(self, down: Down, state: Any, config: LocalConfig) -> Direction:
        return Direction(mix=self.beta, along=down.G)


@dataclass(frozen=True, kw_only=True)
class FedMuon(FederatedStrategy):
    assumes_sgd = False
    takes_weights = True
    reads_starts = True
    synchronous = "clients begin with the mean of the optimisers' vectors of one whole round"
    refuses: ClassVar = {
        Gossip: "a server averages the optimisers' vectors; use dfedavg with optimizer=muon"
    }
    replaces: ClassVar = {
        "optimizer": "the method has its own",
        "optimizer_state": "the method averages the vectors of its optimiser",
    }
    cost_note = "up 1 more under relaxed initialisation"

    beta: float = option(0.5, "share of the mean direction in a step", low=0, high=1, tried="0.5")

    @property
    def beyond_sums(self) -> str:
        return "" if self.local_steps else "the number of steps of each client (set local-steps)"

    @property
    def optimizer_name(self) -> str:
        return "muon"

    def own_state(self) -> str:
        return "average"

    def rule(self) -> LocalRule:
        return FedMuonClient(self.beta)

    def init(self, w: Vector) -> ServerState:
        return ServerState(G=torch.zeros_like(w))

    def broadcast(self, w: Vector, state: ServerState, client: object) -> Down:
        return Down(w, state.G)

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        return cohort.mean(ups.w), ServerState(mean_step(ups.w, cohort))
