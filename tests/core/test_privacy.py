"""Clipped and noisy sums: their sensitivity, their noise, the adaptive clip."""

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaccord.core import privacy as p
from fedaccord.core.cohort import Reply
from fedaccord.core.privacy import Privacy, clipped, release, seeded
from fedaccord.core.rule import Model
from fedaccord.core.vectors import Vector
from fedaccord.strategies import METHODS

C, D, Q = 8, 5, 0.5
W = torch.linspace(-2, 3, D, dtype=torch.float64)
BARE = Privacy(0, 0.0, 1e30, Q, False)
READS_SUMS = [
    name
    for name, kind in METHODS.items()
    if not (method := kind(fraction_train=1.0, local_steps=1)).beyond_sums
    and not method.topology.is_decentralised
]


def nothing(n: int) -> torch.Tensor:
    raise AssertionError("expected no noise to be drawn")


def uploads(kind: Any, P: int, seed: int, size: float = 1.0) -> list[Reply]:
    draw = torch.Generator().manual_seed(seed)
    vector = lambda: size * torch.randn(D, generator=draw, dtype=torch.float64)  # noqa: E731
    return [Reply(i, kind(*(vector() for _ in kind._fields)), 1, 1) for i in range(P)]


def sums(privacy: Privacy, replies: list[Reply], rule: Any, normal: Any = nothing) -> Vector:
    """All released fields in one vector, as sums of updates."""
    mean, _ = release(privacy, replies, W, rule.sends, rule.models, C, normal)
    updates = [v - W if name in rule.models else v for name, v in mean._asdict().items()]
    return torch.cat(updates) * (Q * C)


# --- sensitivity ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(READS_SUMS),
    st.integers(1, 6),
    st.integers(0, 999),
    st.sampled_from([0.0, 1e-3, 1.0, 1e12]),
    st.sampled_from([1e-2, 1.0, 50.0]),
)
def test_a_client_more_changes_the_sum_by_at_most_the_clip(
    name: str, P: int, seed: int, size: float, clip: float
) -> None:
    rule = METHODS[name](fraction_train=1.0, local_steps=1).rule()
    replies = uploads(rule.sends, P, seed, size)
    privacy = Privacy(0, 0.0, clip, Q, False)
    more, less = (sums(privacy, some, rule) for some in (replies, replies[1:]))
    assert torch.linalg.vector_norm(more - less) <= clip * (1 + 1e-9) + 1e-12


def test_without_noise_and_clip_the_mean_has_the_expected_denominator() -> None:
    rule = METHODS["scaffold"]().rule()
    for P in (0, 3, 4):
        replies = uploads(rule.sends, P, P)
        mean, after = release(BARE, replies, W, rule.sends, rule.models, C, nothing)
        updates = sum((r.up.w - W for r in replies), torch.zeros_like(W))
        torch.testing.assert_close(mean.w, W + updates / (Q * C))
        torch.testing.assert_close(
            mean.dc_i, sum((r.up.dc_i for r in replies), torch.zeros_like(W)) / (Q * C)
        )
        assert after.releases == 1


def test_an_upload_within_the_clip_keeps_its_bits_and_a_longer_one_its_direction() -> None:
    (reply,) = uploads(Model, 1, 0)
    norm = float(torch.linalg.vector_norm(reply.up.w - W))
    assert clipped(reply.up, W, ("w",), norm * 1.001).w is not None
    assert torch.equal(clipped(reply.up, W, ("w",), norm * 1.001).w, reply.up.w)
    short = clipped(reply.up, W, ("w",), norm / 4).w
    torch.testing.assert_close(short - W, (reply.up.w - W) / 4)


