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

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedaccord.strategies.base import Clip, GradientAt, Oracle, Plan, PlugIn, Vector, Work
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
        self.there: Vector | None = None  # w + e; both buffers are made in the first step
        self.g: Vector | None = None  # the share of g(w)

    def __call__(self, model: Any, gradient_at: GradientAt, clip: Clip) -> Vector:
        def ascended_at(w: Vector) -> Vector:
            return self.ascend(w, model.g, gradient_at)

        if self.inner is not None:
            return self.inner(model, ascended_at, clip)
        loss = ascended_at(model.w)
        clip()
        return loss

    def ascend(self, w: Vector, g: Vector, gradient_at: GradientAt) -> Vector:
        rho, mix = self.sam.rho, self.sam.mix
        loss = gradient_at(w)
        if mix != 1:
            self.g = torch.mul(g, 1 - mix, out=self.g)
        if self.sam.normalised:
            length = rho / (torch.linalg.vector_norm(g) + EPS)
            self.there = torch.addcmul(w, g, length, out=self.there)
        else:
            self.there = torch.add(w, g, alpha=rho, out=self.there)
        gradient_at(self.there)
        if self.g is not None:
            g.mul_(mix).add_(self.g)
        return loss


def with_sam(plugins: tuple[PlugIn, ...], **changes: Any) -> tuple[PlugIn, ...]:
    """The plug-ins with SAM's fields changed."""
    return tuple(replace(p, **changes) if isinstance(p, SAM) else p for p in plugins)
