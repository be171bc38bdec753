"""DFedAvgM: Decentralized Federated Averaging with momentum.

Sun, Li, Wang. IEEE TPAMI 2023, arXiv:2104.11375, Algorithm 1.

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
from typing import Any

import torch

from fedaccord.strategies.base import Clip, Direction, GradientAt, LocalRule, Plan, Vector
from fedaccord.strategies.dfedavg import DFedAvg
from fedaccord.strategies.options import option


class HeavyBall:
    """The gradient with weight decay, and momentum of the round's steps."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.u: Vector | None = None

    def __call__(self, model: Any, gradient_at: GradientAt, clip: Clip) -> Vector:
        loss = gradient_at(model.w)
        clip()
        if self.u is None:
            self.u = torch.zeros_like(model.g)
        self.u.mul_(self.momentum).add_(model.g).add_(model.w, alpha=self.weight_decay)
        model.g.copy_(self.u)
        return loss


@dataclass(frozen=True)
class DFedAvgMClient(LocalRule):
    momentum: float

    def direction(self, down: Any, state: Any, plan: Plan) -> Direction:
        return Direction(decay=0.0)  # weight decay is in the momentum

    def oracle(self, down: Any, state: Any, plan: Plan) -> HeavyBall:
        return HeavyBall(self.momentum, plan.weight_decay)


@dataclass(kw_only=True, eq=False)
class DFedAvgM(DFedAvg):
    momentum: float = option(
        0.9, "momentum of the local steps", low=0, high=1, tried="0.9 (DFedAvg)"
    )

    def rule(self) -> LocalRule:
        return DFedAvgMClient(self.momentum)