def test_fields_share_one_norm_and_a_cohort_is_clipped_by_rows() -> None:
    rule = METHODS["scaffold"]().rule()
    replies = uploads(rule.sends, 3, 1)
    stack = rule.sends(*(torch.stack(vs) for vs in zip(*(r.up for r in replies), strict=True)))
    together = clipped(stack, W.expand(3, D), rule.models, 0.7)
    for i, reply in enumerate(replies):
        one = clipped(reply.up, W, rule.models, 0.7)
        assert torch.linalg.vector_norm(torch.cat([one.w - W, one.dc_i])) == pytest.approx(0.7)
        torch.testing.assert_close(together.w[i], one.w, rtol=0, atol=1e-15)
        torch.testing.assert_close(together.dc_i[i], one.dc_i, rtol=0, atol=1e-15)


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Model, METHODS["scaffold"]().rule().sends], ids=["one", "two"])
@pytest.mark.parametrize("is_secret", [False, True], ids=["seed", "system"])
def test_noise_on_a_sum_has_the_stated_deviation(
    is_secret: bool, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each field, of its own, also beyond the numbers that are drawn at a time."""
    monkeypatch.setattr(p, "CHUNK", 999)
    normal = p.secret if is_secret else seeded(3, 7)
    n, z, S = 10**5, 1.7, 0.3
    w = torch.zeros(n, dtype=torch.float64)
    mean, _ = release(Privacy(0, z, S, Q, False), [], w, kind, ("w",), C, normal)
    for v in mean:
        noise = v * (Q * C) / (z * S)
        assert abs(float(noise.std()) - 1) < 5 / math.sqrt(2 * n)
        assert abs(float(noise.mean())) < 5 / math.sqrt(n)
        assert abs(float((noise**4).mean()) - 3) < 5 * math.sqrt(96 / n)
        assert abs(float((noise[::2] * noise[1::2]).mean())) < 5 / math.sqrt(n / 2)
        halves = noise.view(2, -1)
        assert abs(float((halves[0] * halves[1]).mean())) < 5 / math.sqrt(n / 2)
        assert abs(float(noise[-1000:].std()) - 1) < 5 / math.sqrt(2 * 1000)
        assert noise.all()
    for one, other in combinations(mean, 2):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / math.sqrt(n)


def test_noise_of_a_simulation_belongs_to_seed_and_round_and_that_of_the_system_to_none() -> None:
    assert torch.equal(seeded(1, 2)(9), seeded(1, 2)(9))
    others = [seeded(1, 3)(9), seeded(2, 2)(9), p.secret(9), p.secret(9)]
    assert len({tuple(x.tolist()) for x in [seeded(1, 2)(9), *others]}) == 5
    assert p.secret(3).shape == (3,)


def test_a_number_of_the_system_does_not_repeat_another_one_of_its_draw() -> None:
    """A draw has two halves, of the same uniform numbers."""
    one, other = p.secret(20_000).view(2, -1)
    assert abs(float((one * other).mean())) < 5 / math.sqrt(10_000)


# --- the adaptive clip ----------------------------------------------------------------------------


def test_the_clip_grows_and_falls_towards_the_median_norm() -> None:
    silent = lambda n: torch.zeros(n, dtype=torch.float64)  # noqa: E731
    replies = uploads(Model, 4, 2)  # q C = 4
    for clip, b in ((1e-3, 0.0), (1e3, 1.0)):
        privacy = Privacy(0, 0.1, clip, Q, True)
        _, after = release(privacy, replies, W, Model, ("w",), C, silent)
        assert after.clip == pytest.approx(clip * math.exp(-0.2 * (b - 0.5)))


def test_an_adaptive_release_has_the_noise_of_its_guarantee() -> None:
    """The count's first, then the raised noise of the round's own clip; 4 replies, q C = 20."""
    ones = lambda n: torch.ones(n, dtype=torch.float64)  # noqa: E731
    updates = [torch.full_like(W, size) for size in (0.1, 0.2, 0.3, 9.0)]  # the last is clipped
    replies = [Reply(i, Model(W + u), 1, 1) for i, u in enumerate(updates)]
    mean, after = release(Privacy(0, 1.0, 2.0, Q, True), replies, W, Model, ("w",), 40, ones)
    b = (3 * 0.5 - 0.5) / 20 + 1 / 20 + 0.5
    assert after.clip == pytest.approx(2 * math.exp(-0.2 * (b - 0.5)))
    assert (after.releases, after.multiplier) == (1, 1.0)
    total = 0.6 + 2.0 / D**0.5 + p.raised(1.0, 20.0) * 2.0
    torch.testing.assert_close(mean.w, W + total / 20, rtol=1e-12, atol=1e-12)


def test_both_releases_together_cost_what_the_multiplier_alone_would() -> None:
    z, size = 1.3, 20.0
    sigma_b = size / 20
    assert p.raised(z, size) ** -2 + (2 * sigma_b) ** -2 == pytest.approx(z**-2)
    assert p.raised(0.0, size) == 0
    with pytest.raises(ValueError, match=r"dp.adaptive-clip: expected more than 13 clients"):
        p.raised(1.3, 10.0)
