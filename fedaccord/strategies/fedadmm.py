"""FedADMM: A Federated Primal-Dual Algorithm Allowing Partial Participation.

Wang, Marella, Anderson. CDC 2022, arXiv:2203.15104, Algorithm 2.

    client  w <- w - lr (g_i(w) + lam_i + rho (w - w^t))              K steps from w^t
            lam_i <- lam_i + rho (w_{i,K} - w^t)
            w_hat_i+ = w_{i,K} + lam_i / rho                          w_hat_i = w^0 at first
    server  tracking:  w^{t+1} = w^t + (1/C) sum over active of (w_hat_i+ - w_hat_i)
            active:    w^{t+1} = mean over active of w_hat_i+

With tracking w is the mean of w_hat_i over all clients, stale ones included, and is exact at any
participation. A-FedPD's poster compares with active; under partial participation the optimum is not
a fixed point of it.

When to use: for the exact optimum at FedAvg's traffic, with clients that return. A client keeps
two vectors, the server only the model. At low participation w depends on old uploads of absent
clients, so it moves slowly: it suits cross-silo rather than cross-device federations.

Where we differ: the regulariser g of the paper is zero here. Another FedADMM (arXiv:2204.03529) has
a server rate instead of 1/C; its released code measures from w^t and so depends on the initial
model; it is not implemented. Clients count equally (no weighting=examples), because 1/C does not
depend on their examples.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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

NO_STEP = "w_hat_i+ holds the client's whole dual, not its step from the model that it received"


class Up(NamedTuple):
    w_hat: Vector  # tracking: its change w_hat_i+ - w_hat_i; active: w_hat_i+


class ClientState(NamedTuple):
    lam: Vector  # (..., d)
    w_hat: Vector  # (..., d)


@dataclass(frozen=True)
class FedADMMClient(LocalRule):
    sends = Up

    rho: float
    variant: str

    @property
    def models(self) -> tuple[str, ...]:
        return ("w_hat",) if self.variant == "active" else ()

    @property
    def needs_w_init(self) -> bool:
        return True

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(lam=torch.zeros_like(w), w_hat=w_init)

    def direction(self, down: Model, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=state.lam, rho=self.rho, anchor=down.w)

    def upload(self, w_K: Vector, down: Model, state: ClientState, result: LocalResult) -> Up:
        w_hat = self._step(w_K, down, state).w_hat
        return Up(w_hat - state.w_hat if self.variant == "tracking" else w_hat)

    def remember(
        self, read: Up, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        own = self._step(result.w_K, down, state)
        sent = own.w_hat - state.w_hat if self.variant == "tracking" else own.w_hat
        lost = read.w_hat - sent  # w_hat - lam / rho, the local model, moves by half of it
        return ClientState(own.lam + self.rho / 2 * lost, own.w_hat + lost)

    def _step(self, w_K: Vector, down: Model, state: ClientState) -> ClientState:
        lam = state.lam + self.rho * (w_K - down.w)
        return ClientState(lam, w_K + lam / self.rho)

    def dual(self, down: Model, state: ClientState) -> Vector:
        return state.lam


@dataclass(frozen=True, kw_only=True)
class FedADMM(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    linear = True
    has_duals = True
    replaces: ClassVar = {"staleness": "w stays the mean of what clients sent last, undamped"}

    rho: float = option(0.1, "penalty of the augmented Lagrangian", above=0)
    variant: str = option("tracking", "the server's mean", choices=("tracking", "active"))

    @property
    def synchronous(self) -> str:
        return "" if self.variant == "tracking" else NO_STEP

    @property
    def keeps_jumps(self) -> bool:
        return self.variant == "active"

    def rule(self) -> LocalRule:
        return FedADMMClient(self.rho, self.variant)

    def aggregate(self, w: Vector, ups: Up, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        if self.variant == "active":
            return cohort.mean(ups.w_hat), state
        return w + cohort.sum(ups.w_hat) / cohort.num_clients, state
