"""DFedAvgM: DFedAvg with momentum (see dfedavg.py).

Sun, Li, Wang: Decentralized Federated Averaging. IEEE TPAMI 2023, arXiv:2104.11375, Algorithm 1.

    node    u <- momentum u + g_i(w),  u = 0 at first
            w <- w - lr u                             K steps from x_i^t; z_i = w_{i,K}
    gossip  x_i^{t+1} = sum over j of W_ij z_j        see gossip.py

The paper writes the step as y - lr g + momentum (y - y_{k-1}), which is the same. The buffer u
begins anew every round and is never sent.

When to use: for faster local progress at DFedAvg's traffic. The rate is in effect
lr / (1 - momentum), so lower lr where dfedavg is near its limit.

Where we differ: weight decay enters the momentum, as in torch.optim.SGD; the clip bounds the data
gradient before it does.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core import (
    Direction,
    GradientAt,
    LocalConfig,
    LocalRule,
    Vector,
    clip_,
    option,
)
from fedaccord.strategies.dfedavg import DFedAvg


class Buffers(NamedTuple):
    u: Vector  # (..., d)


@dataclass(frozen=True)
class DFedAvgMClient(LocalRule):
    momentum: float

    def direction(self, down: Any, state: Any, config: LocalConfig) -> Direction:
        return Direction(decay=0.0)  # weight decay is in the momentum

    def gradient_init(self, w: Vector, down: Any, state: Any, config: LocalConfig) -> Buffers:
        return Buffers(torch.zeros_like(w))

    def gradient(
        self, w: Vector, g: Vector, buffers: Buffers, at: GradientAt, config: LocalConfig
    ) -> Tensor:
        loss = at(w)
        clip_(g, config.clip_norm)
        g.copy_(buffers.u.mul_(self.momentum).add_(g).add_(w, alpha=config.weight_decay))
        return loss


@dataclass(frozen=True, kw_only=True)
class DFedAvgM(DFedAvg):
    momentum: float = option(
        0.9, "momentum of the local steps", low=0, high=1, tried="0.9 (DFedAvg)"
    )

    def rule(self) -> LocalRule:
        return DFedAvgMClient(self.momentum)
