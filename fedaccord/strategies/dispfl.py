"""DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized Sparse Training.

Dai, Shen, He, Tian, Tao. ICML 2022, arXiv:2206.00187, Algorithm 1.

    state   m_i, the node's mask; w_i, its model, zero outside
    node    w = m_i * x_i;   w <- m_i * (w - lr g_i(w))       K steps; w_i = w_{i,K}
            per layer: drop the n = ceil(kappa_t nnz) smallest |w| from m_i, then add to it the n
            largest |g_i(w_i)| outside (regrow = gradient) or any n (random)
            kappa_t = (prune / 2) (1 + cos(pi t / T))
    gossip  x_i = (sum of w_j) / (number of j with m_j = 1)   over i and its neighbours j; else 0

A layer's density is that of an Erdos-Renyi kernel (ERK): proportional to the sum over the product
of its sides, at most 1; that of a single number, as a scale, is 1. Every node draws its first mask
by itself, from the seed and its number. w_i is not rewritten when the mask changes: new coordinates
take the neighbours' average. The gradient for regrowth is dense, at w_i, on the batch of the last
step.

When to use: if every node needs a model for its own data, and bandwidth or memory is scarce. Look
at personal-accuracy, which the paper reports. The relay does not know a node's next mask: the model
of the run, test metrics, consensus and drift are of x_i outside the mask too, which no node has.

Where we differ: graphs are those of gossip.py; the released code draws ten in-neighbours. That code
regrows at random; regrow=gradient is the paper's.
"""  # noqa: E501 - the paper's title

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedaccord.core import (
    Cohort,
    GradientAt,
    LocalConfig,
    LocalResult,
    LocalRule,
    Model,
    Shapes,
    Vector,
    clip_,
    each_client,
    option,
)
from fedaccord.core.method_settings import expect
from fedaccord.core.vectors import generator, to_device
from fedaccord.plugins.gossip import Gossip, Network
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.plugins.sam import SAM
from fedaccord.strategies.dfedavg import DFedAvg


class Up(NamedTuple):
    w: Vector
    mask: Vector  # that w was trained with


class ClientState(NamedTuple):
    w: Vector  # (..., d)
    mask: Vector  # (..., d), of the next round


class Buffers(NamedTuple):
    mask: Vector  # (..., d), of this round


# --- masks: (..., d), 0 or 1 ----------------------------------------------------------------------


def layer_sizes(shapes: Shapes, density: float) -> list[int]:
    """Ones of each layer's mask (ERK), about ``density`` of all; single numbers have theirs."""
    sizes = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / max(1, size) for shape, size in zip(shapes, sizes, strict=True)]
    dense = {i for i, size in enumerate(sizes) if size <= 1}
    while True:
        sparse = [i for i in range(len(sizes)) if i not in dense]
        left = max(0.0, density * sum(sizes) - sum(sizes[i] for i in dense))
        scale = left / sum(raw[i] * sizes[i] for i in sparse) if sparse else 0.0
        full = {i for i in sparse if scale * raw[i] >= 1}
        if not full:
            return [n if i in dense else round(scale * raw[i] * n) for i, n in enumerate(sizes)]
        dense |= full


def first_mask(shapes: Shapes, density: float, seed: int, client: int) -> Vector:
    """A random mask (d,) of the client's own."""
    own = generator(f"mask {seed} {client}")
    mask = torch.zeros(sum(map(math.prod, shapes)))
    layers = torch.split(mask, [math.prod(shape) for shape in shapes])
    for layer, ones in zip(layers, layer_sizes(shapes, density), strict=True):
        layer[torch.randperm(len(layer), generator=own)[:ones]] = 1
    return mask


def next_mask(
    mask: Vector, w: Vector, shapes: Shapes, density: float, kappa: float, score: Vector
) -> Vector:
    """``mask`` with a share kappa of each layer's ones moved to the places of highest ``score``."""
    sizes = [math.prod(shape) for shape in shapes]
    layers = zip(*(torch.split(v, sizes, dim=-1) for v in (mask, w, score)), strict=True)
    moved = []
    for ones, (old, values, scores) in zip(layer_sizes(shapes, density), layers, strict=True):
        n = math.ceil(kappa * ones)
        dropped = lowest(values.abs().masked_fill(old == 0, math.inf), n)
        pruned = old.masked_fill(dropped, 0)
        grown = lowest((-scores).masked_fill(pruned == 1, math.inf), n)
        moved.append(pruned.masked_fill(grown, 1))
    return torch.cat(moved, dim=-1)


