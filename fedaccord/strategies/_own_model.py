"""Shared by FedDeper and Ditto: a client trains a model v_i of its own beside w."""

from typing import Any, NamedTuple

from fedaccord.core import GradientAt, LocalConfig, LocalRule, Vector


class ClientState(NamedTuple):
    v: Vector  # (..., d), v_i


class OwnModelClient(LocalRule):
    """Keeps v_i, w^0 at first; `gradient` steps along it in ``buffers.v``."""

    @property
    def needs_w_init(self) -> bool:
        return True

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        return ClientState(v=w_init)

    def gradient_result(
        self, w: Vector, g: Vector, buffers: Any, at: GradientAt, config: LocalConfig
    ) -> Vector:
        v: Vector = buffers.v
        return v

    def personal(self, state: ClientState) -> Vector:
        return state.v
