"""Relaxed initialisation (RI), as a plug-in that any method takes.

Sun, Shen, Tao: Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
Initialization. NeurIPS 2023, arXiv:2306.05706, Algorithm 1.

    state l_i = w_{i,K} of client i's latest round (w^0 before its first)
    start w_{i,0} = w^t + beta (w^t - l_i)            instead of w_{i,0} = w^t
    end   l_i <- w_{i,K}

Only the start moves. Anchors of prox and dual terms stay at w^t, and the server averages as the
method says; the authors' simulator moves the anchor too, and adds mean displacements instead of
averaging models, which differs from the paper under partial participation.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fedaccord.strategies.base import PlugIn, Vector, Work
from fedaccord.strategies.options import option


class RelaxedState(NamedTuple):
    last: Vector  # l_i (d,)
    base: Any  # the method's own client state


@dataclass(frozen=True)
class RelaxedInit(PlugIn):
    beta: float = option(
        0.1, "relaxation: start at w + beta (w - last local model); theory: below 0.102", low=-1
    )
    first_visit: str = option(
        "initial",
        "a client's first start: 'initial' takes w^0 as its last local model (the paper), "
        "'current' starts at w^t",
        choices=("initial", "current"),
    )

    @property
    def needs_initial(self) -> bool:
        return self.first_visit == "initial" or self.rule.needs_initial

    def init(self, w: Vector, w_0: Vector) -> RelaxedState:
        last = w_0 if self.first_visit == "initial" else w
        return RelaxedState(last, self.rule.init(w, w_0))

    def base(self, state: RelaxedState) -> Any:
        return state.base

    def start(self, down: Any, state: RelaxedState) -> Vector:
        return super().start(down, state) + self.beta * (down.w - state.last)

    def finish(
        self, w_K: Vector, down: Any, state: RelaxedState, work: Work
    ) -> tuple[Any, RelaxedState]:
        up, base = super().finish(w_K, down, state, work)
        return up, RelaxedState(w_K, base)
