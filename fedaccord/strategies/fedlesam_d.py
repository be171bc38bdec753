"""FedLESAM-D: FedDyn with FedLESAM's perturbation (see feddyn.py and fedlesam.py).

Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang: Locally Estimated Global Perturbations are Better than
Local Perturbations for Federated Sharpness-aware Minimization. ICML 2024, arXiv:2405.18890.

    state   lam_i, and w_old = the model that i received when it was last active
    client  e = radius (w_old - w^t) / ||w_old - w^t||,   e = 0 at the first activation
            w <- w - lr (g_i(w + e) + lam_i + alpha (w - w^t))        K steps from w^t
            lam_i <- lam_i + alpha (w_{i,K} - w^t)
    server  as in feddyn.py

When to use: as FedSpeed, for one gradient a step instead of two, at FedAvg's traffic. Clients keep
two vectors and should return. The radius costs FedDyn its exactness.

Where we differ: as in feddyn.py and fedlesam.py.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fedaccord.core import LocalConfig, LocalResult, Model, Vector, option
from fedaccord.strategies.feddyn import FedDyn, FedDynClient
from fedaccord.strategies.fedlesam import FedLESAM, FedLESAMClient


class ClientState(NamedTuple):
    lam: Vector  # (..., d), lam_i
    w_old: Vector  # (..., d)


@dataclass(frozen=True)
class FedLESAMDClient(FedLESAMClient, FedDynClient):
    """FedLESAM's gradient in FedDyn's direction."""

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> Any:
        return ClientState(lam=torch.zeros_like(w), w_old=w)

    def remember(self, read: Model, down: Model, state: Any, result: LocalResult) -> Any:
        feddyn = FedDynClient.remember(self, read, down, state, result)
        return ClientState(feddyn.lam, w_old=down.w)


@dataclass(frozen=True, kw_only=True)
class FedLESAMD(FedDyn):
    fixed_anchor = FedLESAM.fixed_anchor
    refuses: ClassVar = FedLESAM.refuses

    radius: float = option(0.1, "L2 radius of the perturbation", low=0)

    def rule(self) -> FedLESAMDClient:
        return FedLESAMDClient(alpha=self.alpha, radius=self.radius)
