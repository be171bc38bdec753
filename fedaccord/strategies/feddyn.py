"""FedDyn: Federated Learning Based on Dynamic Regularization.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. ICLR 2021, arXiv:2111.04263, Algorithm 1.

    client  w <- w - lr (g_i(w) + lam_i + alpha (w - w^t))            K steps from w^t
            lam_i <- lam_i + alpha (w_{i,K} - w^t)
    server  lam_bar <- lam_bar + (P/C) alpha (w_bar - w^t)            mean of lam_i over all clients
            w^{t+1} = w_bar + lam_bar / alpha

The paper stores the gradient at the client and h at the server: lam_i = -grad L_i, lam_bar = -h.
Inactive duals do not change.

When to use: for the exact optimum at FedAvg's traffic, with one vector on each client. It is exact
at any participation, but the dual of an absent client becomes stale, so training can be unstable at
low participation: afedpd.py addresses that, though in our runs not at 2% of the clients. alpha
depends on the problem: in FedInit's experiments 0.1 on CIFAR-10, 0.01 or 0.001 on CIFAR-100.

Where we differ: K steps of SGD replace the exact solution of the local problem. Weight decay and
the clip affect neither lam_i nor the prox term; the simulator of FedInit's authors adds alpha to
weight decay, so its clip depends on the norm of w. Clients count equally (no weighting=examples),
because only then is P/C their share.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

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
    lam: Vector  # (..., d), lam_i


class ServerState(NamedTuple):
    lam_bar: Vector  # (..., d)


@dataclass(frozen=True)
class FedDynClient(LocalRule):
    alpha: float

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(lam=torch.zeros_like(w))

    def direction(self, down: Model, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=state.lam, rho=self.alpha, anchor=down.w)

    def remember(
        self, read: Model, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(lam=(read.w - down.w).mul_(self.alpha).add_(state.lam))

    def dual(self, down: Model, state: ClientState) -> Vector:
        return state.lam


def primal_dual_step(
    rho: float, local: Collection[Vector], lam_bar: Vector, cohort: Cohort
) -> tuple[Vector, Vector]:
    """w^{t+1} and the next lam_bar; local: w_{i,K} (..., d) of each active client.

    lam_bar changes by the mean over all clients of rho (w_{i,K} - w^t), zero for inactive ones: as
    the clients' own duals do, even if the step from an earlier model is damped.
    """
    w_bar = cohort.mean(local)
    undamped = cohort.undamped_mean(local) if cohort.damping else w_bar
    mean_step = (undamped - cohort.anchor).mul_(cohort.participation)
    lam_bar = mean_step.mul_(rho).add_(lam_bar)
    return (lam_bar / rho).add_(w_bar), lam_bar


@dataclass(frozen=True, kw_only=True)
class FedDyn(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    linear = True
    reads_anchors = True
    has_duals = True
    synchronous = ""

    alpha: float = option(
        0.1, "strength of the dynamic regulariser", above=0, tried="0.001, 0.01, 0.1, 1"
    )

    def rule(self) -> FedDynClient:
        return FedDynClient(self.alpha)

    def init(self, w: Vector) -> ServerState:
        return ServerState(lam_bar=torch.zeros_like(w))

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        w, lam_bar = primal_dual_step(self.alpha, ups.w, state.lam_bar, cohort)
        return w, ServerState(lam_bar)
