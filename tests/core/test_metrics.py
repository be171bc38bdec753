"""Metrics equal scikit-learn's, however a set is cut into batches."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torch import Tensor
from torch.nn import functional as F

from fedaccord.core.metrics import METRICS, select
from fedaccord.federation.evaluation import LARGEST_METRIC

CLASSES = 7


def of(name: str, predictions: Tensor, targets: Tensor, size: int = 10) -> float:
    """A metric of a set that is cut into batches."""
    pairs = zip(predictions.split(size), targets.split(size), strict=True)
    sums = sum((METRICS[name].sums(*pair) for pair in pairs), torch.zeros(()))
    return METRICS[name].value(sums)


def scores() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES - 1, (33,), generator=generator)  # the last one does not occur
    predictions = torch.randn(33, CLASSES, generator=generator, dtype=torch.float64)
    predictions[:12] += 3 * F.one_hot(targets[:12], CLASSES)
    return predictions, targets


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", lambda p, y: sklearn.accuracy_score(y, p.argmax(1))),
        (
            "top-5-accuracy",
            lambda p, y: sklearn.top_k_accuracy_score(y, p, k=5, labels=range(CLASSES)),
        ),
        ("f1", lambda p, y: sklearn.f1_score(y, p.argmax(1), average="macro")),
        (
            "perplexity",
            lambda p, y: math.exp(sklearn.log_loss(y, p.softmax(1), labels=range(CLASSES))),
        ),
    ],
)
@pytest.mark.parametrize("size", [33, 10, 1])
def test_metrics_of_classes(name: str, expected: Callable[..., float], size: int) -> None:
    predictions, targets = scores()
    value = of(name, predictions, targets, size)
    assert value == pytest.approx(expected(predictions, targets), rel=1e-12)
    assert value not in (0.0, 1.0)


@pytest.mark.parametrize("shape", [(33, 1), (11, 3)])
def test_the_mean_absolute_error(shape: tuple[int, ...]) -> None:
    predictions, targets = (
        torch.tensor(np.random.default_rng(i).normal(size=shape)) for i in (0, 1)
    )
    expected = sklearn.mean_absolute_error(targets.flatten(), predictions.flatten())
    assert of("mae", predictions, targets) == pytest.approx(expected, rel=1e-12)


def test_numbers_are_compared_one_to_one() -> None:
    with pytest.raises(ValueError, match=r"targets' shape \(4, 1\), got \(4,\)"):
        of("mae", torch.zeros(4), torch.zeros(4, 1))


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.of_classes])
def test_sequences_of_targets_and_those_that_are_left_out(name: str) -> None:
    predictions, targets = scores()
    expected = of(name, predictions[:30], targets[:30])
    padded = torch.cat([targets[:30], torch.full((3,), -100)])
    as_sequences = predictions.view(11, 3, CLASSES), padded.view(11, 3)
    assert of(name, *as_sequences, size=4) == pytest.approx(expected, rel=1e-12)


def test_fewer_than_five_classes_are_all_among_the_five() -> None:
    assert of("top-5-accuracy", torch.randn(6, 3), torch.randint(3, (6,))) == 1.0


def test_a_perplexity_is_one_that_a_client_may_report() -> None:
    """Else a client with a bad model would be left out of the means, which would look better."""
    most = of("perplexity", torch.tensor([[0.0, 1e6]]), torch.tensor([0]))
    assert most == math.exp(69) < LARGEST_METRIC
    assert math.isnan(of("perplexity", torch.tensor([[0.0, math.nan]]), torch.tensor([0])))


@pytest.mark.parametrize(
    ("names", "of_classes", "expected"),
    [
        ("", True, ["accuracy"]),
        ("", False, []),
        ("f1, accuracy", True, ["f1", "accuracy"]),
        ("mae", True, "metrics: .* fit class labels, or .*, got 'mae'$"),
        ("accuracy", False, "metrics: expected names among mae, which fit numbers"),
        ("acuracy", True, "did you mean 'accuracy'"),
    ],
)
def test_the_setting(names: str, of_classes: bool, expected: Any) -> None:
    choose = partial(select, names, of_classes)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            choose()
    else:
        assert [*choose()] == expected


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.of_classes])
@pytest.mark.parametrize(
    ("predictions", "labels"), [((4,), (4,)), ((4, 1), (4,)), ((4, 3), (4, 1))]
)
def test_scores_that_are_not_of_these_labels_are_refused(
    name: str, predictions: tuple[int, ...], labels: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"^model: expected scores \(\.\.\., classes\) of two or "):
        METRICS[name].sums(torch.zeros(predictions), torch.zeros(labels, dtype=torch.int64))
