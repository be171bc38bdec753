"""Sharpness-aware minimisation (SAM), as a plug-in in the gradient seat of any method.

Foret, Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving
Generalization. ICLR 2021, arXiv:2010.01412; in federated learning arXiv:2206.02618.

    e = rho g_i(w) / ||g_i(w)||                      one norm over all parameters
    step with g_i(w + e), on the same batch          instead of g_i(w)

Clip, weight decay, prox and dual terms do not enter e; the clip bounds the gradient at w + e.

When to use: where test accuracy gains from a flatter minimum, at twice the gradients. Traffic and
memory stay as they are. A fixed radius leaves a bias of its order, so exact methods are exact no
more; at low participation FedInit's authors take a smaller one.

Where we differ: plain SAM, without the adaptive scaling of ASAM. The norm has 1e-12 beside it, the
simulator of FedInit's authors 1e-7. Some released code clips the gradient of the ascent too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedaccord.strategies.base import Oracle, Plan, PlugIn, Vector, Work
from fedaccord.strategies.options import option

EPS = 1e-12  # keeps e at zero where g is


@dataclass(frozen=True)
class SAM(PlugIn):
    rho: float = option(
        0.1, "L2 radius of the ascent", low=0, tried="0.01, 0.1, 1 (FedSAM)", auto=True
    )
    mix: float = 1.0  # share of g(w + e) in the gradient; the rest is g(w)
    normalised: bool = True  # e = rho g / ||g||; else e = rho g

    def oracle(self, down: Any, state: Any, plan: Plan) -> "SAMOracle":
        return SAMOracle(self, super().oracle(down, state, plan))

    def finish(self, w_K: Vector, down: Any, state: Any, work: Work) -> tuple[Any, Any]:
        return super().finish(w_K, down, state, work._replace(oracle=work.oracle.inner))


class SAMOracle:
    """Gives another oracle the gradient at w + e wherever it asks for one at w."""

    def __init__(self, sam: SAM, inner: Oracle | None) -> None:
        self.sam = sam
        self.inner = inner
        self.w: Vector | None = None  # buffers, made once a round
        self.g: Vector | None = None

    def __call__(
        self, model: Any, at_point: Callable[[], Vector], clip: Callable[[], None]
    ) -> Vector:
        def ascended() -> Vector:
            return self.ascend(model, at_point)

        if self.inner is not None:
            return self.inner(model, ascended, clip)
        loss = ascended()
        clip()
        return loss

    def ascend(self, model: Any, at_point: Callable[[], Vector]) -> Vector:
        w, g, mix = model.w, model.g, self.sam.mix
        loss = at_point()
        self.w = keep(self.w, w)
        if mix != 1:
            self.g = keep(self.g, g)
        if self.sam.normalised:
            w.addcmul_(g, self.sam.rho / (torch.linalg.vector_norm(g) + EPS))
        else:
            w.add_(g, alpha=self.sam.rho)
        at_point()
        w.copy_(self.w)
        if self.g is not None:
            g.mul_(mix).add_(self.g, alpha=1 - mix)
        return loss


def keep(buffer: Vector | None, vector: Vector) -> Vector:
    """A copy of ``vector`` in ``buffer``, which is made at the first call."""
    return vector.clone() if buffer is None else buffer.copy_(vector)


def with_sam(plugins: tuple[PlugIn, ...], **changes: Any) -> tuple[PlugIn, ...]:
    """The plug-ins with SAM's fields changed."""
    return tuple(replace(p, **changes) if isinstance(p, SAM) else p for p in plugins)
