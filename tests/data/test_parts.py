"""Parts that are computed on access: pieces of an array, or draws of each client."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.data.partition import partition, report
from fedaccord.data.parts import Cut, Drawn
from fedaccord.task import TaskConfig, load_task

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), [40, *[100] * 8, 160]))
MILLION = 1_000_000
SCHEMES: list[dict[str, Any]] = [
    {"scheme": "iid"},
    {"scheme": "dirichlet", "alpha": 0.3},
    {"scheme": "pathological", "classes_per_client": 2},
]


@pytest.mark.parametrize(("n", "num_clients"), [(13, 4), (12, 4), (4, 4), (1, 1), (17, 16)])
def test_a_cut_equals_numpys_array_split(n: int, num_clients: int) -> None:
    samples = np.random.default_rng(n).permutation(n)
    parts = Cut(samples, num_clients)
    expected = np.array_split(samples, num_clients)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    assert [parts.size(i) for i in range(num_clients)] == [len(part) for part in expected]
    assert parts.total == n
    assert parts[-1].tolist() == expected[-1].tolist()
    assert [part.tolist() for part in parts[1:3]] == [part.tolist() for part in expected[1:3]]
    with pytest.raises(IndexError):
        parts[num_clients]


@pytest.mark.parametrize("settings", SCHEMES)
def test_the_draw_of_a_client_does_not_depend_on_other_clients(settings: dict[str, Any]) -> None:
    few = partition(LABELS, 3, samples_per_client=50, seed=5, **settings)
    many = partition(LABELS, MILLION, samples_per_client=50, seed=5, **settings)
    other = partition(LABELS, 3, samples_per_client=50, seed=6, **settings)
    assert len(many) == MILLION
    assert [part.tolist() for part in few] == [part.tolist() for part in many[:3]]
    assert many[2].tolist() == many[2].tolist()  # drawn again
    assert many[2].tolist() != many[MILLION - 1].tolist() != other[2].tolist()
    for part in (few[0], many[MILLION - 1]):
        assert part.dtype == np.int64
        assert len(part) == 50
        assert part.min() >= 0
        assert part.max() < len(LABELS)


def test_samples_are_drawn_uniformly_if_the_scheme_is_iid() -> None:
    """Every sample is equally likely; the size of its class does not matter."""
    indices = np.concatenate(partition(LABELS, 1000, "iid", samples_per_client=200)[:])
    times = np.bincount(indices, minlength=len(LABELS))
    assert times.mean() == 200
    assert times.std() == pytest.approx(200**0.5, rel=0.1)  # as of a Poisson variable
    for k in (0, 9):
        assert times[k == LABELS].mean() == pytest.approx(200, rel=0.03)


def test_class_shares_of_a_client_that_draws_follow_its_prior() -> None:
    """Dir(alpha) has mean 1/10 and variance (1/10)(9/10) / (10 alpha + 1)."""
    for alpha in (0.1, 1.0):
        parts = partition(LABELS, 2000, "dirichlet", alpha=alpha, samples_per_client=400)
        counts = report(parts, LABELS).counts  # of the first 1,000
        shares = counts / 400
        assert shares.mean(axis=0) == pytest.approx(np.full(10, 0.1), abs=0.02)
        sampled = 0.09 / 400  # at most, of 400 draws from the prior
        expected = 0.09 / (10 * alpha + 1)
        assert expected * 0.9 < shares.var() < expected * 1.1 + sampled


def test_pathological_clients_that_draw_have_their_number_of_classes() -> None:
    parts = partition(LABELS, MILLION, "pathological", classes_per_client=3, samples_per_client=90)
    counts = report(parts, LABELS).counts
    assert set((counts > 0).sum(axis=1)) == {3}
    assert (counts > 0).mean(axis=0) == pytest.approx(np.full(10, 0.3), abs=0.06)


def test_settings_of_clients_that_draw_are_checked_before_one_does() -> None:
    with pytest.raises(ValueError, match=r"^classes-per-client: expected 1 to 10"):
        partition(LABELS, 9, "pathological", classes_per_client=11, samples_per_client=5)
    with pytest.raises(
        ValueError, match=f"at most the {len(LABELS)} training samples, got 2147483648"
    ):
        partition(LABELS, 9, "iid", samples_per_client=2**31)
    with pytest.raises(ValueError, match="set samples-per-client, with which they share"):
        partition(LABELS, MILLION)


def test_a_million_clients_need_no_memory_before_they_are_used() -> None:
    def deal(num_clients: int) -> tuple[Any, str, int]:
        tracemalloc.start()
        try:
            parts = partition(LABELS, num_clients, samples_per_client=50)
            text = str(report(parts, LABELS))
            assert parts[num_clients - 1].size == 50
            return parts, text, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    _, _, few = deal(2000)
    parts, text, many = deal(MILLION)
    assert many < 1.1 * few
    assert isinstance(parts, Drawn)
    assert (parts.size(7), parts.total) == (50, 50 * MILLION)
    first, *_, last = text.splitlines()
    assert first.startswith("1000000 clients, 50 samples that each draws for itself and ")
    assert first.endswith(" of 10 classes each (of the first 1000)")
    assert last == "   ... and 999990 more clients"


def test_clients_that_draw_share_what_is_not_held_out() -> None:
    config = TaskConfig(partition="iid", samples_per_client=30, validation=0.2)
    task = load_task(config, num_clients=MILLION)
    whole = load_task(TaskConfig(), num_clients=1)
    assert len(task.test[0]) + len(task.clients.x) == len(whole.clients.x)
    assert len(task.test[0]) == round(0.2 * len(whole.clients.x))
    images = {image.numpy().tobytes() for image in task.test[0]}
    x, y = task.clients.samples(MILLION - 1)
    assert len(x) == len(y) == task.num_examples(MILLION - 1) == 30
    assert images.isdisjoint(image.numpy().tobytes() for image in x)
    assert torch.equal(task.clients.samples(MILLION - 1)[0], x)


def test_a_client_that_draws_has_a_share_of_the_test_samples() -> None:
    task = load_task(TaskConfig(partition="iid", samples_per_client=30), num_clients=MILLION)
    test = task.client_test(0)
    assert len(test[1]) == 1  # 30 of 30,000,000
