"""Sharpness-aware minimisation (SAM), as a plug-in for the gradient of most methods.

Foret, Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving
Generalization. ICLR 2021, arXiv:2010.01412; in federated learning arXiv:2206.02618.

    e = rho g_i(w) / ||g_i(w)||                      one norm over all parameters
    step with g_i(w + e), on the same batch          instead of g_i(w)

Clip, weight decay, prox and dual terms do not enter e; the clip bounds the gradient at w + e.

When to use: if test accuracy gains from a flatter minimum, at twice the gradients. Traffic and
memory do not change. A fixed radius leaves a bias of its order, so exact methods are no longer
exact; at low participation FedInit's authors use a smaller one.

Where we differ: plain SAM, without the adaptive scaling of ASAM. 1e-12 is added to the norm, 1e-7
in the simulator of FedInit's authors. Some released code clips the gradient of the ascent too.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedaccord.core.options import argument, option
from fedaccord.core.plugin import PlugIn
from fedaccord.core.rule import GradientAt
from fedaccord.core.vectors import Vector, norm

EPS = 1e-12  # e = 0 if g = 0


class Buffers(NamedTuple):
    ascended: Vector  # w + e
    share: Vector | None  # the share of g(w); None: mix = 1


@dataclass(frozen=True)
class SAM(PlugIn):
    rho: float = option(
        0.1, "L2 radius of the ascent", low=0, tried="0.01, 0.1, 1 (FedSAM)", auto=True
    )
    mix: float = argument(1.0, "share of g(w + e) in the gradient; the rest is g(w)")
    normalised: bool = argument(True, "e = rho g / ||g||; else e = rho g")

    @property
    def is_off(self) -> bool:
        return self.rho == 0

    def gradient_init(self, w: Vector) -> Buffers:
        share = None if self.mix == 1 else torch.empty_like(w)
        return Buffers(torch.empty_like(w), share)

    def gradient(self, at: GradientAt, point: Vector, g: Vector, buffers: Buffers) -> Tensor:
        loss = at(point)
        if buffers.share is not None:
            torch.mul(g, 1 - self.mix, out=buffers.share)
        if self.normalised:
            torch.addcmul(point, g, self.rho / (norm(g) + EPS), out=buffers.ascended)
        else:
            torch.add(point, g, alpha=self.rho, out=buffers.ascended)
        at(buffers.ascended)
        if buffers.share is not None:
            g.mul_(self.mix).add_(buffers.share)
        return loss
