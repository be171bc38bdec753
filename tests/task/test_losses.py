"""Losses and metrics by name, by the targets, and as functions of the user's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from fedaccord import run, simulate
from fedaccord.core.metrics import select
from fedaccord.task.losses import loss_of, mean_squared_error, sequence_cross_entropy

PLAIN: dict[str, Any] = {"clip_norm": None, "weight_decay": 0.0, "num_clients": 4, "rounds": 2}
X, Y = torch.randn(20, 3), torch.randn(20, 1)
CLASSES = torch.arange(20) % 3


def test_auto_reads_the_targets() -> None:
    assert loss_of("auto", CLASSES) is F.cross_entropy
    assert loss_of("auto", CLASSES.view(4, 5)) is sequence_cross_entropy
    assert loss_of("auto", Y) is mean_squared_error
    assert loss_of("mean-squared-error", CLASSES) is mean_squared_error


@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_the_steps_are_of_the_loss_that_is_set(vectorize: str) -> None:
    """Twice the loss at half the rate: the same bits, with twice the loss in the metrics."""
    more = PLAIN | {"local_steps": 3, "vectorize": vectorize}
    usual = simulate("scaffold", lr=0.1, **more)
    found = simulate("scaffold", lr=0.05, loss="tests.own:doubled", **more)
    for one, other in zip(usual.model.values(), found.model.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for key in ("test-loss", "train-loss"):
        last = usual.metrics[key].iloc[-1], found.metrics[key].iloc[-1]
        assert last[1] == pytest.approx(2 * last[0], rel=1e-5)


@pytest.mark.parametrize("form", [lambda x, y: (x, y), TensorDataset])
def test_clients_of_ones_own_have_the_loss_of_their_targets(form: Any) -> None:
    def found(y: torch.Tensor, outputs: int, **loss: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, outputs)
        clients = [form(X, y), form(X, y)]
        return simulate("fedavg", clients=clients, model=model, rounds=1, **loss).model["weight"]

    assert torch.equal(found(Y, 1), found(Y, 1, loss=mean_squared_error))
    assert torch.equal(found(CLASSES, 3), found(CLASSES, 3, loss=F.cross_entropy))
    assert not torch.equal(found(CLASSES, 3), found(CLASSES, 3, loss="tests.own:doubled"))


def test_a_function_is_a_metric_at_the_server_and_at_clients() -> None:
    more = PLAIN | {"evaluation": "both", "metrics": "accuracy, tests.own:is_right"}
    row = simulate("ditto", **more).metrics.iloc[-1]
    for split in ("test", "client", "personal"):
        assert row[f"{split}-is_right"] == pytest.approx(row[f"{split}-accuracy"], rel=1e-12)
    assert "client-is_right-std" not in row  # which way is better is unknown


def test_its_sums_over_batches_are_the_mean_over_the_samples() -> None:
    (metric,) = select("tests.own:brier", of_classes=True).values()
    predictions, p = torch.randn(20, 3).double(), []
    parts = zip(predictions.split(7), CLASSES.split(7), strict=True)
    sums = sum(metric.sums(*part) for part in parts)
    for scores, label in zip(predictions, CLASSES, strict=True):
        p.append(sum((scores.softmax(0)[k] - float(k == label)) ** 2 for k in range(3)))
    assert isinstance(sums, torch.Tensor)
    assert metric.value(sums) == pytest.approx(float(sum(p)) / 20, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"loss": "mse"},
            r"loss: expected one of auto, .*, or package\.module:function, got 'mse'",
        ),
        ({"loss": "tests.own:nowhere"}, "loss: expected a function of tests.own, it has no 'nowh"),
        ({"loss": "tests.own:np"}, "loss: expected a function, tests.own:np is a module"),
        (
            {"loss": "tests.own:broken"},
            r"loss: expected .* \(2,\) torch.int64: KeyError: .no.*own.py",
        ),
        ({"loss": "tests.own:no_tensor"}, "loss: expected one number for a batch, .* got float"),
        ({"loss": "tests.own:is_right"}, r"loss: expected one number for a batch, .* got \(2,\)"),
        ({"metrics": "briar"}, "metrics: expected names among accuracy, .*, or package.module:fun"),
        ({"metrics": "tests.own:nowhere"}, "metrics: expected a function of tests.own, it has no"),
        ({"metrics": "tests.own:broken"}, "metrics: tests.own:broken failed: KeyError: .no"),
        ({"metrics": "tests.own:one_number"}, r"metrics: .* a tensor of shape \(2,\), got \(\)"),
        ({"metrics": "tests.own:no_tensor"}, r"metrics: .* a tensor of shape \(2,\), got float"),
        ({"metrics": "tests.own:f1"}, "metrics: .* another name, got 'tests.own:f1': 'f1' is tak"),
        ({"metrics": "f1, f1"}, "metrics: expected different names, got 'f1, f1'"),
    ],
)
def test_what_does_not_fit_is_one_line_before_a_run_directory_is_made(
    settings: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{line}") as refused:
        run("fedavg", num_server_rounds=1, out_dir=str(tmp_path), **settings)
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


def test_numbers_in_a_row_for_outputs_in_a_column() -> None:
    """PyTorch would broadcast them to a square."""
    clients = [(X, Y[:, 0])]
    with pytest.raises(
        ValueError, match=r"targets' shape \(2,\), got \(2, 1\); give targets as \(n, 1\)"
    ):
        simulate("fedavg", clients=clients, model=nn.Linear(3, 1), rounds=1)
