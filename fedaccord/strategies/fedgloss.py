"""FedGloSS: Beyond Local Sharpness: Communication-Efficient Global Sharpness-aware Minimization for Federated Learning.

Caldarola, Cagnasso, Caputo, Ciccone. CVPR 2025, arXiv:2412.03752, Algorithm 1.

    server  e = radius D / ||D||,   D = the last round's pseudo-gradient, e = 0 in round 1
            broadcasts w~ = w^t + e
    client  w <- w - lr (g_i(w) + lam_i + alpha (w - w~))             K steps from w~
            lam_i <- lam_i + alpha (w_{i,K} - w~)
    server  lam_bar <- lam_bar + (P/C) alpha (w_bar - w~)             mean of lam_i over all clients
            D = w~ - w_bar;   w^{t+1} = w^t - D + lam_bar / alpha

FedDyn around a perturbed model: the server takes SAM's ascent once a round, on the global loss,
along a direction that it already has. The paper's sigma_k, sigma and beta
are -lam_i, -lam_bar and 1 / alpha.

When to use: as FedSpeed and FedSMOO, if the global model's sharpness matters and clients can afford
one gradient a step: there is no further traffic, and one vector on a client, which should return.
With sam.rho clients take local ascents too, as in the paper's main experiments. The radius leaves a
bias.

Where we differ: other descriptions of the method use the last step of the server, w^{t-1} - w^t, as
the pseudo-gradient; here it is D = w~ - w_bar, as in the paper's listing, without the step's
lam_bar / alpha. sigma is the mean of sigma_k over all clients, as in the listing; the released code
divides its steps by P once more, and raises both radii linearly over the first rounds from 0.001.
Clients count equally. The defaults are those of the code's runs on CIFAR-10.
"""  # noqa: E501 - the paper's title

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from fedaccord.core import Cohort, LocalRule, Model, Vector, norm, option
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.sam import EPS
from fedaccord.strategies.feddyn import FedDynClient, primal_dual_step


class ServerState(NamedTuple):
    lam_bar: Vector  # (d,)
    e: Vector  # (d,), included in the broadcast model


@dataclass(frozen=True, kw_only=True)
class FedGloSS(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    reads_anchors = True
    has_duals = True
    synchronous = ""
    refuses: ClassVar = {
        Gossip: "its perturbation is normalised by one server; use feddyn with sam.rho"
    }

    alpha: float = option(0.1, "strength of the dynamic regulariser, 1 / beta", above=0)
    radius: float = option(0.15, "L2 radius of the server's ascent", low=0)

    def rule(self) -> LocalRule:
        return FedDynClient(self.alpha)

    def init(self, w: Vector) -> ServerState:
        return ServerState(lam_bar=torch.zeros_like(w), e=torch.zeros_like(w))

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        D = w - cohort.mean(ups.w)  # w is w~, the broadcast
        w_next, lam_bar = primal_dual_step(self.alpha, ups.w, state.lam_bar, cohort)
        e = D.mul_(self.radius / (norm(D) + EPS))
        return w_next - state.e + e, ServerState(lam_bar, e)

    def output_model(self, w: Vector, state: ServerState) -> Vector:
        """w^t, without the perturbation."""
        return w - state.e