def lowest(x: Vector, n: int) -> Tensor:
    """The n smallest of each vector x (..., d), ties: the first ones; bool, like x."""
    if not n:
        return torch.zeros_like(x, dtype=torch.bool)
    bound = x.kthvalue(n, dim=-1, keepdim=True).values
    below, ties = x < bound, x == bound
    left = n - below.sum(-1, keepdim=True)
    return below | (ties & (ties.cumsum(-1) <= left))


# --- the client half ------------------------------------------------------------------------------


@dataclass(frozen=True)
class DisPFLClient(LocalRule):
    sends = Up

    density: float
    prune: float
    regrow: str

    @property
    def takes_one_gradient(self) -> bool:
        return self.regrow != "gradient"

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> ClientState:
        def draw(client: int) -> Vector:
            return first_mask(config.shapes, self.density, config.seed, client)

        return ClientState(
            w=w, mask=to_device(each_client(config.client, draw).to(w.dtype), w.device)
        )

    def start(self, down: Model, state: ClientState, config: LocalConfig) -> Vector:
        return state.mask * down.w

    def gradient_init(
        self, w: Vector, down: Model, state: ClientState, config: LocalConfig
    ) -> Buffers:
        return Buffers(state.mask)

    def gradient(
        self, w: Vector, g: Vector, buffers: Buffers, at: GradientAt, config: LocalConfig
    ) -> Tensor:
        loss = at(w)
        clip_(g, config.clip_norm)
        g.mul_(buffers.mask)
        return loss

    def gradient_result(
        self, w: Vector, g: Vector, buffers: Buffers, at: GradientAt, config: LocalConfig
    ) -> Vector:
        """The score for regrowth: |g| at w_{i,K} on the last step's batch, or random numbers."""
        if self.regrow == "gradient":
            at(w)
            return g.abs()

        def draw(client: int) -> Vector:
            own = generator(f"regrow {config.seed} {config.round} {client}")
            return torch.rand(w.shape[-1], generator=own)

        return to_device(each_client(config.client, draw).to(w.dtype), w.device)

    def upload(self, w_K: Vector, down: Model, state: ClientState, result: LocalResult) -> Up:
        return Up(w_K, state.mask)

    def remember(
        self, read: Up, down: Model, state: ClientState, result: LocalResult
    ) -> ClientState:
        config, w_K = result.config, result.w_K
        kappa = self.prune / 2 * (1 + math.cos(math.pi * config.round / config.rounds))
        mask = next_mask(state.mask, w_K, config.shapes, self.density, kappa, score=result.gradient)
        return ClientState(w_K, mask)

    def personal(self, state: ClientState) -> Vector:
        return state.w


# --- the server half ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DisPFL(DFedAvg):
    assumes_sgd = True  # an optimiser's memory would leave the mask
    tied = False
    anneals = True  # the pruning rate falls to 0 over the rounds
    cost_note = (
        "the relay's, which sends masks as vectors; between peers the density and a bit per "
        "parameter, 1 each way per link; 1 gradient more a round with regrow=gradient"
    )
    refuses: ClassVar = {
        RelaxedInit: "the start is the neighbours' average inside the node's mask",
        SAM: "its ascent would leave the mask",
    }

    density: float = option(0.5, "share of the parameters that a node trains", above=0, high=1)
    prune: float = option(
        0.5, "share of a mask that is replaced in round 1, annealed to 0", low=0, high=1
    )
    regrow: str = option(
        "gradient", "new coordinates: of largest gradient, or any", choices=("gradient", "random")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = max(p.steps for p in self.active_plugins if isinstance(p, Gossip))
        if steps > 1:
            raise ValueError(
                f"gossip.steps: expected 1 with dispfl, got {steps}: it averages over "
                "masks, not by a mixing matrix"
            )
        why = ": its clients send masks, whose norms say nothing, and train a part of the model"
        expect(self, "max-client-norm", [0], "with dispfl", why)
        why = ": parameters that no mask has fall to 0 in its steps, above all in round 1"
        expect(self, "max-update-norm", [0], "with dispfl", why)

    def rule(self) -> LocalRule:
        return DisPFLClient(self.density, self.prune, self.regrow)

    def aggregate_nodes(
        self, w: Vector, ups: Up, state: Any, cohort: Cohort, network: Network
    ) -> tuple[Vector, Any]:
        masks = cohort.mean(ups.mask).clamp(0, 1)  # a node may send anything
        models = cohort.mean(ups.w) * masks
        bits = 1 / (8 * w.element_size())  # a bit per parameter, in vectors of d
        network.send(masks.mean(1) + bits)
        total, count = network.total(models), network.total(masks)
        return total.div_(count).nan_to_num_(0.0), state  # 0 / 0: no client trains it
