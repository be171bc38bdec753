"""DiLoCo: Distributed Low-Communication Training of Language Models.

Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen. 2023, arXiv:2311.08105,
Algorithm 1.

    client  AdamW along g_i(w)                                        K steps from w^t
    server  D = w^t - w_bar;   m <- mu m + D
            w^{t+1} = w^t - server_lr (D + mu m)                      Nesterov's momentum

When to use: to train or fine-tune transformers, with hundreds of AdamW steps per client between
two rounds. Traffic is FedAvg's; the server keeps one more vector. Choose lr as for AdamW,
1e-4 to 1e-3. With diloco.inner=sgd, mu 0 and server-lr 1 it is FedAvg.

Where we differ: clients reset AdamW's moments every round; the paper's workers keep theirs, as with
optimizer-state=keep. The paper's inner rate warms up and falls over the whole run; lr-decay lowers
it by round. Muon instead of AdamW (diloco.inner=muon) is known as MuLoCo, arXiv:2505.23725.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from fedaccord.core import Cohort, LocalRule, Model, Vector, option
from fedaccord.core.optimizer import FUNCTIONS, OPTIMIZERS
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies.fedavg import FedAvgClient


class ServerState(NamedTuple):
    m: Vector  # (..., d), momentum


@dataclass(frozen=True, kw_only=True)
class DiLoCo(FederatedStrategy):
    assumes_sgd = False
    linear = True
    takes_weights = True
    averages = True
    synchronous = ""
    replaces: ClassVar = {"optimizer": "diloco has its own, by diloco.inner"}

    inner: str = option("adamw", "optimiser of the clients", choices=[*OPTIMIZERS], also=FUNCTIONS)
    mu: float = option(0.9, "server momentum", low=0, high=1)
    server_lr: float = option(0.7, "server rate", low=0)

    @property
    def optimizer_name(self) -> str:
        return self.inner

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def init(self, w: Vector) -> ServerState:
        return ServerState(m=torch.zeros_like(w))

    def aggregate(
        self, w: Vector, ups: Model, state: ServerState, cohort: Cohort
    ) -> tuple[Vector, ServerState]:
        D = w - cohort.mean(ups.w)
        m = self.mu * state.m + D
        return w - self.server_lr * (D + self.mu * m), ServerState(m)
