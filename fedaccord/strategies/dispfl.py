"""DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized Sparse Training.

Dai, Shen, He, Tian, Tao. ICML 2022, arXiv:2206.00187, Algorithm 1.

    state   m_i, the node's mask; w_i, its model, zero outside
    node    w = m_i * x_i;   w <- m_i * (w - lr g_i(w))       K steps; w_i = w_{i,K}
            per layer: drop the n = ceil(kappa_t nnz) smallest |w| from m_i, then add to it the n
            largest |g_i(w_i)| outside (regrow = gradient) or any n (random)
            kappa_t = (prune / 2) (1 + cos(pi t / T))
    gossip  x_i = (sum of w_j) / (number of j with m_j = 1)   over i and its neighbours j; else 0

A layer's density is that of an Erdos-Renyi kernel (ERK): proportional to the sum over the product
of its sides, at most 1. Nodes begin with different random masks. w_i is not rewritten when the mask
changes: new coordinates take the neighbours' average. The gradient for regrowth is dense, at w_i, on
the batch of the last step.

When to use: where every node wants a model for its own data, and links or memory are narrow. Look
at personal-accuracy, which is what the paper reports; the mean of the nodes is no model of theirs.

Where we differ: graphs are those of gossip.py, where the released code draws ten in-neighbours. That
code regrows at random; gradient is the paper's.
"""  # noqa: E501 - the paper's title

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedaccord.strategies.base import (
    Client,
    Clip,
    Cost,
    GradientAt,
    LocalRule,
    Nodes,
    Plan,
    PlugIn,
    Vector,
    Work,
)
from fedaccord.strategies.dfedavg import DFedAvg
from fedaccord.strategies.gossip import Gossip, Network
from fedaccord.strategies.options import option

Shapes = Sequence[Sequence[int]]  # of the parameters, in vector order


class Down(NamedTuple):
    w: Vector
    mask: Vector | None  # the node's first mask; None: it has one


class Up(NamedTuple):
    w: Vector
    mask: Vector  # that w was trained with


class ClientState(NamedTuple):
    w: Vector
    mask: Vector  # of the next round; all zero before the first


# --- masks: (d,), 0 or 1 --------------------------------------------------------------------------


def layer_sizes(shapes: Shapes, density: float) -> list[int]:
    """Ones of each layer's mask (ERK), about ``density`` of all."""
    sizes = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    dense: set[int] = set()
    while True:
        sparse = [i for i in range(len(sizes)) if i not in dense]
        left = density * sum(sizes) - sum(sizes[i] for i in dense)
        scale = left / sum(raw[i] * sizes[i] for i in sparse) if sparse else 0.0
        full = {i for i in sparse if scale * raw[i] >= 1}
        if not full:
            return [n if i in dense else round(scale * raw[i] * n) for i, n in enumerate(sizes)]
        dense |= full


def first_mask(shapes: Shapes, density: float, seed: int, client: int, like: Vector) -> Vector:
    """A random mask of the client's own."""
    generator = _generator("mask", seed, client)
    mask = torch.zeros_like(like)
    layers = mask.split([math.prod(shape) for shape in shapes])
    for layer, ones in zip(layers, layer_sizes(shapes, density), strict=True):
        layer[torch.randperm(len(layer), generator=generator)[:ones]] = 1
    return mask


def next_mask(mask: Vector, w: Vector, shapes: Shapes, kappa: float, score: Vector) -> Vector:
    """``mask`` after a share kappa of each layer's ones moved to where ``score`` is highest."""
    mask = mask.clone()
    sizes = [math.prod(shape) for shape in shapes]
    for ones, values, scores in zip(*(v.split(sizes) for v in (mask, w, score)), strict=True):
        n = math.ceil(kappa * int(ones.sum()))
        ones[lowest(values.abs().masked_fill(ones == 0, math.inf), n)] = 0
        ones[lowest((-scores).masked_fill(ones == 1, math.inf), n)] = 1
    return mask


def lowest(x: Vector, n: int) -> Tensor:
    """Where the n smallest of x are, of equals the first; bool, like x."""
    if not n:
        return torch.zeros_like(x, dtype=torch.bool)
    bound = x.kthvalue(n).values
    found = x < bound
    ties = (x == bound).nonzero().flatten()
    found[ties[: n - int(found.sum())]] = True
    return found


