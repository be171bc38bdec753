"""FedLESAM: Locally Estimated Global Perturbations are Better than Local Perturbations for Federated Sharpness-aware Minimization.

Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang. ICML 2024, arXiv:2405.18890, Algorithm 1.

    state   w_old = the model that i received when it was last active
    client  e = radius (w_old - w^t) / ||w_old - w^t||,   e = 0 at the first activation
            w <- w - lr g_i(w + e)                                    K steps from w^t
    server  w^{t+1} = w^t + server_lr (w_bar - w^t)

When to use: for SAM at one gradient per step. The change of the broadcast model since the client's
last visit replaces the ascent; the first visit is FedAvg's. A client keeps one vector and should
return: after a long absence the direction is old. The radius leaves a bias. If the broadcast is
rounded (broadcast.dtype), e is mostly rounding once the model moves by less than a percent or so
between a client's visits.

Where we differ: we follow the paper. The released code uses the last round's global update for
every client, and divides by the sum of the layers' norms instead of one global norm. radius is our
provisional default.
"""  # noqa: E501 - the paper's title

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedaccord.core import (
    GradientAt,
    LocalConfig,
    LocalResult,
    LocalRule,
    Model,
    Vector,
    clip_,
    norm,
    option,
)
from fedaccord.plugins.sam import EPS, SAM
from fedaccord.strategies.fedavg import FedAvg


class ClientState(NamedTuple):
    w_old: Vector  # (..., d)


class Buffers(NamedTuple):
    e: Vector  # (..., d), one for the whole round
    ascended: Vector  # (..., d), w + e


@dataclass(frozen=True)
class FedLESAMClient(LocalRule):
    radius: float

    @property
    def takes_one_gradient(self) -> bool:
        return True

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(w_old=w)

    def gradient_init(
        self, w: Vector, down: Model, state: ClientState, config: LocalConfig
    ) -> Buffers:
        path = state.w_old - down.w
        e = path.mul_(self.radius / (norm(path) + EPS))
        return Buffers(e, torch.empty_like(e))

    def gradient(
        self, w: Vector, g: Vector, buffers: Buffers, at: GradientAt, config: LocalConfig
    ) -> Tensor:
        loss = at(torch.add(w, buffers.e, out=buffers.ascended))
        clip_(g, config.clip_norm)
        return loss

    def remember(
        self, read: Model, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(w_old=down.w)


@dataclass(frozen=True, kw_only=True)
class FedLESAM(FedAvg):
    tied = False
    fixed_anchor = "it keeps the model received, and has no separate anchor"
    refuses: ClassVar[dict[type[Any], str]] = {
        SAM: "it perturbs the model already, with its own radius"
    }

    radius: float = option(0.1, "L2 radius of the perturbation", low=0)

    def rule(self) -> LocalRule:
        return FedLESAMClient(self.radius)
