"""Ditto: Fair and Robust Federated Learning Through Personalization.

Li, Hu, Beirami, Smith. ICML 2021, arXiv:2012.04221, Algorithm 1.

    state   v_i, the client's own model, w^0 at first
    client  w <- w - lr g_i(w)                                        K steps from w^t
            v_i <- v_i - lr (g_i(v_i) + lam (v_i - w^t))              K steps, on the same batches
    server  w^{t+1} = w^t + server_lr (w_bar - w^t)

When to use: if each client needs a model of its own beside FedAvg's, which stays the same bit for
bit (without local-parameters). v_i is the client's model: lam = 0 trains it alone, as `local` does,
and a large lam keeps it near w^t. It stays on the client, which should return. Traffic is FedAvg's
at twice the gradients.

Where we differ: v_i takes as many steps as w, on the same batches; the paper leaves both free. The
two gradients are clipped separately, and weight decay acts on both. Keep lr lam below 1: the pull
is a part of the step, which otherwise overshoots. The paper chooses lam for each client by its own
held-out samples, among 0.1, 1 and 2, and uses 1 if there are too few; here it is one number. With
relaxed-init.center = start v_i is pulled to the relaxed start, not to w^t. Parameters that stay at
the client are v_i's: they follow its gradient, and w trains with them. With buffers = mean they are
w's, and w is FedAvg's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fedaccord.core import (
    LocalConfig,
    LocalResult,
    LocalRule,
    Model,
    Vector,
    option,
)
from fedaccord.strategies._own_model import ClientState, OwnModelClient, ends_at_v
from fedaccord.strategies.fedavg import FedAvg


class Buffers(NamedTuple):
    v: Vector  # (..., d), v_i during the steps
    first: Vector  # (..., d), the first of a step's gradients
    pull: Vector  # (..., d), lr lam w^t


@dataclass(frozen=True)
class DittoClient(OwnModelClient):
    lam: float

    def gradient_init(
        self, w: Vector, down: Model, state: ClientState, config: LocalConfig
    ) -> Buffers:
        return Buffers(state.v.clone(), torch.empty_like(state.v), config.lr * self.lam * down.w)

    def step(self, g: Vector, g_v: Vector, buffers: Buffers, config: LocalConfig) -> None:
        shrink = 1 - config.lr * (self.lam + config.weight_decay)
        buffers.v.mul_(shrink).add_(g_v, alpha=-config.lr).add_(buffers.pull)

    def remember(
        self, read: Model, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        return ClientState(v=result.gradient)


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    assumes_sgd = True  # v has steps of its own
    tied = False

    lam: float = option(
        1.0, "strength of the pull of v towards w^t", low=0, tried="0.05, 0.1, 0.2, 1, 2"
    )

    def rule(self) -> LocalRule:
        return DittoClient(ends_at_v(self.buffers, self.local_parameters), self.lam)