def _generator(*key: Any) -> torch.Generator:
    seed = random.Random(" ".join(map(str, key))).getrandbits(63)
    return torch.Generator().manual_seed(seed)


# --- the client half ------------------------------------------------------------------------------


class MaskedGradient:
    """The gradient inside the mask; outside it, afterwards, on demand."""

    def __init__(self, mask: Vector, plan: Plan) -> None:
        self.mask = mask
        self.plan = plan

    def __call__(self, model: Any, gradient_at: GradientAt, clip: Clip) -> Vector:
        loss = gradient_at(model.w)
        clip()
        model.g.mul_(self.mask)
        self.model, self.gradient_at = model, gradient_at
        return loss

    def dense(self) -> Vector:
        """|g| at w as it is now, on the last step's batch."""
        self.gradient_at(self.model.w)
        return self.model.g.abs()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DisPFLClient(LocalRule):
    receives = Down
    sends = Up

    shapes: Shapes
    prune: float
    regrow: str
    rounds: int  # T

    def init(self, w: Vector, w_0: Vector) -> ClientState:
        return ClientState(w=w, mask=torch.zeros_like(w))

    def mask(self, down: Down, state: ClientState) -> Vector:
        if down.mask is not None:
            return down.mask
        if not state.mask.any():
            raise ValueError(
                "expected the mask of this node's last round, got none: it lost its state"
            )
        return state.mask

    def start(self, down: Down, state: ClientState) -> Vector:
        return self.mask(down, state) * down.w

    def oracle(self, down: Down, state: ClientState, plan: Plan) -> MaskedGradient:
        return MaskedGradient(self.mask(down, state), plan)

    def finish(
        self, w_K: Vector, down: Down, state: ClientState, work: Work
    ) -> tuple[Up, ClientState]:
        mask, plan = self.mask(down, state), work.oracle.plan
        kappa = self.prune / 2 * (1 + math.cos(math.pi * work.round / self.rounds))

        if self.regrow == "gradient":
            score = work.oracle.dense()
        else:
            generator = _generator("regrow", plan.seed, plan.round, plan.client)
            score = torch.rand(len(w_K), generator=generator).to(w_K)
        return Up(w_K, mask), ClientState(w_K, next_mask(mask, w_K, self.shapes, kappa, score))

    def personal(self, state: ClientState) -> Vector:
        return state.w


# --- the server half ------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class DisPFL(DFedAvg):
    cost = Cost(
        *(1, 2, 1),
        client=2,
        server=1,
        note="the relay's, where masks travel as vectors, once down; between peers the density and "
        "a bit per parameter, 1 each way per link; 1 gradient more a round with regrow=gradient",
    )
    refuses: ClassVar = {
        "RelaxedInit": "the start is the neighbours' average inside the node's mask",
        "SAM": "its ascent would leave the mask",
    }

    density: float = option(0.5, "share of the parameters that a node trains", above=0, high=1)
    prune: float = option(
        0.5, "share of a mask that moves in round 1, annealed to 0", low=0, high=1
    )
    regrow: str = option(
        "gradient", "new coordinates: of largest gradient, or any", choices=("gradient", "random")
    )
    plugins: tuple[PlugIn | Gossip, ...] = (Gossip(),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gossip and self.gossip.steps > 1:
            raise ValueError(
                f"gossip.steps: expected 1 with dispfl, got {self.gossip.steps}: it averages over "
                "masks, not by a mixing matrix"
            )

    def rule(self) -> LocalRule:
        return DisPFLClient(self._shapes(), self.prune, self.regrow, self.num_rounds)

    def _shapes(self) -> Shapes:
        return [list(shape) for shape in self._layout.values()]

    def broadcast(self, w: Vector, state: Any, client: Client) -> Down:
        if client.last_round >= 0:
            return Down(w, None)
        return Down(w, first_mask(self._shapes(), self.density, self.seed, client.id, w))

    def aggregate_nodes(
        self, w: Vector, ups: Up, state: Any, cohort: Nodes, network: Network
    ) -> tuple[Vector, Any]:
        models, masks = cohort.mean(ups.w), cohort.mean(ups.mask)
        bits = 1 / (8 * w.element_size())  # a bit per parameter, in vectors of d
        network.send(masks.mean(1) + bits)
        total, count = network.total(models), network.total(masks)
        return total.div_(count).nan_to_num_(0.0), state  # 0 / 0: nobody trains it
