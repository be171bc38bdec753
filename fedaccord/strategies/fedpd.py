"""FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data.

Zhang, Hong, Dhople, Yin, Liu. IEEE TSP 2021, arXiv:2005.11418, Algorithm 1.

    state   w_i, lam_i, anchor_i
    client  w <- w - lr (g_i(w) + lam_i + rho (w - anchor_i))         K steps from the anchor
            lam_i <- lam_i + rho (w_{i,K} - anchor_i);   anchor_i <- w_{i,K} + lam_i / rho
    server  with probability 1 - p:   w^{t+1} = mean over all clients of anchor_i, their next anchor
            else nothing is sent, and clients continue from their own anchors

When to use: if every client takes part in every round, as in small cross-silo federations. It is
exact with p = 0. Silent rounds save communication, but in each the clients move towards their own
optima, so with p above 0 it does not converge unless the clients' data are alike. It refuses
partial participation (set fraction-train=1; or use fedadmm, feddyn or afedpd), and a round with a
lost reply does not count. A client keeps three vectors.

Where we differ: the oracle is K steps of SGD, rho = 1/eta of the paper. local-init = own starts the
steps from the client's own w_i, as the paper does; server, the default, starts from the anchor, as
the rest of the family. The released code forms anchor_i with the old dual.
"""

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from fedaccord.core import (
    Client,
    Cohort,
    Direction,
    LocalConfig,
    LocalResult,
    LocalRule,
    Vector,
    option,
)
from fedaccord.core.cost import Cost
from fedaccord.core.method_settings import OWN_STATES, expect
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip


class Down(NamedTuple):
    w: Vector | None  # None: the last round was not sent, continue from your own anchor


class Up(NamedTuple):
    anchor: Vector | None  # None: this round is not sent


class ClientState(NamedTuple):
    w: Vector  # (..., d), w_i
    lam: Vector  # (..., d)
    anchor: Vector  # (..., d)


def is_silent(p: float, seed: int, t: int) -> bool:
    """Whether round t ends without communication; server and clients draw the same."""
    return random.Random(f"fedpd {seed} {t}").random() < p


@dataclass(frozen=True)
class FedPDClient(LocalRule):
    receives = Down
    sends = Up

    rho: float
    p: float
    local_init: str
    seed: int

    @property
    def models(self) -> tuple[str, ...]:
        return ("anchor",)

    def is_silent(self, t: int) -> bool:
        return is_silent(self.p, self.seed, t)

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(w=w, lam=torch.zeros_like(w), anchor=w)

    def anchor(self, down: Down, state: ClientState) -> Vector:
        return state.anchor if down.w is None else down.w

    def start(self, down: Down, state: ClientState, config: LocalConfig) -> Vector:
        return state.w if self.local_init == "own" else self.anchor(down, state)

    def direction(self, down: Down, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=state.lam, rho=self.rho, anchor=self.anchor(down, state))

    def upload(self, w_K: Vector, down: Down, state: ClientState, result: LocalResult) -> Up:
        silent = self.is_silent(result.config.round)
        return Up(None if silent else self._step(w_K, down, state).anchor)

    def remember(
        self, read: Up, down: Down, state: ClientState, result: LocalResult
    ) -> ClientState:
        own = self._step(result.w_K, down, state)
        if read.anchor is None:
            return own
        lost = read.anchor - own.anchor  # anchor - lam / rho, the local model, moves by half of it
        return ClientState(own.w + lost / 2, own.lam + self.rho / 2 * lost, own.anchor + lost)

    def _step(self, w_K: Vector, down: Down, state: ClientState) -> ClientState:
        lam = state.lam + self.rho * (w_K - self.anchor(down, state))
        return ClientState(w_K, lam, w_K + lam / self.rho)

    def dual(self, down: Down, state: ClientState) -> Vector:
        return state.lam


@dataclass(frozen=True, kw_only=True)
class FedPD(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    takes_weights = True
    all_clients = True
    refuses: ClassVar = {Gossip: "all clients share one anchor; use fedadmm"}
    cost_note = "down and up times 1 - p"

    rho: float = option(0.1, "penalty of the augmented Lagrangian, 1/eta of the paper", above=0)
    p: float = option(0.0, "probability that a round ends without communication", low=0, high=1)
    local_init: str = option(
        "server",
        "start of the local steps: the anchor or the client's own model",
        choices=("server", "own"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_init == "own" and any(p.moves_start for p in self.active_plugins):
            raise ValueError(
                "fedpd: local-init=own starts from the client's own model, so relaxed "
                "initialisation has no start to move; set local-init=server"
            )
        if self.p:
            why = ": its silent rounds send nothing"
            expect(self, "optimizer-state", OWN_STATES, "with fedpd.p above 0", why)
        for plugin in self.active_plugins:
            if plugin.place and self.p:
                raise ValueError(
                    f"p: expected 0 with {type(plugin).__name__}, got {self.p:g}: without a "
                    "broadcast a client has no update to send"
                )

    @property
    def cost(self) -> Cost:
        """The cost of a round that communicates."""
        return replace(self, p=0.0).cost if self.p else super().cost

    def rule(self) -> FedPDClient:
        return FedPDClient(self.rho, self.p, self.local_init, self.seed)

    def broadcast(self, w: Vector, state: Any, client: Client) -> Down:
        last = client.last_round  # of all clients, as a round counts only with all of them
        silent = last >= 0 and self.rule().is_silent(last)
        return Down(None if silent else w)

    def aggregate(self, w: Vector, ups: Up, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        if ups.anchor is None:  # this round is not sent
            return w, state
        return cohort.mean(ups.anchor), state
