"""FedLESAM: Locally Estimated Global Perturbations are Better than Local Perturbations for Federated SAM.

Fan, Hu, Yao, Tian, Zhang, Sugiyama, Wang. ICML 2024, arXiv:2405.18890, Algorithm 1.

    state   w_old = the model that i received when it was last active
    client  e = radius (w_old - w^t) / ||w_old - w^t||,   e = 0 at the first activation
            w <- w - lr g_i(w + e)                                    K steps from w^t
    server  w^{t+1} = w^t + server_lr (w_bar - w^t)

When to use: for SAM at one gradient per step. The way the broadcast model went since the client's
last visit stands for the ascent; the first visit is FedAvg's. A client keeps one vector and should
come back: after a long absence the direction is old. The radius leaves a bias.

Where we differ: not from the paper. The released code takes the last round's global update for
every client, and divides by the sum of the layers' norms; here one global norm. radius is our
provisional default.
"""  # noqa: E501 - the paper's title

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fedaccord.strategies.base import Clip, Cost, GradientAt, LocalRule, Model, Plan, Vector, Work
from fedaccord.strategies.fedavg import FedAvg
from fedaccord.strategies.options import option
from fedaccord.strategies.sam import EPS


class ClientState(NamedTuple):
    w_old: Vector


class GradientBeside:
    """The batch's gradient at w + e, for one e all round long."""

    def __init__(self, e: Vector) -> None:
        self.e = e
        self.there = torch.empty_like(e)  # w + e

    def __call__(self, model: Any, gradient_at: GradientAt, clip: Clip) -> Vector:
        loss = gradient_at(torch.add(model.w, self.e, out=self.there))
        clip()
        return loss


@dataclass(frozen=True)
class FedLESAMClient(LocalRule):
    radius: float

    def init(self, w: Vector, w_0: Vector) -> ClientState:
        return ClientState(w_old=w)

    def oracle(self, down: Model, state: ClientState, plan: Plan) -> GradientBeside:
        path = state.w_old - down.w
        return GradientBeside(path.mul_(self.radius / (torch.linalg.vector_norm(path) + EPS)))

    def finish(
        self, w_K: Vector, down: Model, state: ClientState, work: Work
    ) -> tuple[Model, ClientState]:
        return Model(w_K), ClientState(w_old=down.w)


@dataclass(kw_only=True, eq=False)
class FedLESAM(FedAvg):
    cost = Cost(down=1, up=1, gradients=1, client=1, server=1)
    refuses: ClassVar = {
        "SAM": "it perturbs the model already, with its own radius",
        "RelaxedInit.center=start": "it keeps the model received, and has no anchor to move",
    }

    radius: float = option(0.1, "L2 radius of the perturbation", low=0)

    def rule(self) -> LocalRule:
        return FedLESAMClient(self.radius)
