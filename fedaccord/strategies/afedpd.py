"""A-FedPD: Aligning Dual-Drift is All Federated Primal-Dual Learning Needs.

Sun, Shen, Tao. NeurIPS 2024, arXiv:2409.18915, Algorithm 1, with virtual dual updates.

    client  w <- w - lr (g_i(w) + lam_i + rho (w - w^t))              K steps from w^t
    duals   active:   lam_i <- lam_i + rho (w_{i,K} - w^t)
            inactive: lam_i <- lam_i + rho (w_bar - w^t)              virtual; w_bar: active mean
    server  lam_bar = mean of lam_i over all clients
            w^{t+1} = w_bar + lam_bar / rho                           returned model: w_bar

The listing keeps all duals on the server. Averaging its dual step over active and inactive clients
gives lam_bar+ = lam_bar + rho (w_bar - w^t): the very step that an absent client misses. So a
client keeps its own dual, and on its return the server sends what it missed, lam_bar now minus
lam_bar after its last round. The server holds lam_bar once per distinct round in which some client
was last seen, never one vector per client; the run moves the oldest of them to files.

When to use: for primal-dual training when few clients take part in a round. It is exact at any
participation, and absent clients' duals do not age. It costs a second vector down after an absence,
a vector on each client, and on the server a vector for each of those last-seen rounds, on disk
where there are many. On convex
problems with exact gradients it is no faster than FedDyn; the gain is claimed for networks and
noisy gradients.

Where we differ: the same iterates from other places, as derived above. rho is constant, also where
the poster prints rho_t; its value, and lr, decay and weight decay, are those of FedSpeed in the
authors' simulator, provisional. Evaluated and returned is w_bar, which the theorem is about, not
w^t.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from fedaccord.core import (
    Client,
    Cohort,
    Direction,
    LocalConfig,
    LocalResult,
    LocalRule,
    Model,
    Vector,
    option,
)
from fedaccord.core.vectors import to_device
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.gossip import Gossip


class Down(NamedTuple):
    w: Vector
    missed: Vector | None  # sum of the virtual steps since the client's last round; None: zero


class ClientState(NamedTuple):
    lam: Vector  # (..., d), lam_i at the end of the client's last round


class ServerState(NamedTuple):
    lam_bar: Vector  # (d,)
    lam_bar_after: dict[int, Vector]  # round t -> lam_bar after it, where t is some client's last


def _last(rounds: Iterable[int], t: int) -> int:
    """The last of the rounds up to t that counted; -1: none did."""
    return max((round for round in rounds if round <= t), default=-1)


def _after(state: ServerState, t: int) -> Vector:
    """lam_bar after round t, or after the last one before it that counted; zero at first."""
    found = state.lam_bar_after.get(_last(state.lam_bar_after, t))
    zero = torch.zeros_like(state.lam_bar)
    return zero if found is None else to_device(found, state.lam_bar.device)


@dataclass(frozen=True)
class AFedPDClient(LocalRule):
    receives = Down
    exact = ("missed",)

    rho: float

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(lam=torch.zeros_like(w))

    def direction(self, down: Down, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=self.dual(down, state), rho=self.rho, anchor=down.w)

    def remember(
        self, read: Model, down: Down, state: ClientState, result: LocalResult
    ) -> ClientState:
        lam = (read.w - down.w).mul_(self.rho).add_(self.dual(down, state))
        return ClientState(lam)

    def dual(self, down: Down, state: ClientState) -> Vector:
        """lam_i^t: what the client left with and the virtual steps since."""
        return state.lam if down.missed is None else state.lam + down.missed


@dataclass(frozen=True, kw_only=True)
class AFedPD(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    takes_weights = True
    synchronous = ""
    fixed_anchor = "what an absent client misses is the step from w^t"
    refuses: ClassVar = {Gossip: "no node is absent, and then it is feddyn; take that"}
    cost_note = (
        "down 1 where nothing was missed; server +1 per round in which a client was last seen"
    )

    rho: float = option(0.1, "penalty of the augmented Lagrangian", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_buffered and self.damping(1) != 1:
            raise ValueError(
                f"staleness: expected constant with {type(self).__name__}, got {self.staleness!r}: "
                "the step that the other clients take is the server's own"
            )

    def rule(self) -> AFedPDClient:
        return AFedPDClient(self.rho)

    def init(self, w: Vector) -> ServerState:
        return ServerState(lam_bar=torch.zeros_like(w), lam_bar_after={})

    def broadcast(self, w: Vector, state: ServerState, client: Client) -> Down:
        last, taken = client.last_round, client.last_round + client.delay
        if last == client.round - 1:  # nothing missed (before round 0: no dual yet)
            return Down(w, None)
        if last < 0:
            return Down(w, state.lam_bar)
        missed = state.lam_bar - _after(state, taken)
        if client.delay:  # the steps between the model received and the step with its own
            missed = missed + _after(state, taken - 1) - _after(state, last - 1)
        return Down(w, missed)

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        w_bar = cohort.mean(ups.w)
        lam_bar = (w_bar - w).mul_(self.rho).add_(state.lam_bar)
        clients = torch.bincount(cohort.seen + 1)  # how many were last seen in round t - 1
        seen = (clients.nonzero().flatten() - 1).tolist()
        after = {**state.lam_bar_after, cohort.round: lam_bar}
        needed = {cohort.round, *(_last(after, t) for t in seen)}
        after = {t: v for t, v in after.items() if t in needed}
        return (lam_bar / self.rho).add_(w_bar), ServerState(lam_bar, after)

    def output_model(self, w: Vector, state: ServerState) -> Vector:
        """w_bar, which the theorem and the listing's return value are about."""
        return w - state.lam_bar / self.rho
