"""Secure sums with differential privacy: clients clip what they round, the server adds noise."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fedaccord import simulate
from fedaccord.core.cohort import Decoded
from fedaccord.core.privacy import seeded
from fedaccord.core.rule import LocalConfig
from fedaccord.federation import budget
from fedaccord.federation.accounting import Accountant, certainty
from fedaccord.plugins.dp import DP
from fedaccord.plugins.secure_sum import SecureSum
from fedaccord.strategies import METHODS
from tests import federation
from tests.engine.test_faults import gap
from tests.reference.problem import LeastSquares

C, CLIP = 6, 0.05
PROBLEM, W0 = LeastSquares(C), np.ones(5)
PLAIN: dict[str, Any] = {"lr_decay": 1.0, "weight_decay": 0.0, "batch_size": 0, "clip_norm": 0.0}


def run(name: str, z: float, bits: int, rounds: int, clients: Any = None, **more: Any) -> Any:
    method = METHODS[name](
        **{**PLAIN, "precision": "float64", "lr": 0.02, "local_steps": 3},
        **{"sampling": "bernoulli", "fraction_train": 1.0},
        plugins=[DP(clip=CLIP, noise_multiplier=z), SecureSum(bits=bits, range=1.0)],
    )
    return simulate(
        method,
        clients=clients or PROBLEM.clients(),
        model=federation.linear(W0),
        loss=federation.half_square,
        rounds=rounds,
        record="weights",
        **more,
    )


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(4, 16), st.floats(-3, 3), st.integers(0, 99))
def test_a_rounded_upload_has_at_most_the_norm_s(d: int, bits: int, size: float, seed: int) -> None:
    """Of all fields together, as the server reads them."""
    kind: Any = METHODS["scaffold"]().rule().sends
    numbers = torch.Generator().manual_seed(seed)
    w, *fields = torch.randn(3, d, generator=numbers, dtype=torch.float64)
    up, down = kind(*(10**size * v for v in fields)), SimpleNamespace(w=w)
    plugin = SecureSum(bits=bits, range=1.0, models="w", clip=1.0)
    result: Any = SimpleNamespace(config=LocalConfig(0, 1, 0.1, 0.0, 0.0, 0, seed, ()))
    error = plugin.step * (2 * d) ** 0.5
    if error >= 1:
        with pytest.raises(ValueError, match=r"raise secure-sum\.bits, or lower"):
            plugin.encode(up, down, None, result)
        return
    encoding, _ = plugin.encode(up, down, None, result)
    upload = plugin.decode(Decoded(encoding), kind, down, w).up
    norm = float(torch.cat([upload[0] - w, upload[1]]).norm())
    assert norm <= 1 + 1e-12
    assert norm >= min(1.0, float(torch.cat([up[0] - w, up[1]]).norm())) - 2 * error


def test_one_client_changes_the_released_sum_by_at_most_s() -> None:
    """With data that move its model further, and with data that do not move it."""
    models = []
    for scale in (0.0, 2.0):
        clients = PROBLEM.clients()
        clients[5] = (clients[5][0] * scale, clients[5][1] * scale)
        models.append(run("fedavg", 0.0, 40, 1, clients).state.w)
    assert 0.999 * CLIP < float((models[0] - models[1]).norm()) * C < CLIP * (1 + 1e-9)


def test_noise_is_added_to_the_sum_once(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(epsilon=lambda releases: 0.0)  # accounting takes seconds
    monkeypatch.setattr(budget, "Accountant", lambda *_: free)
    noisy, exact = (run("fedavg", z, 40, 1).state.w for z in (2.0, 0.0))
    torch.testing.assert_close(noisy - exact, seeded(0, 0)(5) * 2 * CLIP / C, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_memories_follow_what_the_server_reads(name: str) -> None:
    assert gap(name, run(name, 0.0, 12, 3)) < 1e-9


def test_a_round_without_a_sum_fails_and_its_noise_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who took part may show in it, and a step of noise alone would be useless."""
    free = SimpleNamespace(epsilon=lambda releases: 0.0)  # accounting takes seconds
    monkeypatch.setattr(budget, "Accountant", lambda *_: free)
    history = run("fedavg", 1.0, 24, 2, faults=lambda t, i: "late" if t and i > 1 else None)
    assert not torch.equal(history.weights[1], history.weights[0])
    assert torch.equal(history.weights[2], history.weights[1])
    assert (history.state.failed, history.state.privacy.releases) == (1, 2)


