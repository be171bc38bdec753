"""FedSMOO: Dynamic Regularized Sharpness Aware Minimization in Federated Learning.

Sun, Shen, Chen, Ding, Tao: Dynamic Regularized Sharpness Aware Minimization in Federated Learning:
Approaching Global Consistency and Smooth Landscape. ICML 2023, arXiv:2305.11584, Algorithm 1.

    client  u = g_i(w) - mu_i - s;   e = radius u / ||u||;   mu_i <- mu_i + e - s   every step
            w <- w - lr (g_i(w + e) + lam_i + rho (w - w^t))          K steps from w^t
            lam_i <- lam_i + rho (w_{i,K} - w^t)
    server  s = radius A_P[mu_i] / ||A_P[mu_i]||
            lam_bar <- lam_bar + (P/C) rho (w_bar - w^t);   w^{t+1} = w_bar + lam_bar / rho

FedDyn on SAM with a dual for the perturbation.

When to use: as FedSpeed, where the perturbations of clients should agree too. It is one of the
dearest methods here: two vectors each way, two gradients a step, two vectors on a client that
should come back, so rather cross-silo. The radius leaves a bias.

Where we differ: as in the authors' code, mu_i moves in every local step and s omits the paper's
term of the last perturbation.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fedaccord.strategies.base import (
    Clip,
    Cohort,
    Cost,
    Direction,
    FederatedStrategy,
    GradientAt,
    LocalRule,
    Plan,
    Vector,
    Work,
)
from fedaccord.strategies.feddyn import mean_step
from fedaccord.strategies.options import option
from fedaccord.strategies.sam import EPS


class Down(NamedTuple):
    w: Vector
    s: Vector


class Up(NamedTuple):
    w: Vector
    mu: Vector
    w_0: Vector | None  # as FedDyn's


class ClientState(NamedTuple):
    lam: Vector
    mu: Vector


class ServerState(NamedTuple):
    lam_bar: Vector
    s: Vector


class CorrectedAscent:
    """The gradient at w + e, e along g(w) corrected by mu_i and s; moves mu_i."""

    def __init__(self, mu: Vector, s: Vector, radius: float) -> None:
        self.climbed = mu.clone()  # mu_i and the e of all steps, without their s
        self.s = s
        self.steps = 0
        self.radius = radius
        self.there = torch.empty_like(s)  # w + e

    def mu(self) -> Vector:
        """mu_i after the last step, in place: nothing is climbed afterwards."""
        return self.climbed.sub_(self.s, alpha=self.steps)

    def __call__(self, model: Any, gradient_at: GradientAt, clip: Clip) -> Vector:
        w, g = model.w, model.g
        loss = gradient_at(w)
        u = g.sub_(self.climbed).add_(self.s, alpha=self.steps - 1)  # g - mu_i - s
        length = self.radius / (torch.linalg.vector_norm(u) + EPS)
        self.climbed.addcmul_(u, length)
        self.steps += 1
        gradient_at(torch.addcmul(w, u, length, out=self.there))
        clip()
        return loss


@dataclass(frozen=True)
class FedSMOOClient(LocalRule):
    receives = Down
    sends = Up

    rho: float
    radius: float

    def init(self, w: Vector, w_0: Vector) -> ClientState:
        return ClientState(lam=torch.zeros_like(w), mu=torch.zeros_like(w))

    def direction(self, down: Down, state: ClientState, plan: Plan) -> Direction:
        return Direction(shift=state.lam, rho=self.rho, anchor=down.w)

    def oracle(self, down: Down, state: ClientState, plan: Plan) -> CorrectedAscent:
        return CorrectedAscent(state.mu, down.s, self.radius)

    def finish(
        self, w_K: Vector, down: Down, state: ClientState, work: Work
    ) -> tuple[Up, ClientState]:
        mu = work.oracle.mu()
        return Up(w_K, mu, None), ClientState((w_K - down.w).mul_(self.rho).add_(state.lam), mu)


@dataclass(kw_only=True, eq=False)
class FedSMOO(FederatedStrategy):
    cost = Cost(down=2, up=2, gradients=2, client=2, server=3)
    refuses: ClassVar = {
        "SAM": "it perturbs the model already, with its own radius",
        "Gossip": "its perturbation s is normalised by one server; take feddyn with sam.rho",
    }

    rho: float = option(0.1, "penalty of the augmented Lagrangian", above=0)
    radius: float = option(0.1, "L2 radius of the ascent", low=0)

    def rule(self) -> LocalRule:
        return FedSMOOClient(self.rho, self.radius)

    def init(self, w: Vector) -> ServerState:
        return ServerState(lam_bar=torch.zeros_like(w), s=torch.zeros_like(w))

    def broadcast(self, w: Vector, state: ServerState, client: object) -> Down:
        return Down(w, state.s)

    def aggregate(
        self, w: Vector, ups: Up, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        w_bar, mu_bar = cohort.mean(ups.w), cohort.mean(ups.mu)
        s = mu_bar * (self.radius / (torch.linalg.vector_norm(mu_bar) + EPS))
        lam_bar = mean_step(w, ups, cohort).mul_(self.rho).add_(state.lam_bar)
        return (lam_bar / self.rho).add_(w_bar), ServerState(lam_bar, s)
