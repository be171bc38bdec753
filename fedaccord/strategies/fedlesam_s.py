"""FedLESAM-S: SCAFFOLD with FedLESAM's perturbation (see scaffold.py and fedlesam.py).

Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang: Locally Estimated Global Perturbations are Better than
Local Perturbations for Federated Sharpness-aware Minimization. ICML 2024, arXiv:2405.18890.

    state   c_i, and w_old = the model that i received when it was last active
    client  e = radius (w_old - w^t) / ||w_old - w^t||,   e = 0 at the first activation
            w <- w - lr (g_i(w + e) - c_i + c)                        K steps from w^t
            c_i+ = c_i - c + (w^t - w_{i,K}) / (K lr)
    server  as in scaffold.py

When to use: as FedGamma, for one gradient a step instead of two. Clients keep two vectors and
should return; traffic is twice FedAvg's both ways. The radius costs SCAFFOLD its exactness.

Where we differ: as in scaffold.py and fedlesam.py. radius is that of the authors' example command.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fedaccord.core import LocalConfig, LocalResult, Vector, argument, option
from fedaccord.strategies.fedlesam import FedLESAM, FedLESAMClient
from fedaccord.strategies.scaffold import Scaffold, ScaffoldClient


class ClientState(NamedTuple):
    c_i: Vector  # (..., d)
    w_old: Vector  # (..., d)


@dataclass(frozen=True)
class FedLESAMSClient(FedLESAMClient, ScaffoldClient):
    """FedLESAM's gradient in SCAFFOLD's direction."""

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> Any:
        return ClientState(c_i=torch.zeros_like(w), w_old=w)

    def remember(self, read: Any, down: Any, state: Any, result: LocalResult) -> Any:
        scaffold = ScaffoldClient.remember(self, read, down, state, result)
        return ClientState(scaffold.c_i, w_old=down.w)


@dataclass(frozen=True, kw_only=True)
class FedLESAMS(Scaffold):
    fixed_anchor = FedLESAM.fixed_anchor
    refuses: ClassVar = FedLESAM.refuses

    upload: str = argument("both", "w_{i,K} and the control variate", shown=False)
    radius: float = option(0.05, "L2 radius of the perturbation", low=0)

    def _why_both(self) -> str:
        return "its clients send c_i+ - c_i too"

    def rule(self) -> FedLESAMSClient:
        return FedLESAMSClient(self.radius)
