"""Robust means instead of the mean of local models, as a plug-in of methods that only average.

Median and trimmed mean: Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates. ICML 2018, arXiv:1803.01498, definitions 1 and 2. Krum:
Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent. NeurIPS 2017, arXiv:1703.02757, section 4.

    median         each coordinate's median over the P active clients; of an even number the mean
                   of the two in the middle
    trimmed-mean   each coordinate's mean without its f smallest and f largest values
    krum           the one model whose sum of squared distances to its P - f - 2 nearest is smallest

f = trim P, rounded up, and at most as many as leave one value (trimmed mean) or one neighbour
(Krum). Krum's guarantee needs P > 2 f + 2.

When to use: if some clients may send anything, by fault or on purpose. Fewer than half of a
round's clients (median), or at most f of them (trimmed mean), can then move a coordinate no farther
than the range of the other clients. On heterogeneous data honest clients differ too: the median of
their models is not their mean, and Krum follows one client alone, so the model is worse if all
clients are honest. A method whose server sums up more than models (duals, control variates) is
refused: its memory would no longer be the clients'.

Where we differ: the papers take means of gradients, we of local models after their K steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedaccord.core.cohort import Cohort
from fedaccord.core.method_settings import OWN_BUFFERS, OWN_STATES, expect, has_gossip, in_use
from fedaccord.core.options import option
from fedaccord.core.plugin import PlugIn
from fedaccord.core.topology import ServerHalf
from fedaccord.core.vectors import Vector, fetch, sum_dtype

CHUNK = 1 << 20  # elements per sort


@dataclass(frozen=True, kw_only=True)
class Robust(PlugIn):
    rule: str = option(
        "median",
        "robust mean of the local models at the server",
        choices=("none", "median", "trimmed-mean", "krum"),
        auto=True,
    )
    trim: float = option(
        0.1,
        "share of a round's clients that may be faulty: cut at both ends (trimmed-mean), or "
        "tolerated (krum)",
        low=0,
        high=0.5,
        only={"rule": ["trimmed-mean", "krum"]},
    )

    @property
    def is_off(self) -> bool:
        return self.rule == "none"

    def fit(self, method: ServerHalf) -> "Robust":
        super().fit(method)
        name, beside = type(method).__name__, f"with robust.rule={self.rule}"
        if has_gossip(method):
            raise ValueError(
                f"robust.rule: expected none with gossip, got {self.rule!r}: nodes mix with their "
                "neighbours, and no server takes a mean"
            )
        if not method.averages or method.reads_starts:
            raise ValueError(
                f"robust.rule: expected none with {name}, got {self.rule!r}: its server step reads "
                "more than the mean of local models; use fedavg or one of its family, or bound "
                "the uploads by max-client-norm"
            )
        why = ": a plain mean of the optimisers' vectors"
        expect(method, "optimizer-state", OWN_STATES, beside, why)
        why = ": a plain mean of the buffers, which one client can spoil"
        expect(method, "buffers", OWN_BUFFERS, beside, why)
        cut = {"median": 1.0, "trimmed-mean": 2 * self.trim}.get(self.rule, 0.0)
        sent = min((plugin.sent_share for plugin in in_use(method)), default=1.0)
        if sent < 1 and cut >= sent / 2:
            raise ValueError(
                f"robust.rule: expected krum with sparse uploads, got {self.rule!r}: it may cut "
                "half or more of what clients send of a coordinate"
            )
        expect(method, "weighting", ["uniform"], beside, ": it counts clients equally")
        return self

    def mean(self, ups: Any, cohort: Cohort) -> tuple[Any, Cohort]:
        return ups._replace(w=(self.of(ups.w),)), cohort.of_mean()

    def of(self, xs: Sequence[Vector]) -> Vector:
        """The robust mean of the vectors (d,) of a round's clients."""
        P = len(xs)
        f = math.ceil(self.trim * P - 1e-9)
        if self.rule == "krum":
            return xs[krum(xs, f)]
        middle = (P - 1) // 2
        cut = middle if self.rule == "median" else min(f, middle)
        return trimmed_mean(xs, cut)


def trimmed_mean(xs: Sequence[Vector], cut: int) -> Vector:
    """Each coordinate's mean without its ``cut`` smallest and largest values; a fresh vector."""
    size = max(1, CHUNK // len(xs))
    parts = zip(*(torch.split(x, size) for x in xs), strict=True)
    middle = slice(cut, len(xs) - cut)
    return torch.cat([torch.stack(part).sort(0).values[middle].mean(0) for part in parts])


def krum(xs: Sequence[Vector], f: int) -> int:
    """The index of the vector that is nearest to its P - f - 2 nearest neighbours."""
    P = len(xs)
    near = max(1, P - f - 2)
    squares = torch.zeros(P, P, dtype=torch.float64)
    pairs = [(i, j) for i in range(P) for j in range(i)]
    dtype = sum_dtype(xs[0].device)
    far = [torch.linalg.vector_norm(xs[i] - xs[j], dtype=dtype) for i, j in pairs]
    for (i, j), distance in zip(pairs, fetch(far), strict=True):  # synchronises
        squares[i, j] = squares[j, i] = distance**2
    scores = squares.sort(1).values[:, 1 : near + 1].sum(1)  # the first is its own, zero
    return int(scores.argmin())
