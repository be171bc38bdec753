"""The upload seat, by a small user of it: the k largest coordinates, with error feedback.

Alistarh, Hoefler, Johansson, Konstantinov, Khirirat, Renggli: The Convergence of Sparsified
Gradient Methods. NeurIPS 2018, arXiv:1809.10505.

    client  x = up + e_i;   sends the k largest |x_j| and where they are;   e_i <- x - what it sends
    server  zeros, but for what was sent

for every vector of the upload, with a memory e_i for each.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedaccord import strategies as S
from fedaccord.core.cohort import Decoded
from fedaccord.core.cost import upload_bytes
from fedaccord.core.plugin import PlugIn
from fedaccord.core.rounds import broadcast, client_round
from fedaccord.core.rule import LocalResult
from fedaccord.core.vectors import Vector, leaves
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import SAM, RelaxedInit
from tests import federation
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import Dense, Federation, History, close, federate, size

C, T, K = 6, 6, 3
LEAST_SQUARES = LeastSquares(C, num_rows=12, dim=10, seed=3)
W0 = np.random.default_rng(1).normal(size=10)
SOME = problem.cohorts(C, 3, T, seed=1)
SETTINGS: dict[str, Any] = {
    "precision": "float64",
    "lr": 0.04,
    "weight_decay": 0.05,
    "local_steps": K,
    "batch_size": 0,
}


class Errors(NamedTuple):
    """e_i, a vector (..., d) for each of an upload of up to two."""

    first: Vector
    second: Vector | None = None


class TopKState(NamedTuple):
    errors: Errors
    base: Any


@cache
def sparse(kind: Any) -> Any:
    """An upload's type with values and their places in the place of vectors."""
    fields = [(name + part, Vector) for name in kind._fields for part in ("", "_at")]
    return NamedTuple(f"Sparse{kind.__name__}", fields)


def split(x: Vector, k: int) -> tuple[Vector, Vector, Vector]:
    """The k largest values of x (..., d), where they are, and what is left."""
    at = x.abs().topk(k, dim=-1).indices
    return x.gather(-1, at), at, x.scatter(-1, at, 0.0)


@dataclass(frozen=True)
class TopK(PlugIn):
    share: float = 0.2  # k / d
    vectors: int = 0  # of an upload; `fit` sets it

    def fit(self, method: Any) -> "TopK":
        return replace(self, vectors=len(method.rule().sends._fields))

    def init(self, w: Vector, w_init: Vector, base: Any) -> TopKState:
        return TopKState(Errors(*(torch.zeros_like(w) for _ in range(self.vectors))), base)

    def base(self, state: TopKState) -> Any:
        return state.base

    def encode(
        self, up: Any, down: Any, state: TopKState, result: LocalResult
    ) -> tuple[Any, TopKState]:
        parts, errors = [], []
        for vector, error in zip(up, state.errors, strict=False):
            x = vector + error
            values, at, rest = split(x, math.ceil(self.share * x.shape[-1]))
            parts += [values, at]
            errors.append(rest)
        return sparse(type(up))(*parts), TopKState(Errors(*errors), None)

    def sends(self, kind: Any) -> Any:
        return sparse(kind)

    def wire_share(self, like: Vector) -> float:
        d, itemsize = len(like), like.dtype.itemsize
        return math.ceil(self.share * d) / d * (itemsize + 8) / itemsize

    def decode(self, decoded: Decoded, kind: Any, down: Any, like: Vector) -> Decoded:
        pairs, d = zip(decoded.up[::2], decoded.up[1::2], strict=True), like.shape[-1]
        vectors = []
        for values, at in pairs:
            vectors.append(torch.zeros(d, dtype=values.dtype).scatter(-1, at, values))
        return decoded._replace(up=kind(*vectors))


def make(kind: type[FederatedStrategy], *plugins: Any, **more: Any) -> FederatedStrategy:
    return kind(plugins=plugins, **(SETTINGS | more))


