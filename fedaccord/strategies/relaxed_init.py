"""Relaxed initialisation (RI), as a plug-in that any method takes.

Sun, Shen, Tao: Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
Initialization. NeurIPS 2023, arXiv:2306.05706, Algorithm 1.

    state l_i = w_{i,K} of client i's latest round (w^0 before its first)
    start w_{i,0} = w^t + beta (w^t - l_i)            instead of w_{i,0} = w^t
    end   l_i <- w_{i,K}

Only the start moves. Anchors of prox and dual terms stay at w^t, and the server averages as the
method says.

When to use: to better a method on skewed data at no further gradients. A client keeps one more
vector and is sent w^0 once, with its first order; FedCM's clients also send their start. Clients
should come back: the older l_i, the longer the jump. beta above 0.102 leaves the theory, and in the
paper 0.15 ends in divergence. It makes no biased method exact.

Where we differ: not from the paper. The authors' simulator moves the anchor too (center = start),
and adds the mean displacement instead of averaging models (server = updates), which differs under
partial participation.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedaccord.strategies.base import Direction, LocalRule, Plan, PlugIn, Vector, Work
from fedaccord.strategies.fedavg import FedAvgClient
from fedaccord.strategies.options import option

BOUND = math.sqrt(6) / 24  # 1 - 96 beta^2 > 0 in the paper's theorem


class RelaxedState(NamedTuple):
    last: Vector  # l_i (d,)
    base: Any  # the method's own client state


@dataclass(frozen=True)
class RelaxedInit(PlugIn):
    beta: float = option(
        0.1,
        "relaxation: start at w + beta (w - last local model); theory: below 0.102",
        low=-1,
        auto=True,
        tried="-0.2, -0.1, 0.01, 0.02, 0.05, 0.1, 0.15 (FedInit)",
    )
    first_visit: str = option(
        "initial",
        "a client's first start: 'initial' takes w^0 as its last local model (the paper), "
        "'current' starts at w^t",
        choices=("initial", "current"),
    )
    center: str = option(
        "server",
        "anchor of prox and dual terms: w^t, or the relaxed start as in the authors' simulator",
        choices=("server", "start"),
    )
    server: str = option(
        "models",
        "fedavg and fedinit average local models (the paper), or add mean displacements (the "
        "authors' simulator)",
        choices=("models", "updates"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server == "updates" and type(self.rule) not in (LocalRule, FedAvgClient):
            raise ValueError(
                f"relaxed-init.server: expected 'models' with {type(self.rule).__name__}, got "
                "'updates': only fedavg and fedinit have a server rule that adds displacements"
            )

    def advice(self) -> str:
        if self.beta <= BOUND:
            return ""
        return (
            f"relaxed-init.beta: the theory holds below sqrt(6)/24 = {BOUND:.3f}, got "
            f"{self.beta:g}; in the paper 0.15 ends in divergence"
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
        w = super().start(down, state)  # w^t
        return w + self.beta * (w - state.last)

    def direction(self, down: Any, state: RelaxedState, plan: Plan) -> Direction:
        return super().direction(self.seen(down, state), state, plan)

    def seen(self, down: Any, state: RelaxedState) -> Any:
        """What the method takes for the broadcast: its anchor is the model in it."""
        if self.center == "server":
            return down
        return down._replace(w=self.start(down, state))

    def finish(
        self, w_K: Vector, down: Any, state: RelaxedState, work: Work
    ) -> tuple[Any, RelaxedState]:
        up, base = super().finish(w_K, self.seen(down, state), state, work)
        if self.server == "updates":
            up = up._replace(w=w_K - (work.w_0 - down.w))
        if self.center == "start" and "w_0" in up._fields:  # the server cannot know the anchor
            up = up._replace(w_0=work.w_0)
        return up, RelaxedState(w_K, base)
