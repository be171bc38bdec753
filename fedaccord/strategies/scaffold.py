"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020, arXiv:1910.06378, Algorithm 1, option II.

    client  w <- w - lr (g_i(w) - c_i + c)                            K steps from w^t
            c_i+ = c_i - c + d_bar,   d_bar = (w_{i,0} - w_{i,K}) / (K lr)
    server  w^{t+1} = w^t + server_lr (w_bar - w^t)
            c <- c + (1/C) sum over the active clients of (c_i+ - c_i)       C, not P
            the same from w_bar: c <- c + (P/C) ((w^t - w_bar) / (K lr) - c)   equal K and lr

When to use: if the exact optimum matters and clients return, as in cross-silo federations. It
is exact at any participation, but the c_i of an absent client becomes stale, and traffic is twice
FedAvg's both ways. On networks with noisy gradients it does not always beat FedAvg.

Where we differ: we follow the paper. c and c_i start at zero, so mean over all clients of c_i = c
always; some released code starts them from the parameter values, which breaks that. d_bar is the
true displacement: c_i stays an average of gradients when relaxed initialisation moves the start.
With another optimiser than SGD a displacement is not such an average: d_bar is the mean of the
steps' directions g_i(w) - c_i + c, and c_i+ the mean of their gradients. Clients count equally (no
weighting=examples): mean(c_i) = c is a plain mean. If all take K equal steps of SGD from w^t, the
second vector of an upload follows from the first, and `upload` sets whether it is omitted. With
compression it is omitted, as in SCALLION (arXiv:2308.08165), which halves the bytes; plain uploads
have both by default, because the sum is rounded differently.
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
from fedaccord.core.method_settings import has_gossip, in_use
from fedaccord.core.optimizer import SGD
from fedaccord.core.plugin import COMPRESS
from fedaccord.core.privacy import has_noisy_sums
from fedaccord.federation.strategy import FederatedStrategy


class Down(NamedTuple):
    w: Vector
    c: Vector


class Up(NamedTuple):
    w: Vector
    dc_i: Vector  # c_i+ - c_i


class ClientState(NamedTuple):
    c_i: Vector  # (..., d)


class ServerState(NamedTuple):
    c: Vector  # (..., d)


@dataclass(frozen=True)
class ScaffoldClient(LocalRule):
    receives = Down
    sends: ClassVar[Any] = Up
    reads_mean_direction = True

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(c_i=torch.zeros_like(w))

    def direction(self, down: Down, state: ClientState, config: LocalConfig) -> Direction:
        return Direction(shift=down.c - state.c_i)

    def upload(self, w_K: Vector, down: Down, state: ClientState, result: LocalResult) -> Any:
        return Up(w_K, dc_i=result.mean_direction().sub_(down.c))

    def remember(
        self, read: Any, down: Down, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(c_i=state.c_i + read.dc_i)


@dataclass(frozen=True)
class ScaffoldOneClient(ScaffoldClient):
    """Sends only w_{i,K}, from which c_i+ - c_i follows if all clients take equal steps."""

    sends = Model
    exact = ("c",)

    def upload(self, w_K: Vector, down: Down, state: ClientState, result: LocalResult) -> Model:
        return Model(w_K)

    def remember(
        self, read: Any, down: Down, state: ClientState, result: LocalResult
    ) -> ClientState:
        d_bar = (down.w - read.w).div_(result.length)
        return ClientState(c_i=d_bar.sub_(down.c).add_(state.c_i))


@dataclass(frozen=True, kw_only=True)
class Scaffold(FederatedStrategy):
    assumes_sgd = False
    beyond_sums = ""
    linear = True
    synchronous = ""

    server_lr: float = option(1.0, "server rate: factor of the mean update", low=0)

    upload: str = option(
        "auto",
        "vectors of an upload: both, or one (w_{i,K}, from which the other follows if all clients "
        "take equal steps of SGD from w^t); auto: one with compress if that holds, else both",
        choices=("auto", "one", "both"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.upload == "one" and (why := self._why_both()):
            raise ValueError(f"upload: expected both with {type(self).__name__}, got 'one': {why}")

    def rule(self) -> ScaffoldClient:
        return ScaffoldOneClient() if self._sends_one else ScaffoldClient()

    @property
    def _sends_one(self) -> bool:
        if self.upload != "auto":
            return self.upload == "one"
        return any(p.place == COMPRESS for p in in_use(self)) and not self._why_both()

    def _why_both(self) -> str:
        """Why c_i+ - c_i does not follow from w_{i,K}; empty: it does."""
        if not self.local_steps:
            return "with local-epochs clients may take unequal numbers of steps"
        if not isinstance(self.own_optimizer(), SGD):
            return f"the steps of {self.optimizer_name} are no displacement"
        if any(p.moves_start for p in in_use(self)):
            return "relaxed initialisation moves the start"
        if has_gossip(self):
            return "under gossip no server averages"
        if self.is_buffered:
            return "buffered replies began from different models"
        if has_noisy_sums(in_use(self)):
            return "with dp the server does not know how many replies a sum has"
        return ""

    def init(self, w: Vector) -> ServerState:
        return ServerState(c=torch.zeros_like(w))

    def broadcast(self, w: Vector, state: ServerState, client: object) -> Down:
        return Down(w, state.c)

    def aggregate(
        self, w: Vector, ups: Any, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        w_bar = cohort.mean(ups.w)
        if self._sends_one:
            dc = (w - w_bar).div_(cohort.lengths[0]).sub_(state.c)
            c = dc.mul_(cohort.participation).add_(state.c)
        else:
            c = cohort.sum(ups.dc_i).div_(cohort.num_clients).add_(state.c)
        return torch.lerp(w, w_bar, self.server_lr), ServerState(c)
