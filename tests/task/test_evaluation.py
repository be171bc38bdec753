"""Loss and accuracy over a set are those of its samples, however it is cut into batches."""

import random
from itertools import count, repeat
from threading import Barrier, current_thread

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord.data.samples import IGNORED
from fedaccord.task.evaluation import evaluate
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.losses import sequence_cross_entropy


def model(outputs: int = 4) -> FlatModel:
    torch.manual_seed(0)
    return FlatModel(nn.Linear(3, outputs), dtype=torch.float64)


def test_mean_loss_and_accuracy_are_those_of_the_whole_set() -> None:
    x, y = torch.randn(25, 3, dtype=torch.float64), torch.randint(4, (25,))
    w = torch.randn(16, dtype=torch.float64)
    batches = list(zip(x.split(10), y.split(10), strict=True))
    assert [len(targets) for _, targets in batches] == [10, 10, 5]
    metrics = evaluate(model(), w, batches, F.cross_entropy)
    logits = x @ w[:12].view(4, 3).T + w[12:]
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-12)
    assert metrics["accuracy"] == float((logits.argmax(1) == y).double().mean())
    assert set(metrics) == {"loss", "accuracy"}
    assert 0 < metrics["accuracy"] < 1


@pytest.mark.parametrize("size", [3, 6, 7])
def test_the_loss_of_sequences_is_the_mean_over_their_counted_targets(size: int) -> None:
    x, y = torch.randn(7, 5, 3, dtype=torch.float64), torch.randint(4, (7, 5))
    y[1, 2:] = y[2:4] = IGNORED  # one row has few targets; two rows, and a batch of them, have none
    w = torch.randn(16, dtype=torch.float64)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    metrics = evaluate(model(), w, [*batches, (x[2:4], y[2:4])], sequence_cross_entropy)
    logits = x @ w[:12].view(4, 3).T + w[12:]
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("size", [3, 6, 7])
def test_the_loss_of_classes_is_the_mean_over_their_counted_targets(size: int) -> None:
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(4, (7,))
    y[1] = y[3:6] = IGNORED  # a batch of three has none
    w = torch.randn(16, dtype=torch.float64)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    metrics = evaluate(model(), w, batches, F.cross_entropy)
    logits = x @ w[:12].view(4, 3).T + w[12:]
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-12)


def test_regression_targets_have_no_accuracy() -> None:
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    w = torch.randn(4, dtype=torch.float64)
    metrics = evaluate(model(1), w, list(zip(x.split(4), y.split(4), strict=True)), F.mse_loss)
    expected = ((x @ w[:3, None] + w[3] - y) ** 2).mean()
    assert metrics == {"loss": pytest.approx(float(expected), rel=1e-12)}


def test_in_bfloat16_the_model_computes_and_the_loss_does_not() -> None:
    flat, inside, outside = FlatModel(model().module, dtype=torch.float32), [], []
    flat.module.register_forward_hook(lambda m, i, out: inside.append(out.dtype))

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        outside.append(predictions.dtype)
        return F.cross_entropy(predictions, targets)

    x, y = torch.randn(25, 3), torch.randint(4, (25,))
    rounded = evaluate(flat, flat.w.clone(), [(x, y)], loss, "bfloat16")
    exact = evaluate(flat, flat.w.clone(), [(x, y)], loss)
    assert inside == [torch.bfloat16, torch.float32]
    assert outside == [torch.float32] * 2
    assert 0 < abs(rounded["loss"] - exact["loss"]) < 0.01


def test_an_empty_set_gives_nothing() -> None:
    assert evaluate(model(), torch.zeros(16, dtype=torch.float64), [], F.cross_entropy) == {}


def test_evaluation_changes_neither_w_nor_g_and_builds_no_graph() -> None:
    flat, w = model(), torch.randn(16, dtype=torch.float64)
    before = w.clone()
    flags: list[bool] = []

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        flags.append(predictions.requires_grad or flat.module.training)
        return F.cross_entropy(predictions, targets)

    flat.module.train()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(4, (5,))
    evaluate(flat, w, [(x, y)], loss)
    assert flags == [False]
    assert torch.equal(w, before)
    assert torch.equal(flat.w, before)
    assert not flat.g.any()


def test_threads_give_what_one_gives_bit_for_bit() -> None:
    x, y = torch.randn(53, 3, dtype=torch.float64), torch.randint(4, (53,))
    w = torch.randn(16, dtype=torch.float64)
    batches = list(zip(x.split(1), y.split(1), strict=True))
    two, numbers = Barrier(2, timeout=60), iter(range(2))

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        if next(numbers, None) is not None:
            two.wait()  # passed by two threads only, each at a batch of its own
        assert not predictions.requires_grad
        return F.cross_entropy(predictions, targets)

    flat = model()
    metrics = evaluate(flat, w, iter(batches), loss, threads=2)
    assert metrics == evaluate(model(), w, batches, F.cross_entropy)
    assert torch.equal(flat.w, w)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_that_fails_is_one_line(threads: int) -> None:
    """As a token id beyond the table of a later test sample."""
    module = nn.Sequential(nn.EmbeddingBag(4, 2))
    batches = [(torch.tensor([[id]]), torch.tensor([1])) for id in (1, 9)]
    flat = FlatModel(module)
    with pytest.raises(ValueError, match=r"^model: its evaluation failed: [A-Z]") as error:
        evaluate(flat, flat.w, batches, F.cross_entropy, threads=threads)
    assert "\n" not in str(error.value)


def test_threads_end_where_one_fails() -> None:
    numbers = count()

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        next(numbers)
        if current_thread().name.endswith("_1"):  # the other one is waited for first
            raise ValueError("this loss")
        return F.cross_entropy(predictions, targets)

    batch = torch.randn(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="this loss"):
        evaluate(model(), torch.zeros(16).double(), repeat(batch, 100_000), loss, threads=2)
    assert next(numbers) < 50_000


def test_every_thread_has_a_model_of_its_own() -> None:
    class Remembering(nn.Linear):
        """One that would mix up the samples of two threads."""

        def forward(self, x: Tensor) -> Tensor:
            self.x = x
            both.wait()
            return super().forward(self.x)

    both = Barrier(2, timeout=60)
    torch.manual_seed(0)
    flat = FlatModel(Remembering(3, 4), dtype=torch.float64)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(4, (6,))
    batches = list(zip(x.split(1), y.split(1), strict=True))
    metrics = evaluate(flat, flat.w.clone(), batches, F.cross_entropy, threads=2)
    assert metrics == evaluate(model(), flat.w, batches, F.cross_entropy)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_a_model_that_cannot_be_copied_is_evaluated_alone() -> None:
    torch.manual_seed(0)
    flat = FlatModel(nn.utils.weight_norm(nn.Linear(3, 4)))
    batches = [(torch.randn(5, 3), torch.randint(4, (5,))) for _ in range(3)]
    w = flat.w.clone()
    with torch.enable_grad():
        flat.module(batches[0][0])  # leaves a tensor with a gradient, which deepcopy refuses
    one, two = (evaluate(flat, w, batches, F.cross_entropy, threads=n) for n in (1, 2))
    assert one == two


def test_every_evaluation_draws_the_same_numbers() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (np.random.rand() + random.random() + torch.rand(()))

    noisy = FlatModel(Noisy(3, 4))
    batches = [(torch.randn(5, 3), torch.randint(4, (5,))) for _ in range(2)]
    results = [evaluate(noisy, noisy.w, batches, F.cross_entropy) for _ in range(2)]
    assert results[0] == results[1]
