"""Compressed uploads: each compressor alone, and what holds for every method around it."""

import math
from dataclasses import replace
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedaccord import strategies as S
from fedaccord.config import RunConfig
from fedaccord.core.plugin import PlugIn
from fedaccord.core.rounds import broadcast, client_round
from fedaccord.core.rule import LocalConfig, Model
from fedaccord.core.vectors import PIECE
from fedaccord.plugins._compressors import (
    BLOCK,
    BUCKET,
    BFloat16,
    Compressor,
    Levels,
    RandK,
    Sign,
    TopK,
    largest,
    pack_bits,
    size,
    uniform,
    unpack_bits,
)
from fedaccord.plugins.compress import Compress
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.wire.records import pack
from tests.engine.test_faults import TIED, gap, small
from tests.reference import problem
from tests.reference.problem import LeastSquares
from tests.strategies.federate import Dense, Federation, base, federate
from tests.wire.methods import taken

EVERY: dict[str, Compressor] = {
    "topk, places": TopK(0.03),
    "topk, mask": TopK(0.3),
    "randk": RandK(0.1, scaled=False),
    "randk, scaled": RandK(0.1, scaled=True),
    "sign": Sign(),
    "qsgd 2": Levels(2, drawn=True),
    "qsgd 4": Levels(4, drawn=True),
    "qsgd 8": Levels(8, drawn=True),
    "bf16": BFloat16(torch.float32),
    "int8": Levels(8, drawn=False),
}
LONG = PIECE + 70_001  # several pieces, blocks and an odd last bucket
every = pytest.mark.parametrize("name", EVERY)


