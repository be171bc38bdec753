"""Local training: each client alone.

A baseline without a paper: what a client achieves without the other clients.

    state   w_i, the client's own model, w^0 at first
    client  w <- w - lr g_i(w)                 K steps from w_i
            w_i <- w_{i,K}
    server  w^{t+1} = w_bar, the mean of the active clients' models, which no client trains on

When to use: beside any method with personal models, and to see whether clients gain from each
other: personal-accuracy is that of w_i on the client's own test samples. Nothing is sent down after
a first visit.

Where we differ: there is no paper. Models are sent up only for w_bar and a run's columns. w_bar
averages models that were trained apart: its test accuracy says little about theirs, and drift is
their distance to the last average.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedaccord.core import Client, Cohort, LocalConfig, LocalResult, LocalRule, Model, Vector
from fedaccord.core.method_settings import OWN_STATES, expect
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins.compress import Compress
from fedaccord.plugins.dp import DP
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.relaxed_init import RelaxedInit


class Down(NamedTuple):
    w: Vector | None  # w^0 with a first visit; None: nothing is sent


class ClientState(NamedTuple):
    w: Vector  # (..., d), w_i


class ServerState(NamedTuple):
    w_0: Vector  # (d,), w^0, for first visits in later rounds


@dataclass(frozen=True)
class LocalClient(LocalRule):
    receives = Down
    models = ()  # whole models, and no updates of a broadcast one

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(w)

    def start(self, down: Down, state: ClientState, config: LocalConfig) -> Vector:
        return state.w

    def remember(
        self, read: Model, down: Down, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(result.w_K)

    def personal(self, state: ClientState) -> Vector:
        return state.w


@dataclass(frozen=True, kw_only=True)
class Local(FederatedStrategy):
    assumes_sgd = False
    tied = False
    averages = True
    synchronous = ""
    beyond_sums = "models that no broadcast precedes"
    refuses: ClassVar = {
        Gossip: "its clients do not exchange models; use dfedavg",
        Compress: "its clients upload whole models, as no broadcast precedes them, and no updates",
        DP: "its uploads are whole models, which no broadcast precedes",
        RelaxedInit: "its clients start from their own models, not from the server's",
    }
    replaces: ClassVar = {"staleness": "no client trains on the model of the server"}
    cost_note = "down 1 with a first visit; up for the report alone"

    def __post_init__(self) -> None:
        super().__post_init__()
        why = ": its clients do not exchange models"
        expect(self, "optimizer-state", OWN_STATES, "with local", why)

    def rule(self) -> LocalClient:
        return LocalClient()

    def init(self, w: Vector) -> ServerState:
        return ServerState(w_0=w)

    def broadcast(self, w: Vector, state: ServerState, client: Client) -> Down:
        return Down(state.w_0 if client.last_round < 0 else None)

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        return cohort.mean(ups.w), state