@pytest.mark.parametrize("q", [0.05, 0.3, 1.0])
def test_a_client_may_be_one_without_which_there_is_no_sum(q: float) -> None:
    """Counted over all draws of six clients: client 0 and exactly two others."""
    draws = [draw for draw in product((0, 1), repeat=C) if sum(draw) >= 3]
    chances = [math.prod(q if it else 1 - q for it in draw) for draw in draws]
    needed = sum(p for p, draw in zip(chances, draws, strict=True) if draw[0] and sum(draw) == 3)
    certain = needed / sum(chances)
    assert certainty(q, C, 3) == pytest.approx(certain, rel=1e-12)
    assert certainty(q, C, 0) == certainty(1e-3, 100_000, 3) == 0  # 2e-43: no loss of its own
    plugins = [DP(clip=CLIP, noise_multiplier=2.0), SecureSum()]
    steps: dict[str, Any] = {"sampling": "bernoulli", "fraction_train": q, "local_steps": 1}
    guarantee = METHODS["fedavg"](**steps, plugins=plugins).guarantee
    first = budget.first_of(guarantee, q, 2, C)
    expected = (2.0, q, guarantee.delta, pytest.approx(certain))
    assert budget.accountant(guarantee, first, C) == expected
    computed = guarantee._replace(multiplier=-1.0, epsilon=3.0)
    z = budget.first_of(computed, q, 2, C).multiplier
    assert Accountant(z, q, guarantee.delta, certain).epsilon(2) == pytest.approx(3.0, rel=1e-2)


@pytest.mark.parametrize(("clients", "q", "z"), [(100, 0.03, 1.0), (100, 0.03, 0.5), (30, 0.1, 1)])
def test_delta_of_a_sum_is_at_most_the_promised_one(clients: int, q: float, z: float) -> None:
    """All others send S, the client -S, and their number is hidden: by a grid over the sum."""
    delta, certain = 1e-3, certainty(q, clients, 3)
    epsilon = Accountant(z, q, delta, certain).epsilon(1)
    x, step = np.linspace(-10 * z - 1, 30, 40_000, retstep=True)
    others = binom.pmf(range(clients), clients - 1, q) / binom.sf(2, clients, q)
    having, lacking = np.zeros_like(x), np.zeros_like(x)
    for number, weight in enumerate(others[:30]):
        for takes_part, chance in ((0, 1 - q), (1, q)):
            if number + takes_part >= 3:
                having += weight * chance * norm.pdf(x, number - takes_part, z)
                lacking += weight * chance * norm.pdf(x, number, z)
    for one, other in ((having, lacking), (lacking, having)):
        excess = float(np.maximum(one - math.exp(epsilon) * other, 0).sum()) * step
        assert excess <= delta
    without = Accountant(z, q, delta).epsilon(1)
    assert np.maximum(having - math.exp(without) * lacking, 0).sum() * step > 2 * delta


@pytest.mark.parametrize(("q", "z", "certain"), [(0.03, 1.0, 0.0118), (0.2, 0.7, 0.3)])
def test_epsilon_of_a_round_is_that_of_both_sums(q: float, z: float, certain: float) -> None:
    """By the formulas of Gaussians: a sum that has the client, and one that has it with q."""

    def delta_at(epsilon: float) -> float:
        whole = norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(
            -0.5 / z - epsilon * z
        )
        at = z * z * math.log((math.exp(epsilon) - 1 + q) / q) + 0.5
        sampled = (1 - q) * norm.sf(at, 0, z) + q * norm.sf(at, 1, z)
        sampled -= math.exp(epsilon) * norm.sf(at, 0, z)
        return float(certain * whole + (1 - certain) * sampled)

    expected = brentq(lambda epsilon: delta_at(epsilon) - 1e-3, 1e-6, 30)
    assert Accountant(z, q, 1e-3, certain).epsilon(1) == pytest.approx(expected, rel=5e-3)


def test_rounding_that_cannot_stay_within_the_clip_is_one_line_before_round_1() -> None:
    """sqrt(5) steps of 2 / (2^4 - 1) are longer than S."""
    with pytest.raises(
        ValueError, match=r"rounding of 5 numbers within dp\.clip=0\.05, got 0\.298"
    ):
        run("fedavg", 0.0, 4, 1)