def vector(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_first_numbers_of_a_byte_are_its_lowest_bits(bits: int) -> None:
    per = 8 // bits
    numbers = [int(x) % 2**bits for x in vector(13).mul(1e6).abs()]
    padded = numbers + [0] * (-len(numbers) % per)
    expected = [
        sum(padded[i + j] << (bits * j) for j in range(per)) for i in range(0, len(padded), per)
    ]
    packed = pack_bits(torch.tensor(numbers, dtype=torch.uint8), bits)
    assert packed.tolist() == expected
    assert unpack_bits(packed, bits, 13).tolist() == numbers


def through(compressor: Compressor, x: Tensor, seed: int = 0) -> Tensor:
    packed = compressor.pack(x, torch.Generator().manual_seed(seed))
    return compressor.unpack(packed, len(x))


# --- one vector -----------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("d", [1, 2, 7, BUCKET, LONG])
def test_a_packed_vector_has_the_form_that_is_stated(name: str, d: int) -> None:
    compressor, x = EVERY[name], vector(d)
    before = x.clone()
    packed = compressor.pack(x, torch.Generator())
    assert [(t.dtype, t.numel()) for t in packed] == [*compressor.layout(d, x.dtype)]
    assert len(packed) == len(compressor.parts)
    result = compressor.unpack(packed, d)
    assert (result.shape, result.dtype) == (x.shape, x.dtype)
    assert torch.equal(x, before)
    assert not through(compressor, torch.zeros(d)).any()


def test_the_k_largest_are_exact() -> None:
    """Also where many are equal, and where the sample that guesses a threshold is no sample."""
    sorted_last = torch.arange(50_000.0)
    few = torch.zeros(50_000).index_fill_(0, torch.arange(7), 1.0)
    equal = torch.ones(50_000)
    for x in (vector(LONG), -vector(30), sorted_last, sorted_last.flip(0), few, equal):
        for k in {1, 5, len(x) // 10, len(x) - 1, len(x)} - {0}:
            at = largest(x, k)
            assert len(at) == k
            assert (at.diff() > 0).all()
            assert torch.equal(x[at].abs().sort().values, x.abs().topk(k).values.flip(0))
    assert largest(equal, 3).tolist() == [0, 1, 2]
    assert len(largest(torch.full((9,), math.nan), 3)) == 3


@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_top_k_is_a_contraction(share: float) -> None:
    x = vector(3000)
    rest = through(TopK(share), x) - x
    assert rest.square().sum() <= (1 - share) * x.square().sum()


@pytest.mark.parametrize("name", ["randk, scaled", "qsgd 2", "qsgd 4", "qsgd 8"])
def test_the_mean_over_the_draws_is_the_vector(name: str) -> None:
    x, draws = vector(40), 2000
    samples = torch.stack([through(EVERY[name], x, seed) for seed in range(draws)]).double()
    error = samples.mean(0) - x
    assert (error.abs() < 5 * samples.std(0) / draws**0.5 + 1e-6).all()
    assert samples.std(0).max() > 1e-3


def test_int8_rounds_to_the_nearest_level() -> None:
    """qsgd draws."""
    assert Compress(method="int8").compressor(torch.float32) == Levels(8, drawn=False)
    assert Compress(method="qsgd", bits=8).compressor(torch.float32) == Levels(8, drawn=True)


def test_the_others_are_their_formulas() -> None:
    x = vector(2000)
    torch.testing.assert_close(through(Sign(), x), x.sign() * x.abs().mean())
    assert through(Sign(), torch.tensor([-3.0, 0.0])).tolist() == [-1.5, 1.5]  # zero is positive
    assert torch.equal(through(BFloat16(torch.float32), x), x.bfloat16().float())
    scale = torch.cat([b.abs().max().expand(len(b)) for b in x.split(BUCKET)]) / 127
    assert ((through(Levels(8, drawn=False), x) - x).abs() <= scale / 2 * 1.0001).all()
    assert ((through(Levels(4, drawn=True), x) - x).abs() <= scale * 127 / 7 * 1.0001).all()
    part = through(RandK(0.1, scaled=False), x)
    assert int((part != 0).sum()) == 200
    assert torch.equal(part[part != 0], x[part != 0])
    draws = [EVERY["randk"].pack(x, torch.Generator().manual_seed(seed))[1] for seed in range(9)]
    assert len({int(stride) for _, stride in draws}) > 5


@pytest.mark.parametrize(
    ("compressor", "most"),
    [
        (TopK(0.01), 0.02),
        (TopK(0.1), 0.1 + 1 / 32 + 1e-4),
        (RandK(0.01, scaled=False), 0.0101),
        (Sign(), 1 / 32 + 1e-4),
        (Levels(4, drawn=True), 0.13),
        (Levels(8, drawn=False), 0.26),
        (BFloat16(torch.float32), 0.5),
    ],
)
def test_bytes(compressor: Compressor, most: float) -> None:
    d = 11_200_000  # 45 MB
    layout = compressor.layout(d, torch.float32)
    assert sum(part.numel * part.dtype.itemsize for part in layout) <= most * 4 * d


@pytest.mark.parametrize("d", [8, 9, 3000, BLOCK, BLOCK + 1, LONG])
def test_top_k_sends_the_smaller_form_of_its_places(d: int) -> None:
    """A bit for each number; or 2 bytes for each number sent and 4 for each block."""
    blocks, bits = math.ceil(d / BLOCK), math.ceil(d / 8)
    most = max((bits - 4 * blocks - 1) // 2, 0)  # the largest k for which a list is smaller
    for k in {most, most + 1} - {0}:
        _, *places = TopK((k + 0.5) / d).layout(d, torch.float32)
        assert sum(part.numel * part.dtype.itemsize for part in places) == min(
            bits, 2 * k + 4 * blocks
        )


def test_a_block_without_a_large_number_has_a_count_too() -> None:
    x = vector(LONG)
    x[BLOCK:] = 0
    packed = TopK(0.01).pack(x, torch.Generator())
    assert [part.numel() for part in packed] == [p.numel for p in TopK(0.01).layout(LONG, x.dtype)]
    assert packed[2].tolist() == [size(0.01, LONG), 0, 0, 0]


def test_the_last_place_of_a_block_is_of_that_block() -> None:
    at = torch.tensor([BLOCK - 1, BLOCK, LONG - 1])
    x = torch.zeros(LONG).index_fill_(0, at, 2.0)
    assert torch.equal(through(TopK(3 / LONG), x), x)


def test_a_share_is_of_decimal_numbers() -> None:
    assert 0.29 * 100 < 29
    assert size(0.29, 100) == 29


def test_random_roundings_have_no_bias() -> None:
    """The smallest and the largest number that is drawn are as far from 0 as from 1."""
    places = uniform(2**12, torch.Generator().manual_seed(0)) * 2**16
    assert (places % 1 == 0.5).all()
    assert 0 < places.min() < places.max() < 2**16


# --- what no client sends -------------------------------------------------------------------------


def message(plugin: Compress, x: Tensor) -> tuple[Any, Any, dict[str, Tensor]]:
    """The half of FedAvg, what it receives, and the tensors of an upload."""
    method = S.FedAvg(plugins=(plugin,))
    half = method.client_half()
    (own,) = half.plugins
    assert isinstance(own, Compress)
    packed = own.compressor(x.dtype).pack(x, torch.Generator())
    down = half.receives(torch.zeros_like(x))
    return half, down, dict(zip(half.sends._fields, packed, strict=True))


@pytest.mark.parametrize(
    ("plugin", "most"),
    [({"share": 0.01}, 0.02), ({"method": "qsgd", "bits": 4}, 0.13), ({"method": "sign"}, 0.032)],
)
def test_bytes_of_a_message(plugin: dict[str, Any], most: float) -> None:
    """With the headers of its arrays."""
    x = vector(1_000_000)
    half, _, parts = message(Compress(**plugin), x)
    nbytes = sum(len(array.data) for array in pack(half.sends(**parts)).values())
    assert sum(part.nbytes for part in parts.values()) < nbytes <= most * x.nbytes


@pytest.mark.parametrize(
    ("plugin", "part", "value", "line"),
    [
        ({"share": 0.01}, "w_values", torch.zeros(3), r"expected 'w_values' of shape \(30,\)"),
        ({"share": 0.01}, "w_values", None, r"expected 'w_values' of shape .*, got none"),
        ({"share": 0.01}, "w_places", torch.zeros(30), r"expected 'w_places' of .*int16, got"),
        (
            {"share": 0.01},
            "w_places",
            torch.zeros(30, dtype=torch.int16),
            "'w': expected 30 places in rising order from 0 to 2999, got others",
        ),
        (
            {"share": 0.01},
            "w_places",
            torch.arange(30, dtype=torch.int16),
            "'w': expected 30 places in rising order from 0 to 2999, got others",
        ),
        (
            {"share": 0.01},
            "w_places",
            torch.full((30,), -(2**15), dtype=torch.int16),  # the first place, 30 times
            "'w': expected 30 places in rising order from 0 to 2999, got others",
        ),
        (
            {"share": 0.01},
            "w_places",
            torch.arange(2971 - 2**15, 3001 - 2**15, dtype=torch.int16),  # up to 3000
            "'w': expected 30 places in rising order from 0 to 2999, got others",
        ),
        (
            {"share": 0.01},
            "w_counts",
            torch.tensor([2**30], dtype=torch.int32),
            "'w': expected counts of 30 places in all, got 1073741824",
        ),
        (
            {"share": 0.3},
            "w_places",
            torch.zeros(375, dtype=torch.uint8),
            "'w': expected 900 places in rising order",
        ),
        (
            {"method": "randk"},
            "w_lattice",
            torch.tensor([0, 2]),
            "'w': expected a start and a stride of 3000 places, got 0, 2",
        ),
        (
            {"method": "randk"},
            "w_lattice",
            torch.tensor([3000, 1]),
            "'w': expected a start and a stride of 3000 places, got 3000, 1",
        ),
    ],
)
def test_what_no_client_sends_is_refused_in_one_line(
    plugin: dict[str, Any], part: str, value: Tensor | None, line: str
) -> None:
    half, down, parts = message(Compress(**plugin), vector(3000))
    half.decode(half.sends(**parts), down, vector(3000).to("meta"))
    with pytest.raises(ValueError, match=rf"^{line}") as error:
        half.decode(half.sends(**{**parts, part: value}), down, vector(3000).to("meta"))
    assert "\n" not in str(error.value)


def test_negative_counts_are_refused() -> None:
    compressor, x = TopK(0.01), vector(BLOCK + 1)
    values, places, _ = compressor.pack(x, torch.Generator())
    counts = torch.tensor([len(values) + 1, -1], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^expected counts of {len(values)} places in all"):
        compressor.unpack((values, places, counts), len(x))


DP = {"sampling": "bernoulli", "dp.clip": 0.1, "dp.noise-multiplier": 0.0}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"algo": "dfedavg"}, "compress.method: expected none with gossip, got 'topk'"),
        ({"gossip.topology": "ring"}, "compress.method: expected none with gossip"),
        ({"algo": "local"}, "Local does not support Compress: its clients upload whole models"),
        (
            {"algo": "fedpd", "fraction-train": 1.0, "fedpd.p": 0.3},
            "p: expected 0 with Compress, got 0.3: without a broadcast",
        ),
        ({"compress.method": "qsgd", "compress.bits": 3}, "compress.bits: expected 2, 4 or 8, got"),
        ({"compress.method": "top"}, "compress.method: expected one of none, topk, randk"),
        ({"compress.share": 0.0}, "compress.share: expected above 0 and at most 1"),
        (
            DP | {"compress.error-feedback": "true"},
            "compress.error-feedback: expected auto or false with dp, got 'true'",
        ),
        (
            {"optimizer": "momentum", "optimizer-state": "average"},
            "optimizer-state: expected reset or keep with compress.method=topk, got 'average'",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=rf"^{line}") as error:
        RunConfig.make({"algo": "fedavg", "compress.method": "topk"} | settings)
    assert "\n" not in str(error.value)


def fitted(algo: str, settings: dict[str, Any]) -> Compress:
    """The plug-in as the method has it."""
    strategy = RunConfig.make({"algo": algo} | settings).strategy
    (plugin,) = (p for p in strategy.active_plugins if isinstance(p, Compress))
    return plugin


@pytest.mark.parametrize(
    ("algo", "settings", "expected"),
    [
        ("fedavg", {}, "true"),
        ("fedinit", {}, "true"),
        ("scaffold", {}, "false"),
        ("feddyn", {"compress.method": "sign"}, "false"),
        ("fedavg", {"compress.method": "qsgd"}, "false"),
        ("fedavg", {"compress.error-feedback": False}, "false"),  # as TOML reads false
        ("scaffold", {"compress.error-feedback": True}, "true"),
        ("fedavg", DP, "false"),
    ],
)
def test_error_feedback_is_for_methods_without_memory(
    algo: str, settings: dict[str, Any], expected: str
) -> None:
    assert fitted(algo, {"compress.method": "topk"} | settings).error_feedback == expected


@pytest.mark.parametrize(
    ("algo", "settings", "scaled"),
    [
        ("fedavg", {"compress.error-feedback": False}, True),
        ("fedavg", {}, False),  # the error is sent later
        ("fedavg", DP, False),
        ("scaffold", {}, False),  # the memory lacks what the upload lacks
        ("feddyn", {}, False),
        ("afedpd", {}, False),
        ("feddyn", {"compress.error-feedback": True}, False),
    ],
)
def test_rand_k_is_scaled_where_nothing_corrects_its_error(
    algo: str, settings: dict[str, Any], scaled: bool
) -> None:
    assert fitted(algo, {"compress.method": "randk"} | settings).scaled == scaled


@pytest.mark.parametrize(
    "settings", [{"method": "none"}, {"share": 1.0}, {"method": "randk", "share": 1.0}]
)
def test_nothing_is_compressed_where_nothing_would_be_lost(settings: dict[str, Any]) -> None:
    assert S.FedAvg(plugins=(Compress(**settings),)).active_plugins == ()


# --- around every method --------------------------------------------------------------------------

C, T, K = 4, 5, 2
LEAST_SQUARES = LeastSquares(C, num_rows=12, dim=10, seed=3)
W0 = np.random.default_rng(1).normal(size=10)
METHODS = ("topk", "randk", "sign", "qsgd", "bf16", "int8")


def compressed(name: str, method: str, *more: PlugIn, feedback: str = "auto") -> Any:
    plugin = Compress(method=method, share=0.3, error_feedback=feedback)
    return replace(small(name), plugins=(*more, plugin))


STARTED = [  # their server reads where clients started
    name for name in TIED if S.METHODS[name].reads_anchors and not S.METHODS[name].fixed_anchor
]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, ()) for name in TIED),
        *((name, (RelaxedInit(beta=0.1, center="start"),)) for name in STARTED),
    ],
)
def test_the_servers_memory_is_the_clients_with_every_compressor(name: str, more: Any) -> None:
    """mean(c_i) = c, mean(lam_i) = lam_bar: what clients remember is what the server read."""
    bare = replace(small(name), plugins=more)
    cohorts = problem.everyone(C, T) if bare.all_clients else problem.cohorts(C, 2, T, seed=1)
    weights = federate(bare, LEAST_SQUARES, W0, cohorts).weights
    for method in METHODS:
        history = federate(compressed(name, method, *more), LEAST_SQUARES, W0, cohorts)
        end: Any = SimpleNamespace(clients=history.clients, state=history.end)
        assert gap(name, end) < 1e-12, method
        assert not torch.allclose(history.weights, weights, rtol=1e-7), method


