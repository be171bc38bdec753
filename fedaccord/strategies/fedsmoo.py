"""FedSMOO: Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global Consistency and Smooth Landscape.

Sun, Shen, Chen, Ding, Tao. ICML 2023, arXiv:2305.11584, Algorithm 1.

    client  u = g_i(w) - mu_i - s;   e = radius u / ||u||;   mu_i <- mu_i + e - s   every step
            w <- w - lr (g_i(w + e) + lam_i + rho (w - w^t))          K steps from w^t
            lam_i <- lam_i + rho (w_{i,K} - w^t)
    server  s = radius A_P[mu_i] / ||A_P[mu_i]||
            lam_bar <- lam_bar + (P/C) rho (w_bar - w^t);   w^{t+1} = w_bar + lam_bar / rho

FedDyn on SAM with a dual for the perturbation.

The dual's steps are combined, which saves a pass over memory in each: before step k (from 0)

    mu_i = climbed - k s,   climbed = mu_i at the start + sum of e over the steps so far
    u = g_i(w) - mu_i - s = g_i(w) - climbed + (k - 1) s

so a step adds e to climbed, and K s is subtracted once, after the last.

When to use: as FedSpeed, if the perturbations of clients should agree too. It is one of the most
expensive methods here: two vectors each way, two gradients a step, two vectors on a client that
should return, so it suits cross-silo federations. The radius leaves a bias.

Where we differ: as in the authors' code, mu_i moves in every local step and s omits the paper's
term of the last perturbation. Clients count equally (no weighting=examples).
"""  # noqa: E501 - the paper's title

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedaccord.core import (
    Cohort,
    Direction,
    GradientAt,
    LocalConfig,
    LocalResult,
    LocalRule,
    Vector,
    clip_,
    norm,
    option,
)
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.sam import EPS, SAM
from fedaccord.strategies.feddyn import primal_dual_step


class Down(NamedTuple):
    w: Vector
    s: Vector


class Up(NamedTuple):
    w: Vector
    mu: Vector


class ClientState(NamedTuple):
    lam: Vector  # (..., d)
    mu: Vector  # (..., d)


class ServerState(NamedTuple):
    lam_bar: Vector  # (d,)
    s: Vector  # (d,)


class Buffers(NamedTuple):
    climbed: Vector  # (..., d), mu_i plus the e of all steps so far, without their s
    s: Vector  # (..., d)
    past: Vector  # (1,), k - 1 before step k
    ascended: Vector  # (..., d), w + e


@dataclass(frozen=True)
class FedSMOOClient(LocalRule):
    receives = Down
    sends = Up

    rho: float
    radius: float

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(lam=torch.zeros_like(w), mu=torch.zeros_like(w))

    def direction(self, down: Down, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=state.lam, rho=self.rho, anchor=down.w)

    def gradient_init(
        self, w: Vector, down: Down, state: ClientState, config: LocalConfig
    ) -> Buffers:
        return Buffers(state.mu.clone(), down.s, -w.new_ones(1), torch.empty_like(state.mu))

    def gradient(
        self, w: Vector, g: Vector, buffers: Buffers, at: GradientAt, config: LocalConfig
    ) -> Tensor:
        climbed, s, past, ascended = buffers
        loss = at(w)
        u = g.sub_(climbed).addcmul_(s, past)  # g - mu_i - s
        length = self.radius / (norm(u) + EPS)
        climbed.addcmul_(u, length)
        past.add_(1)
        at(torch.addcmul(w, u, length, out=ascended))
        clip_(g, config.clip_norm)
        return loss

    def gradient_result(
        self, w: Vector, g: Vector, buffers: Buffers, at: GradientAt, config: LocalConfig
    ) -> Vector:
        """mu_i after the last step."""
        return torch.addcmul(buffers.climbed, buffers.s, buffers.past + 1, value=-1)

    def upload(self, w_K: Vector, down: Down, state: ClientState, result: LocalResult) -> Up:
        return Up(w_K, mu=result.gradient)

    def remember(
        self, read: Up, down: Down, state: ClientState, result: LocalResult
    ) -> ClientState:
        lam = (read.w - down.w).mul_(self.rho).add_(state.lam)
        return ClientState(lam, mu=read.mu)

    def dual(self, down: Down, state: ClientState) -> Vector:
        return state.lam


@dataclass(frozen=True, kw_only=True)
class FedSMOO(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    reads_anchors = True
    has_duals = True
    synchronous = ""
    refuses: ClassVar = {
        SAM: "it perturbs the model already, with its own radius",
        Gossip: "its perturbation s is normalised by one server; use feddyn with sam.rho",
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
        mu_bar = cohort.mean(ups.mu)
        s = mu_bar * (self.radius / (norm(mu_bar) + EPS))
        w, lam_bar = primal_dual_step(self.rho, ups.w, state.lam_bar, cohort)
        return w, ServerState(lam_bar, s)
