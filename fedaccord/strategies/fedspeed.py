"""FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy.

Sun, Shen, Huang, Ding, Tao. ICLR 2023, arXiv:2302.10429, Algorithm 1.

    client  g = (1 - mix) g_i(w) + mix g_i(w + e)
            w <- w - lr (g + lam_i + rho (w - w^t))                   K steps from w^t
            lam_i <- lam_i + rho (w_{i,K} - w^t)
    authors e = r g_i / ||g_i||;   w^{t+1} = w_bar + (mean of lam_i over all clients) / rho
    paper   e = r g_i;             w^{t+1} = mean over active of (w_{i,K} + lam_i / rho)

r is sam.rho.

When to use: as FedDyn, if a flatter minimum is worth twice the gradients. Traffic is FedAvg's; a
client keeps its dual and should return. Exact only without the ascent (sam.rho=0): the radius
leaves a bias.

variant=paper is another method, not another way to compute this one. At the optimum w* all
w_{i,K} = w* and lam_i = -grad f_i(w*): the mean of lam_i over all clients is 0, so authors stays at
w*; the mean over the active clients is not, so paper steps to w* + A_P[lam_i] / rho. At full
participation they agree. variant=paper runs FedADMM's client (variant active) for that reason.

Where we differ: the authors' form is FedDyn with SAM and gave the published numbers; the optimum is
not a fixed point of the paper's form (variant=paper) under partial participation. The paper stores
-lam_i, and rho = 1 / its lambda.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fedaccord.core import Cohort, LocalRule, PlugIn, Stateless, Vector, argument, option
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.fedadmm import NO_STEP, FedADMMClient
from fedaccord.strategies.feddyn import FedDynClient, ServerState, primal_dual_step


@dataclass(frozen=True, kw_only=True)
class FedSpeed(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    linear = True
    reads_anchors = True
    has_duals = True
    cost_note = "variant paper: client 2, server 1"

    rho: float = option(0.1, "penalty of the augmented Lagrangian, 1/lambda of the paper", above=0)
    mix: float = option(1.0, "share of the ascended gradient, alpha of the paper", low=0, high=1)
    variant: str = option("authors", "ascent and server mean", choices=("authors", "paper"))
    radius: float = argument(0.1, "L2 radius of SAM, at least 0; its run-config key is sam.rho")

    def own_plugins(self) -> tuple[PlugIn, ...]:
        return (SAM(rho=self.radius),)

    @cached_property
    def active_plugins(self) -> tuple[PlugIn, ...]:
        normalised = self.variant == "authors"
        return tuple(
            replace(p, mix=self.mix, normalised=normalised) if isinstance(p, SAM) else p
            for p in super().active_plugins
        )

    @property
    def synchronous(self) -> str:
        return "" if self.variant == "authors" else NO_STEP

    def rule(self) -> LocalRule:
        if self.variant == "paper":
            return FedADMMClient(self.rho, "active")
        return FedDynClient(self.rho)

    def init(self, w: Vector) -> Any:
        return Stateless() if self.variant == "paper" else ServerState(torch.zeros_like(w))

    def aggregate(self, w: Vector, ups: Any, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        if self.variant == "paper":
            return cohort.mean(ups.w_hat), state
        w, lam_bar = primal_dual_step(self.rho, ups.w, state.lam_bar, cohort)
        return w, ServerState(lam_bar)
