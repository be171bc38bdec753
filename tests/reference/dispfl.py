"""DisPFL - arXiv:2206.00187, in dense numpy: personal sparse models.

    x_i = m_i * x^0 for all i, m_i given
    for t = 0 .. T-1:
        for all i:
            w_0 = x_i
            for k = 0 .. K-1:   w_{k+1} = m_i * (w_k - lr_t (g_i(w_k) + wd w_k))
            w_i = w_K,  m'_i = m_i
            per layer l:
                n = ceil(kappa_t ||m_{i,l}||_0),  kappa_t = (kappa_0 / 2) (1 + cos(pi t / T))
                the n coordinates of m_{i,l} with the smallest |w_i| become zeros
                n zeros of m_{i,l} become ones:
                    "gradient": those with the largest |g_i(w_i)|, dense, on the last step's batch
                    "random":   those that regrow(i, t, l, candidates, n) returns
        for all i at once:
            c = sum_{j in N_i + i} m'_j
            x_i = m_i * (sum_{j in N_i + i} w_j) / c,  0 where c = 0         (the new m_i)

N_i: the nodes j != i with W_ij != 0; no other property of W counts. Parameters come in layers:
`shapes` cut the flat vector in their order. Decisions: a round trains, then mixes, like the other
references; the paper's mixes, then trains, which in round 0 changes nothing as all nodes come
from one x^0. So the matrix of round t acts after its training. A coordinate pruned now may grow
again at once, so a dense layer stays dense. Ties go to the lowest index. w_i is not rewritten when
its mask changes; what has grown is zero until the mix. The clip acts on g_i before the mask. A
failed node keeps x_i and m_i. In the history `local` holds the w_i, traces["masks"][t] the masks
that round t trains with (row T: those after the last round).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from . import topology
from .gossip import GossipHistory, Network, decentralised
from .problem import Array

Shapes = Sequence[tuple[int, ...]]
Regrow = Callable[[int, int, int, NDArray[np.int64], int], Sequence[int]]


def erk(shapes: Shapes, density: float) -> list[float]:
    """Erdos-Renyi-kernel density of each layer: min(1, eps * sum(shape)/prod(shape)).

    eps is such that `density` of all parameters remain. Layers that would pass one are dense, and
    eps is solved again for the others.
    """
    size = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / n for shape, n in zip(shapes, size, strict=True)]
    dense: set[int] = set()
    while True:
        sparse = [layer for layer in range(len(shapes)) if layer not in dense]
        ones = density * sum(size) - sum(size[layer] for layer in dense)
        weight = sum(raw[layer] * size[layer] for layer in sparse)
        eps = ones / weight if sparse else 0.0
        full = {layer for layer in sparse if eps * raw[layer] >= 1}
        if not full:
            return [1.0 if n in dense else eps * raw[n] for n in range(len(shapes))]
        dense |= full


def ones_per_layer(shapes: Shapes, density: float) -> list[int]:
    """How many coordinates of each layer a mask keeps."""
    return [
        round(share * math.prod(shape))
        for share, shape in zip(erk(shapes, density), shapes, strict=True)
    ]


def layers(shapes: Shapes) -> list[slice]:
    """Where each layer is in the flat vector."""
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def smallest(score: Array, among: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """The n indices in `among` with the smallest score, ties to the lowest index."""
    return among[np.argsort(score[among], kind="stable")[:n]]


@decentralised
def run(
    f: Network,
    shapes: Shapes,
    masks: Array,  # (C, d) of zeros and ones: m_i of round 0
    kappa_0: float = 0.5,
    rounds: int | None = None,  # T of kappa_t; None: as many as there are matrices
    variant: str = "gradient",
    regrow: Regrow | None = None,
) -> GossipHistory:
    assert (variant == "random") == (regrow is not None)
    T = len(f.schedule) if rounds is None else rounds
    m = np.array(masks, dtype=float)
    x = m * f.w0
    f.last[:] = f.models[0][:] = x
    for t, W, lr_t in f.rounds(masks=m):
        kappa = kappa_0 / 2 * (1 + math.cos(math.pi * t / T))
        w, m_new = x.copy(), m.copy()
        for i in f.working(t):
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, w[i])
                w[i] = m[i] * (w[i] - lr_t * (g + f.wd * w[i]))
            f.end(i, w[i])
            g_dense = f.raw(t, i, f.K(i) - 1, w[i])
            for layer, part in enumerate(layers(shapes)):
                mask = m_new[i, part]  # a view
                n = math.ceil(kappa * np.count_nonzero(mask))
                mask[smallest(abs(w[i, part]), np.flatnonzero(mask), n)] = 0
                candidates = np.flatnonzero(mask == 0)
                if regrow is None:
                    new = smallest(-abs(g_dense[part]), candidates, n)
                else:
                    new = np.array(regrow(i, t, layer, candidates, n), dtype=np.int64)
                mask[new] = 1
        N = (topology.without(W, f.failed(t)) != 0) | np.eye(len(W), dtype=bool)
        total, c = N.astype(float) @ w, N.astype(float) @ m
        x = m_new * np.divide(total, c, out=np.zeros_like(c), where=c > 0)
        m = m_new
        f.record(x, w, masks=m)
    return f.history(mask=m)
