"""ACE: Mitigating Participation Imbalance Bias in Asynchronous Federated Learning.

Chang, Yao, Krishnamurthy, Shelton, Chakraborty, Swami, Oymak, Roy-Chowdhury. 2025,
arXiv:2511.19066: the server steps at every arrival, by the mean of all clients' last updates. A
baseline of benchmarks/asynchronous.py, for schedule=buffered with buffer-size=1.

    client  w <- w - lr g_i(w)                          K steps from the w^s that it received
            D_i+ = w_{i,K} - w^s                        its update; it sends w^s + D_i+ - D_i
    server  D_bar <- D_bar + (1/C) sum over the replies of (D_i+ - D_i)       mean of all D_i
            w <- w + server_lr D_bar

Where we differ: written from the abstract and from what others write of it, not from the paper's
listing. Its updates are single gradients, ours are K steps. A client that has not replied yet
counts with zero. The server keeps the mean alone, and each client its own D_i.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fedaccord.core import Cohort, LocalConfig, LocalResult, LocalRule, Model, Vector, option
from fedaccord.strategies import FederatedStrategy


class ClientState(NamedTuple):
    D: Vector  # (..., d), the client's last update


class ServerState(NamedTuple):
    D_bar: Vector  # (..., d)


@dataclass(frozen=True)
class AceClient(LocalRule):
    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(D=torch.zeros_like(w))

    def upload(self, w_K: Vector, down: Model, state: ClientState, result: LocalResult) -> Model:
        return Model(w_K - state.D)

    def remember(
        self, read: Model, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(D=read.w - down.w + state.D)


@dataclass(frozen=True, kw_only=True)
class Ace(FederatedStrategy):
    beyond_sums = ""
    synchronous = ""

    server_lr: float = option(1.0, "server rate: how far to go along the mean update", low=0)

    def rule(self) -> AceClient:
        return AceClient()

    def init(self, w: Vector) -> ServerState:
        return ServerState(D_bar=torch.zeros_like(w))

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        change = (cohort.undamped_mean(ups.w) - w).mul_(cohort.participation)
        D_bar = state.D_bar + change
        return w + self.server_lr * D_bar, ServerState(D_bar)
