"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017, arXiv:1602.05629, Algorithm 1.

    client  w <- w - lr g_i(w)                        K steps from w^t
    server  w^{t+1} = w^t + server_lr (w_bar - w^t),   w_bar = mean of the active clients' models

When to use: as the baseline, and if clients hold similar data. A round is one model each way, and
clients are stateless and may join and leave, so it suits cross-device federations. With
heterogeneous data and several local steps its fixed point is biased, more so at low participation.

Where we differ: clients count equally; the paper weights them by their examples
(weighting=examples). server_lr is an addition; 1 is the paper's mean.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fedaccord.core import Cohort, LocalRule, Model, Vector, option
from fedaccord.federation.strategy import FederatedStrategy


@dataclass(frozen=True)
class FedAvgClient(LocalRule):
    """Plain SGD from the received model: every hook of `LocalRule` is the default."""


@dataclass(frozen=True, kw_only=True)
class FedAvg(FederatedStrategy):
    assumes_sgd = False
    linear = True
    takes_weights = True
    averages = True
    synchronous = ""

    server_lr: float = option(1.0, "server rate: factor of the mean update", low=0)

    def rule(self) -> LocalRule:
        return FedAvgClient()

    def aggregate(self, w: Vector, ups: Model, state: Any, cohort: Cohort) -> tuple[Vector, Any]:
        w_bar = cohort.mean(ups.w)
        return torch.lerp(w, w_bar, self.server_lr), state  # w + server_lr (w_bar - w)
