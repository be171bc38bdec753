"""FedDyn: Federated Learning Based on Dynamic Regularization.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. ICLR 2021, arXiv:2111.04263, Algorithm 1.

    client  w <- w - lr (g_i(w) + lam_i + alpha (w - w^t))            K steps from w^t
            lam_i <- lam_i + alpha (w_{i,K} - w^t)
    server  lam_bar <- lam_bar + (P/C) alpha (w_bar - w^t)            mean of lam_i over all clients
            w^{t+1} = w_bar + lam_bar / alpha

The paper stores the gradient at the client and h at the server: lam_i = -grad L_i, lam_bar = -h.
Inactive duals stay as they are.

When to use: for the exact optimum at FedAvg's traffic, with one vector on each client. It is exact
at any participation, but a dual ages while its client is away, so rounds can get rough when few
clients take part: see afedpd.py for that. alpha depends on the problem: in FedInit's experiments
0.1 on CIFAR-10, 0.01 or 0.001 on CIFAR-100.

Where we differ: the local problem gets K steps of SGD, not an exact solution. Weight decay and the
clip touch neither lam_i nor the prox term; the simulator of FedInit's authors folds alpha into
weight decay, so that its clip depends on the norm of w.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fedaccord.strategies.base import (
    Cohort,
    Cost,
    Direction,
    FederatedStrategy,
    LocalRule,
    Model,
    Plan,
    Vector,
    Work,
)
from fedaccord.strategies.options import option


class Up(NamedTuple):
    w: Vector
    w_0: Vector | None  # anchor of the dual step, where it is not the received model


class ClientState(NamedTuple):
    lam: Vector  # lam_i


class ServerState(NamedTuple):
    lam_bar: Vector


@dataclass(frozen=True)
class FedDynClient(LocalRule):
    sends = Up

    alpha: float

    def init(self, w: Vector, w_0: Vector) -> ClientState:
        return ClientState(lam=torch.zeros_like(w))

    def direction(self, down: Model, state: ClientState, plan: Plan) -> Direction:
        return Direction(shift=state.lam, rho=self.alpha, anchor=down.w)

    def finish(
        self, w_K: Vector, down: Model, state: ClientState, work: Work
    ) -> tuple[Up, ClientState]:
        lam = (w_K - down.w).mul_(self.alpha).add_(state.lam)
        return Up(w_K, None), ClientState(lam)


def mean_step(w: Vector, ups: Any, cohort: Cohort) -> Vector:
    """The mean over all clients of w_{i,K} - w^t, which is zero for inactive ones.

    From the relaxed start instead of w^t where relaxed-init.center is start.
    """
    moved = any(w_0 is not None for w_0 in ups.w_0)
    w_0 = cohort.mean(cohort.starts(w, ups.w_0)) if moved else w
    return (cohort.mean(ups.w) - w_0).mul_(cohort.participation)


@dataclass(kw_only=True, eq=False)
class FedDyn(FederatedStrategy):
    cost = Cost(down=1, up=1, gradients=1, client=1, server=2)

    alpha: float = option(
        0.1, "strength of the dynamic regulariser", above=0, tried="0.001, 0.01, 0.1, 1"
    )

    def rule(self) -> FedDynClient:
        return FedDynClient(self.alpha)

    def init(self, w: Vector) -> ServerState:
        return ServerState(lam_bar=torch.zeros_like(w))

    def aggregate(
        self, w: Vector, ups: Up, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        lam_bar = mean_step(w, ups, cohort).mul_(self.alpha).add_(state.lam_bar)
        return (lam_bar / self.alpha).add_(cohort.mean(ups.w)), ServerState(lam_bar)
