"""Shared by FedDeper and Ditto: a client trains a model v_i of its own beside w."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedaccord.core import GradientAt, LocalConfig, LocalRule, Vector


class ClientState(NamedTuple):
    v: Vector  # (..., d), v_i


@dataclass(frozen=True)
class OwnModelClient(LocalRule):
    """Keeps v_i, w^0 at first; ``buffers`` of its steps have ``v`` and ``first`` (..., d).

    ``ends_at_v``: what stays at the client belongs to v_i. The pass at v is then the last one of a
    step, after which running statistics are kept, and which moves local parameters; without it that
    is the pass at w.
    """

    ends_at_v: bool

    @property
    def needs_w_init(self) -> bool:
        return True

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(v=w_init)

    def gradient(
        self, w: Vector, g: Vector, buffers: Any, at: GradientAt, config: LocalConfig
    ) -> Tensor:
        """That of w, after a step of v."""
        first = buffers.first
        first_point, last_point = (w, buffers.v) if self.ends_at_v else (buffers.v, w)
        loss = super().gradient(first_point, g, buffers, at, config)
        first.copy_(g)
        last_loss = super().gradient(last_point, g, buffers, at, config)
        if not self.ends_at_v:
            self.step(g, first, buffers, config)
            return last_loss
        self.step(first, g, buffers, config)
        g.copy_(first)
        return loss

    def step(self, g: Vector, g_v: Vector, buffers: Any, config: LocalConfig) -> None:
        """Move ``buffers.v`` along its clipped gradient; g, that of w, may change, too."""
        raise NotImplementedError

    def gradient_result(
        self, w: Vector, g: Vector, buffers: Any, at: GradientAt, config: LocalConfig
    ) -> Vector:
        v: Vector = buffers.v
        return v

    def personal(self, state: ClientState) -> Vector:
        return state.v


def ends_at_v(buffers: str, local_parameters: str) -> bool:
    """By the settings of these names: something stays at the client, and the server does not
    average the statistics, which then are those of w."""
    return buffers == "local" or (bool(local_parameters) and buffers != "mean")
