"""Cohorts are a function of (seed, t) and of who is here."""

import math
import random
import tracemalloc
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

import pytest

from fedaccord.federation import sampling
from fedaccord.federation.sampling import check_cohort, cohort_size, scheduled
from fedaccord.strategies import FedAvg


def cohorts(rounds: int = 50, clients: Sequence[int] = range(6), **settings: Any) -> list[Any]:
    """Of six clients, of which these are connected."""
    method = FedAvg(**settings)
    return [method.draw(t, clients, 6) for t in range(rounds)]


@pytest.mark.parametrize(
    ("fraction", "size"), [(0.01, 1), (0.1, 1), (0.45, 3), (0.5, 3), (0.75, 4), (1.0, 6)]
)
def test_cohorts_have_a_fixed_size_and_depend_on_the_seed_alone(fraction: float, size: int) -> None:
    result = cohorts(fraction_train=fraction)
    assert cohort_size(fraction, 6) == size
    assert {len(cohort) for cohort in result} == {size}
    assert all(cohort == sorted(set(cohort)) for cohort in result)
    assert {i for cohort in result for i in cohort} == set(range(6))
    assert result == cohorts(fraction_train=fraction)
    if fraction < 1:
        assert result != cohorts(fraction_train=fraction, seed=1)
        assert len(set(map(tuple, result))) > 2


def test_the_clients_that_evaluate_are_drawn_apart_from_the_next_cohort() -> None:
    method = FedAvg(fraction_evaluate=0.5)
    assert [method.draw_evaluators(t, range(6), 6) for t in range(50)] != cohorts()


def test_the_order_in_which_clients_came_does_not_count() -> None:
    assert cohorts(clients=[5, 3, 0, 1, 4, 2]) == cohorts()


def test_the_share_is_of_all_clients_also_where_some_are_away() -> None:
    assert {len(c) for c in cohorts(clients=[0, 1, 2, 3])} == {3}
    assert {tuple(c) for c in cohorts(clients=[1, 4])} == {(1, 4)}
    assert cohorts(clients=[], rounds=2) == [[], []]
    assert cohorts(clients=[], rounds=2, sampling="bernoulli") == [[], []]


def test_bernoulli_cohorts_vary_in_size_and_are_never_empty() -> None:
    result = cohorts(2000, sampling="bernoulli", fraction_train=0.2)
    sizes = list(map(len, result))
    assert min(sizes) == 1
    assert len(set(sizes)) > 3
    expected = 6 * 0.2 / (1 - 0.8**6)  # drawn again where empty
    assert fmean(sizes) == pytest.approx(expected, abs=0.06)
    assert fmean(5 in cohort for cohort in result) == pytest.approx(expected / 6, abs=0.04)


@pytest.mark.parametrize("may_be_empty", [True, False])
def test_the_chance_of_a_small_cohort_is_that_of_all_subsets(may_be_empty: bool) -> None:
    q, total, small = 0.3, 0.0, 0.0
    for drawn in product([False, True], repeat=7):
        chance = math.prod(q if each else 1 - q for each in drawn)
        if may_be_empty or any(drawn):
            total += chance
            small += chance * (sum(drawn) < 3)
    result = sampling.chance_of_fewer(3, q, 7, may_be_empty)
    assert result == pytest.approx(small / total, rel=1e-12)


def test_the_chance_of_a_small_cohort_at_its_bounds() -> None:
    assert sampling.chance_of_fewer(1, 1e-6, 10, may_be_empty=False) == 0
    assert sampling.chance_of_fewer(3, 1.0, 3, may_be_empty=True) == 0
    assert sampling.chance_of_fewer(3, 0.5, 2, may_be_empty=False) == pytest.approx(1)
    assert sampling.chance_of_fewer(3, 3e-6, 1_000_000, may_be_empty=True) == pytest.approx(
        math.exp(-3) * (1 + 3 + 4.5), rel=1e-4
    )


def test_cohorts_are_those_of_pythons_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw by draw over the sorted clients, however many are drawn for at once."""
    monkeypatch.setattr(sampling, "BLOCK", 7)
    clients = [i for i in range(50) if i % 7]
    for t in range(20):
        generator = random.Random(f"cohort 4 {t}")
        fixed = FedAvg(fraction_train=0.1, seed=4).draw(t, clients, 50)
        assert fixed == sorted(generator.sample(clients, 5))
        generator, expected = random.Random(f"cohort 4 {t}"), []
        while not expected:
            expected = [i for i in clients if generator.random() < 0.03]
        method = FedAvg(fraction_train=0.03, sampling="bernoulli", seed=4)
        assert method.draw(t, clients, 50) == expected


@pytest.mark.parametrize("kind", ["fixed", "bernoulli", "scheduled"])
def test_a_cohort_of_a_million_clients_makes_no_list_of_them(kind: str) -> None:
    million = range(1_000_000)
    method = FedAvg(fraction_train=1e-4, sampling="fixed" if kind == "scheduled" else kind)
    tracemalloc.start()
    try:
        if kind == "scheduled":
            cohort = scheduled([*range(0, 1_000_000, 10_000)], million)
        else:
            cohort = method.draw(3, million, len(million))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 60 < len(cohort) < 140
    assert all(type(i) is int for i in cohort)
    assert peak < 2 * len(million), "two bytes a client"


def test_an_explicit_cohort_less_those_who_are_away() -> None:
    assert scheduled([4, 1, 4], range(6)) == [1, 4]
    assert scheduled([4, 1], [1, 2]) == [1]
    assert scheduled([], range(6)) == []
    assert scheduled([4, 1, 5, 0], [0, 1, 4, 5], 3) == [1, 4, 5]  # the first ones, as given
    for strange in ([0, 6], [-1]):
        line = r"^participation: expected clients 0\.\.5 in round 3, got \["
        with pytest.raises(ValueError, match=line):
            check_cohort(strange, 2, 6)
