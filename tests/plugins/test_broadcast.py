"""Rounded broadcasts: each format alone, on the wire, and what holds for every method around it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.config import RunConfig
from fedaccord.core.plugin import PlugIn
from fedaccord.core.vectors import PIECE
from fedaccord.engine import History
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins._compressors import BUCKET, Compressor, Grid
from fedaccord.plugins.broadcast import Broadcast
from fedaccord.plugins.compress import Compress
from fedaccord.strategies import METHODS
from tests.engine.test_faults import LEAST_SQUARES, TIED, W0, gap, small
from tests.federation import half_square, linear
from tests.server import runs

DTYPES = ("bf16", "int8")
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def vector(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def fitted(dtype: str, method: Any = S.FedAvg) -> Broadcast:
    (own,) = method(plugins=(Broadcast(dtype=dtype),)).active_plugins
    assert isinstance(own, Broadcast)
    return own


@dtypes
def test_the_mean_over_the_draws_is_the_number(dtype: str) -> None:
    x, draws = vector(40), 2000
    plugin = fitted(dtype)
    samples = torch.stack([plugin.rounded(x, seed, 0, "w") for seed in range(draws)]).double()
    error, spread = samples.mean(0) - x, samples.std(0)
    assert (error.abs() < 5 * spread / draws**0.5 + 1e-7).all()
    assert spread.max() > 1e-3
    assert torch.equal(plugin.rounded(x, 3, 5, "w"), plugin.rounded(x, 3, 5, "w"))
    keys = [(3, 5, "w"), (4, 5, "w"), (3, 6, "w"), (3, 5, "c")]
    assert len({tuple(plugin.rounded(x, *key).tolist()) for key in keys}) == len(keys)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 127.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_on_the_grid_are_packed_without_a_loss(dtype: torch.dtype, scale: float) -> None:
    x = vector(PIECE + BUCKET + 7).to(dtype) * scale
    x[:BUCKET] = 0
    x[BUCKET] = 63.5  # the largest of a bucket, halfway to the next power
    drawn: Compressor = Grid(drawn=True, dtype=dtype)
    plain: Compressor = Grid(drawn=False, dtype=dtype)
    rounded = drawn.unpack(drawn.pack(x, torch.Generator().manual_seed(1)), len(x))
    packed = plain.pack(rounded, torch.Generator())
    assert [(t.dtype, t.numel()) for t in packed] == [*plain.layout(len(x), dtype)]
    assert torch.equal(plain.unpack(packed, len(x)), rounded)
    most = torch.cat([b.abs().max().expand(len(b)) for b in x.split(BUCKET)])
    assert ((rounded - x).abs() <= most / 63.5).all()  # a step is at most twice the finest
    assert not rounded[:BUCKET].any()


@dtypes
@pytest.mark.parametrize("method", [S.FedAvg, S.Scaffold, S.AFedPD])
def test_the_wire_carries_what_was_rounded_in_fewer_bytes(dtype: str, method: Any) -> None:
    plugin, kind = fitted(dtype, method), method().rule().receives
    rounds = {"missed"} if method is S.AFedPD else set()
    vectors = {name: vector(3000, seed) for seed, name in enumerate(kind._fields)}
    values = {n: v if n in rounds else plugin.rounded(v, 0, 0, n) for n, v in vectors.items()}
    down = kind(**values)
    packed = plugin.pack(down)
    assert type(packed)._fields == plugin.packed(kind)._fields
    assert sum(t.nbytes for t in packed if t is not None) == plugin.nbytes(down)
    copy = plugin.unpack(packed, kind, vector(3000).to("meta"))
    assert all(torch.equal(a, b) for a, b in zip(copy, down, strict=True))
    share = {"bf16": 0.5, "int8": 0.2505}[dtype]
    whole = len(rounds & {*kind._fields})
    assert plugin.nbytes(down) / 12_000 <= share * (len(kind._fields) - whole) + whole
    wrong = packed._replace(**{packed._fields[0]: torch.zeros(3)})
    with pytest.raises(ValueError, match=r"^expected 'w_(halves|levels)' of shape \(3000,\)"):
        plugin.unpack(wrong, kind, vector(3000).to("meta"))


def run(method: FederatedStrategy, rounds: int = 5, **more: Any) -> History:
    return simulate(
        method,
        clients=LEAST_SQUARES.clients(),
        model=linear(W0 / 3),  # numbers that no rounding keeps
        loss=half_square,
        rounds=rounds,
        record="weights",
        **more,
    )


def rounded(name: str, dtype: str, *more: PlugIn) -> FederatedStrategy:
    plain = small(name)
    common = ("precision", "lr", "batch_size", "local_steps")
    own: dict[str, Any] = {f: getattr(plain, f) for f in common}
    fraction = 1.0 if plain.all_clients else 0.5
    return type(plain)(**own, fraction_train=fraction, plugins=(*more, Broadcast(dtype=dtype)))


@pytest.mark.parametrize("name", TIED)
def test_the_servers_memory_is_the_clients(name: str) -> None:
    """mean(c_i) = c, mean(lam_i) = lam_bar: the server moves what it reads to its own model."""
    bare = run(rounded(name, "float32"))
    for dtype in DTYPES:
        history = run(rounded(name, dtype))
        assert gap(name, history) < 1e-12, dtype
        assert not torch.allclose(history.weights, bare.weights, rtol=1e-7), dtype


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "afedpd"])
def test_with_compressed_uploads_too(name: str) -> None:
    history = run(rounded(name, "int8", Compress(method="topk", share=0.3)))
    assert gap(name, history) < 1e-12


@pytest.mark.parametrize("name", ["fedinit", "scaffold", "afedpd"])
def test_messages_give_what_values_in_process_give(name: str) -> None:
    """The same bits, and the bytes that are counted are those of the messages."""
    plugins = (Broadcast(dtype="int8"), Compress(method="topk", share=0.4))
    more: dict[str, Any] = {"local_steps": 3, "batch_size": 0, "plugins": plugins}
    method = runs.strategy(METHODS[name], fraction_train=0.5, **more)
    over = runs.federation(method, 4)
    history = simulate(
        method,
        clients=runs.LEAST_SQUARES.clients(),
        model=linear(runs.W0),
        loss=half_square,
        rounds=4,
        record="weights",
    )
    assert all(torch.equal(r.w, w) for r, w in zip(over, history.weights, strict=True))
    for key in ("down-bytes", "up-bytes"):
        assert [r.metrics[key] for r in over[1:]] == [*history.metrics[key][1:]]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"algo": "dfedavg"}, "under gossip no server broadcasts"),
        ({"algo": "fedpd", "fraction-train": 1.0}, "its clients also start from models of their"),
        (
            {"algo": "fedavg", "optimizer": "momentum", "optimizer-state": "average"},
            "optimizer-state=average sends the optimisers' vectors",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^broadcast.dtype: expected float32 with .*{line}"):
        RunConfig.make(settings | {"broadcast.dtype": "int8"})


def test_float32_is_the_bare_method() -> None:
    assert S.FedAvg(plugins=(Broadcast(dtype="float32"),)).active_plugins == ()