def run(method: FederatedStrategy) -> History:
    return federate(method, LEAST_SQUARES, W0, SOME)


RI, SHARP = RelaxedInit(beta=0.1), SAM(rho=0.1)
AROUND: dict[str, tuple[type[FederatedStrategy], tuple[Any, ...]]] = {
    "fedavg": (S.FedAvg, ()),
    "fedinit": (S.FedInit, ()),
    "scaffold": (S.Scaffold, ()),
    "scaffold, ri": (S.Scaffold, (RI,)),
    "scaffold, ri and sam": (S.Scaffold, (RI, SHARP)),
    "fedsmoo": (S.FedSMOO, ()),
    "afedpd, ri": (S.AFedPD, (RI,)),
    "fedadmm": (S.FedADMM, ()),
}
around = pytest.mark.parametrize("name", AROUND)


@around
def test_all_coordinates_are_the_bare_method_bit_for_bit(name: str) -> None:
    kind, plugins = AROUND[name]
    bare = run(make(kind, *plugins))
    history = run(make(kind, *plugins, TopK(share=1.0)))
    assert torch.equal(history.weights, bare.weights)
    for a, b in zip(history.clients, bare.clients, strict=True):
        for (_, x), (_, y) in zip(leaves(a.base), leaves(b), strict=True):
            assert torch.equal(x, y)
        assert not any(error.any() for _, error in leaves(a.errors))
    inside = run(make(kind, TopK(share=1.0), *plugins))
    assert torch.equal(inside.weights, bare.weights)


@around
def test_what_is_decoded_is_the_formula(name: str) -> None:
    """k of d coordinates of upload and error are received; the rest is the next error."""
    kind, plugins = AROUND[name]
    bare = make(kind, *plugins).client_half()
    method, k = make(kind, *plugins, TopK(share=0.3)), 3
    f = Federation(method, LEAST_SQUARES, W0, T)
    for active in SOME:
        for i in active:
            down = broadcast(method, f.s, i)
            before = f.state(i, down)
            solver = Dense(f.A[i], f.b[i], f.steps(i))
            plain = client_round(bare, down, before.base, f.config(i), solver)
            result = f.train(i, down)
            decoded = f.half.decode(result.up, down, f.w0).up
            for up, error, value, rest in zip(
                plain.up, before.errors, decoded, result.state.errors, strict=False
            ):
                assert torch.equal(value + rest, up + error)
                assert int((value != 0).sum()) == k
                assert value[value != 0].abs().min() >= rest.abs().max()
            assert size(result.up) == 2 * k * len(plain.up)
            for (_, a), (_, b) in zip(leaves(result.state.base), leaves(plain.state), strict=True):
                assert torch.equal(a, b)
        f.take(active)
    assert all(error.any() for i in f.states for _, error in leaves(f.states[i].errors))


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_traffic_is_counted_as_it_is_sent(share: float) -> None:
    """Through messages; the cost that a method states is the same."""
    plugins = (RI, TopK(share=share))
    method = make(S.Scaffold, *plugins)
    history = federation.run(make(S.Scaffold, *plugins), LEAST_SQUARES, W0, SOME)
    close(history.weights, run(method).weights, 1e-12)
    traffic = 2 * 2 * math.ceil(share * 10) / 10  # two vectors, values and places
    assert list(history.metrics["up-vectors"][1:] / 3) == pytest.approx([traffic] * T)
    assert (history.metrics["down-vectors"][2:] / 3 >= 2).all()
    d = 56
    nbytes = upload_bytes(method.cost, method.client_half(), torch.zeros(d))
    assert nbytes == pytest.approx(2 * (4 + 8) * math.ceil(share * d))
    assert method.cost.client == pytest.approx(2 + 2)  # c_i and l_i; two errors
    bare = make(S.Scaffold, RI).cost
    assert method.cost.up == bare.up  # what the server reads
    assert (nbytes < bare.up * 4 * d) == (share == 0.3)
    assert method.cost.down == bare.down
