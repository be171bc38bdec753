"""Spaces: lists, ranges, keys of one method, grids and draws."""

import math
from typing import Any

import pytest

from fedaccord.experiments.sweep import space
from fedaccord.experiments.sweep.space import Choices, Range


def test_lists_and_ranges_are_read_by_dotted_keys() -> None:
    ranges = space.read(
        {"lr": {"low": 0.01, "high": 0.3, "log": True}, "fedprox": {"mu": [0.1, 1, 0.1]}}
    )
    assert ranges == {"lr": Range(0.01, 0.3, True), "fedprox.mu": Choices((0.1, 1))}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"lr": 0.1}, r"\[space\] lr: expected a list of values"),
        ({"lr": []}, r"\[space\] lr: expected a list of values"),
        ({"lr": [[0.1]]}, "expected numbers and strings in a list"),
        ({"lr": {"low": 0.1}}, r"\[space\] lr: expected low, high and optionally log"),
        ({"lr": {"low": 0.1, "high": 1, "step": 2}}, "expected low, high and optionally log"),
        ({"lr": {"low": "a", "high": 1}}, "expected low, high and optionally log"),
        ({"lr": {"low": 1, "high": 1}}, "expected low < high, got low = 1, high = 1"),
        ({"lr": {"low": 0, "high": 1, "log": True}}, "expected 0 < low < high"),
    ],
)
def test_an_invalid_space_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        space.read(table)


def test_a_range_is_covered_evenly_or_evenly_in_its_logarithm() -> None:
    assert Range(0.0, 4.0).at(0.25) == 1.0
    assert Range(0.01, 1.0, log=True).at(0.5) == pytest.approx(0.1)
    shares = [Range(1, 4).at((i + 0.5) / 400) for i in range(400)]
    assert {value: shares.count(value) for value in shares} == {1: 100, 2: 100, 3: 100, 4: 100}
    logs = [Range(1, 100, log=True).at(i / 100) for i in range(100)]
    assert min(logs) == 1
    assert max(logs) <= 100
    assert sum(value <= 10 for value in logs) > 50


def test_keys_of_a_method_are_for_that_method_only_and_replace_common_ones() -> None:
    table = {"lr": 1, "fedprox.mu": 2, "fedsam.lr": 3, "sam.rho": 4}
    assert space.of_method(table, "fedavg") == {"lr": 1, "sam.rho": 4}
    assert space.of_method(table, "fedprox") == {"lr": 1, "sam.rho": 4, "fedprox.mu": 2}
    assert space.of_method(table, "fedsam") == {"lr": 3, "sam.rho": 4}


def test_a_grid_has_every_combination() -> None:
    keys = {"a": Choices((1, 2)), "b": Choices(("x", "y"))}
    assert [*space.grid(keys)] == [{"a": a, "b": b} for a in (1, 2) for b in "xy"]
    assert [*space.grid({})] == [{}]
    with pytest.raises(ValueError, match=r"^\[space\] b: expected a list with search=grid"):
        [*space.grid(keys | {"b": Range(0, 1)})]


def test_draws_depend_on_the_seed_and_on_no_other_key() -> None:
    lr = {"lr": Range(0.01, 1.0, log=True)}
    first = space.draw(lr, 5, seed=0)
    assert first == space.draw(lr, 5, seed=0) != space.draw(lr, 5, seed=1)
    more = space.draw(lr | {"mu": Range(0.0, 1.0)}, 5, seed=0)
    assert [point["lr"] for point in more] == [point["lr"] for point in first]
    assert len({point["lr"] for point in first}) == 5


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_draws_cover_every_part_of_a_range(count: int, seed: int) -> None:
    """A Latin hypercube: four draws cannot all be small."""
    keys = {"lr": Range(0.01, 0.3, log=True), "mu": Range(0.0, 1.0)}
    points = space.draw(keys, count, seed)
    logs = [math.log(point["lr"] / 0.01) / math.log(30) for point in points]
    assert sorted(int(count * u) for u in logs) == [*range(count)]
    assert sorted(int(count * point["mu"]) for point in points) == [*range(count)]


def test_draws_of_two_keys_are_in_other_orders() -> None:
    keys = {"a": Range(0.0, 1.0), "b": Range(0.0, 1.0)}
    orders = set()
    for seed in range(20):
        points = space.draw(keys, 3, seed)
        b = [point["b"] for point in sorted(points, key=lambda point: point["a"])]
        orders.add(tuple(sorted(range(3), key=b.__getitem__)))
    assert len(orders) == 6


def test_draws_are_distinct_and_no_more_than_there_are() -> None:
    keys = {"a": Choices((1, 2, 3)), "b": Choices((1, 2, 3))}
    points = space.draw(keys, 6, seed=0)
    assert len(points) == 6
    assert all(points.count(point) == 1 for point in points)
    assert len(space.draw(keys, 100, seed=0)) == 9


def test_corners_include_every_end() -> None:
    keys = {"a": Choices((1, 2, 3)), "b": Range(0.5, 1.5)}
    points = [*space.corners(keys)]
    assert {point["a"] for point in points} == {1, 2, 3}
    assert {point["b"] for point in points} == {0.5, 1.5}
    assert [*space.corners({})] == [{}]
