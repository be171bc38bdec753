"""Relaxed initialisation (RI), as a plug-in of most methods.

Sun, Shen, Tao: Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
Initialization. NeurIPS 2023, arXiv:2306.05706, Algorithm 1.

    state l_i = w_{i,K} of client i's latest round (w^0 before its first)
    start w_{i,0} = w^t + beta (w^t - l_i)            instead of w_{i,0} = w^t
    end   l_i <- w_{i,K}

Only the start moves. Anchors of prox and dual terms stay at w^t, and the server averages as in the
method.

If the server needs w_{i,0}, the client sends it beside the method's own upload: with center =
start for methods with a dual step, whose anchor is there, and for methods whose server step reads
the true displacement w_{i,0} - w_{i,K}.

When to use: to improve a method on skewed data without further gradients. A client keeps one more
vector and receives w^0 once, with its first training message. A biased method stays biased.

Clients should return: the older l_i, the longer the jump. If a round draws a share p of the clients
and the server averages their models, then in directions without curvature, where the local steps
change nothing, the server moves by -beta times the mean of l_i - w^t over the cohort, and this mean
over all clients is multiplied by 1 + beta - p (1 + beta) on average. It grows unless

    beta < p / (1 - p)                                0.020 at 2%, 0.053 at 5%, 0.11 at 10%

In the paper, with 10%, 0.1 is best and 0.15 diverges. Here as well, while with 5% of 200 on
CIFAR-10 0.05 is best (39.6%; FedAvg 32.0%) and FedInit's default, 0.1, collapses (11.5%), and with
20% 0.2 is best and 0.3 collapses (docs/results/claims.md). The paper's theorem needs beta below
0.102, at any share. A server rate s makes the bound p / (s - p), a server momentum multiplies s.

If a method has duals, as FedDyn has, they sum up the jumps if the anchor stays at w^t, and grow in
such directions at any beta; with center = start, as in the authors' simulator, the bound above
holds, except for FedADMM's tracking, whose mean is over all clients. A-FedPD and FedLESAM-D cannot
move their anchor: use relaxed initialisation with them only at full participation.

Where we differ: we follow the paper. The authors' simulator moves the anchor too (center = start).
Its server step is fedinit.server = updates.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fedaccord.core.cohort import Decoded
from fedaccord.core.options import argument, option
from fedaccord.core.plugin import PlugIn, joined, joined_type
from fedaccord.core.rule import LocalResult
from fedaccord.core.topology import ServerHalf
from fedaccord.core.vectors import Vector

BOUND = math.sqrt(6) / 24  # 1 - 96 beta^2 > 0 in the paper's theorem


class RelaxedState(NamedTuple):
    last: Vector  # l_i (..., d)
    base: Any  # the method's own client state


class Start(NamedTuple):
    """Sent beside the method's own upload."""

    w_i0: Vector  # (..., d)


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
        "a client's first start: 'initial' uses w^0 as its last local model (the paper), "
        "'current' starts at w^t",
        choices=("initial", "current"),
    )
    center: str = option(
        "server",
        "anchor of prox and dual terms: w^t, or the relaxed start as in the authors' simulator",
        choices=("server", "start"),
    )
    sends_start: bool = argument(
        False, "set by `fit`: whether w_{i,0} is sent to the server", shown=False
    )

    @property
    def is_off(self) -> bool:
        return self.beta == 0

    def fit(self, method: ServerHalf) -> "RelaxedInit":
        super().fit(method)
        if self.moves_anchor and method.fixed_anchor:
            name = type(method).__name__
            raise ValueError(
                f"{name} does not support RelaxedInit.center=start: {method.fixed_anchor}"
            )
        return replace(self, sends_start=self.sends_start_to(method))

    def unread(self, method: ServerHalf) -> dict[str, str]:
        if self.center == "server" or method.reads_anchors or method.rule().reads_broadcast:
            return {}
        return {"center": "the method has no prox or dual term that would have an anchor"}

    def advice(self, method: ServerHalf, share: float) -> str:
        stable = share / (1 - share) if method.keeps_jumps and share <= 0.5 else 1.0
        if share < 1 and self.beta >= stable:
            return (
                f"relaxed-init.beta: with {100 * share:.3g}% of the clients in a step of the "
                "server, old local models and the server drive each other apart from "
                f"{stable:.3g} on, got {self.beta:g}; lower it, or raise fraction-train (in "
                "buffered rounds buffer-size)"
            )
        if share < 1 and self.beta > 0 and method.has_duals and not self.moves_anchor:
            fixed = method.fixed_anchor or method.is_buffered
            better = "leave it out" if fixed else "set relaxed-init.center=start"
            return (
                f"relaxed-init.beta: the duals of {type(method).__name__} sum up the jumps of the "
                f"start, and grow at any beta unless all clients train; {better}"
            )
        if self.beta > BOUND:
            return (
                f"relaxed-init.beta: the theory holds below sqrt(6)/24 = {BOUND:.3f}, got "
                f"{self.beta:g}"
            )
        return ""

    # the client half

    @property
    def needs_w_init(self) -> bool:
        return self.first_visit == "initial"

    @property
    def moves_anchor(self) -> bool:
        return self.center == "start"

    def init(self, w: Vector, w_init: Vector, base: Any) -> RelaxedState:
        return RelaxedState(w_init if self.first_visit == "initial" else w, base)

    def base(self, state: RelaxedState) -> Any:
        return state.base

    def start(self, w_i0: Vector, state: RelaxedState) -> Vector:
        return w_i0 + self.beta * (w_i0 - state.last)

    def received(self, down: Any, w_i0: Vector) -> Any:
        return down._replace(w=w_i0) if self.moves_anchor else down

    def encode(
        self, up: Any, down: Any, state: RelaxedState, result: LocalResult
    ) -> tuple[Any, RelaxedState]:
        if self.sends_start:
            up = joined(up, Start(result.w_i0))
        return up, RelaxedState(last=result.w_K, base=None)

    # the server half

    def sends(self, kind: Any) -> Any:
        return joined_type(kind, Start) if self.sends_start else kind

    def decode(self, decoded: Decoded, kind: Any, down: Any, like: Vector) -> Decoded:
        if not self.sends_start:
            return decoded
        *up, w_i0 = decoded.up
        return Decoded(kind(*up), w_i0)