@pytest.mark.parametrize("name", ["fedpd", "fedadmm"])
def test_half_of_what_was_not_read_is_the_local_models_and_half_the_duals(name: str) -> None:
    """w_{i,K} + lam_i / rho is uploaded: of its error each takes the half."""
    method = compressed(name, "topk")
    f = Federation(method, LEAST_SQUARES, W0, T)
    down = broadcast(method, f.s, 0)
    solver = Dense(f.A[0], f.b[0], f.steps(0))
    plain = client_round(
        small(name).client_half(), down, f.state(0, down).base, f.config(0), solver
    )
    own, state = plain.state, f.train(0, down).state.base
    key = "anchor" if name == "fedpd" else "w_hat"
    diff = getattr(state, key) - getattr(own, key)
    assert diff.abs().max() > 1e-3
    torch.testing.assert_close(state.lam, own.lam + method.rho * diff / 2, rtol=1e-12, atol=1e-12)
    local, own_local = (getattr(x, key) - x.lam / method.rho for x in (state, own))
    torch.testing.assert_close(local, own_local + diff / 2, rtol=1e-12, atol=1e-12)
    if name == "fedpd":
        torch.testing.assert_close(state.w, own.w + diff / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plain", [S.FedADMM(variant="active"), S.FedSpeed(variant="paper")])
def test_of_a_model_with_its_dual_the_update_is_sent(plain: Any) -> None:
    method = replace(plain, plugins=(Compress(share=0.3),), precision="float64", local_steps=K)
    f = Federation(method, LEAST_SQUARES, W0, T)
    down = broadcast(method, f.s, 0)
    up = f.half.decode(f.train(0, down).up, down, f.w0).up
    assert 0 < int((up.w_hat - down.w).count_nonzero()) <= size(0.3, len(down.w))


SENT_MEMORY = {"fedsmoo": "mu", "fedmoswa": "c_i"}  # vectors that clients remember as sent
EVERY_METHOD = [name for name in S.METHODS if taken(name, "topk")]


OTHERS = [*zip(EVERY_METHOD, cycle(METHODS[1:]))]  # each method with one compressor in turn


@pytest.mark.parametrize(("name", "method"), [*product(EVERY_METHOD, ["topk"]), *OTHERS])
def test_what_is_read_and_the_next_error_are_the_update_and_the_last(
    name: str, method: str
) -> None:
    """So the errors telescope: the sum of what is read is that of the updates, less the last.

    The largest numbers of an update are sent, also of a model and of a start; and the memory of a
    vector that is sent follows what the server reads of it.
    """
    relaxed = (RelaxedInit(beta=0.1),) if taken(name, "ri") else ()
    own = compressed(name, method, *relaxed, feedback="true")
    bare = replace(own, plugins=relaxed).client_half()
    f = Federation(own, LEAST_SQUARES, W0, T, shapes=((2, 5),))
    for _ in range(2):
        down = broadcast(own, f.s, 0)
        before = f.state(0, down)
        solver = Dense(f.A[0], f.b[0], f.steps(0))
        up = client_round(bare, down, before.base, f.config(0), solver).up
        result = f.train(0, down)
        decoded = f.half.decode(result.up, down, f.w0)
        parts = decoded.up._asdict() | ({} if decoded.w_i0 is None else {"w_i0": decoded.w_i0})
        assert parts.keys() == up._asdict().keys() == result.state.errors._asdict().keys()
        for field, value in up._asdict().items():
            is_model = field in ("w", "w_i0") or name == "fedpd"
            w = down.w if is_model else torch.zeros_like(down.w)
            error, rest = (getattr(state.errors, field) for state in (before, result.state))
            torch.testing.assert_close(
                parts[field] - w + rest, value - w + error, rtol=1e-12, atol=1e-12
            )
            assert method != "topk" or int((parts[field] - w).count_nonzero()) <= size(0.3, len(w))
            if field == SENT_MEMORY.get(name):
                assert torch.equal(getattr(base(result.state), field), parts[field])
                assert method == "bf16" or not torch.equal(parts[field], value)
        f.take([0])


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_at_share_1_each_method_is_the_bare_one(name: str) -> None:
    plain = small(name)
    whole = replace(plain, plugins=(Compress(share=1.0),))
    assert (whole.client_half(), whole.rule()) == (plain.client_half(), plain.rule())


@pytest.mark.parametrize("method", ["randk", "qsgd"])
def test_random_numbers_are_of_seed_round_and_client(method: str) -> None:
    plugin = replace(Compress(method=method, share=0.1), fields="w", models="w")
    x, down = vector(4000), SimpleNamespace(w=torch.zeros(4000))
    messages = set()
    for seed, t, i in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]:
        config = LocalConfig(t, 2, 0.1, 0.0, 0.0, i, seed, ())
        result: Any = SimpleNamespace(config=config, w_K=x)
        state = plugin.init(x, x, None)
        packed, _ = plugin.encode(Model(x), down, state, result)
        messages.add(tuple(part.numpy().tobytes() for part in packed))
    assert len(messages) == 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn"])
def test_with_dp_no_upload_is_longer_than_the_clip(name: str, method: str) -> None:
    """The server reads at most the clip, whatever the compressor makes of it; memories follow."""
    settings = DP | {"compress.method": method, "compress.share": 0.3, "local-steps": 2}
    own = RunConfig.make({"algo": name, "precision": "float64", "lr": 0.05} | settings).strategy
    half, f = own.client_half(), Federation(own, LEAST_SQUARES, W0, T)
    f.half = half
    down = broadcast(own, f.s, 0)
    result = f.train(0, down)
    up = half.decode(result.up, down, f.w0).up
    parts = [up.w - down.w, *(v for n, v in up._asdict().items() if n != "w")]
    assert 0.01 < torch.cat(parts).norm() <= 0.1 * (1 + 1e-12)
    state = base(result.state)
    if name == "scaffold":
        torch.testing.assert_close(state.c_i, up.dc_i, rtol=1e-12, atol=1e-14)
    if name == "feddyn":
        expected = own.alpha * (up.w - down.w)  # type: ignore[attr-defined]
        torch.testing.assert_close(state.lam, expected, rtol=1e-12, atol=1e-14)
