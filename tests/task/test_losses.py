"""Losses and metrics by name, by the targets, and as functions of the user's own."""

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from fedaccord import run, simulate
from fedaccord.cli.progress import summary_table
from fedaccord.core.metrics import select
from fedaccord.data.samples import IGNORED
from fedaccord.federation.errors import FederationError
from fedaccord.task.losses import loss_of, mean_squared_error, sequence_cross_entropy
from fedaccord.task.solver import Loss
from tests import own

PLAIN: dict[str, Any] = {"clip_norm": None, "weight_decay": 0.0, "num_clients": 4, "rounds": 2}
SMALL: dict[str, Any] = {"rounds": 1, "local_steps": 1, "batch_size": 0}
X, Y = torch.randn(20, 3), torch.randn(20, 1)
CLASSES = torch.arange(20) % 3
SMALL |= {"clients": [(X, CLASSES)] * 2, "test": (X, CLASSES), "model": nn.Linear(3, 3)}


def test_auto_reads_the_targets() -> None:
    assert loss_of("auto", CLASSES) is F.cross_entropy
    assert loss_of("auto", CLASSES.view(4, 5)) is sequence_cross_entropy
    assert loss_of("auto", Y) is mean_squared_error
    assert loss_of("mean-squared-error", CLASSES) is mean_squared_error


def test_sequences_have_the_mean_of_cross_entropy_and_zero_without_targets() -> None:
    predictions, targets = torch.randn(4, 5, 3, requires_grad=True), torch.randint(3, (4, 5))
    targets[0, 2:] = targets[3] = IGNORED
    mean = F.cross_entropy(predictions.flatten(0, 1), targets.flatten())
    assert torch.equal(sequence_cross_entropy(predictions, targets), mean)
    none = sequence_cross_entropy(predictions[3:], targets[3:])
    assert none == 0
    assert not torch.autograd.grad(none, predictions)[0].any()


@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_the_steps_are_of_the_loss_that_is_set(vectorize: str) -> None:
    """Twice the loss at half the rate: the same bits, with twice the loss in the metrics."""
    more = PLAIN | {"local_steps": 3, "vectorize": vectorize}
    usual = simulate("scaffold", lr=0.1, **more)
    history = simulate("scaffold", lr=0.05, loss="tests.own:doubled", **more)
    for one, other in zip(usual.model.values(), history.model.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for key in ("test-loss", "train-loss"):
        last = usual.metrics[key].iloc[-1], history.metrics[key].iloc[-1]
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
        (
            {"loss": "torch.nn:CrossEntropyLoss"},
            r"loss: expected a function of .* got the class CrossEntropyLoss; create an object, ",
        ),
        ({"loss": "tests.own:np"}, "loss: expected a function, tests.own:np is a module"),
        (
            {"loss": "tests.own:broken"},
            r"loss: tests.own:broken failed for .* \(2,\) torch.int64: KeyError: .no.*own.py",
        ),
        ({"loss": "tests.own:no_tensor"}, "loss: expected .* one number for a batch, .* got float"),
        (
            {"loss": "tests.own:is_right"},
            r"loss: expected .* one number for a batch, .* got \(2,\)",
        ),
        ({"metrics": "briar"}, "metrics: expected names among accuracy, .*, or package.module:fun"),
        ({"metrics": "tests.own:nowhere"}, "metrics: expected a function of tests.own, it has no"),
        ({"metrics": "tests.own:broken"}, "metrics: tests.own:broken failed: KeyError: .no"),
        ({"metrics": "tests.own:one_number"}, r"metrics: .* a tensor of shape \(2,\), got \(\)"),
        ({"metrics": "tests.own:no_tensor"}, r"metrics: .* a tensor of shape \(2,\), got float"),
        ({"metrics": "tests.own:f1"}, "metrics: .* another name, got 'tests.own:f1': 'f1' is tak"),
        ({"loss": "tests.own:in_a_row"}, r"loss: expected .* one number .* of \(\), got \(1,\)"),
        ({"loss": "tests.own:in_place"}, "loss: .*TypeError: it changes its arguments in place"),
        ({"metrics": "tests.own:in_place"}, "metrics: .*TypeError: it changes its arguments in pl"),
        (
            {"loss": "tests.own:without_gradient"},
            "loss: expected .* to return a number with a gradient",
        ),
        ({"loss": "mean-squared-error"}, "model: .* with loss=mean-squared-error: "),
        ({"metrics": "tests.own:_hidden"}, "metrics: expected a function whose name begins with"),
        ({"metrics": "f1, f1"}, "metrics: expected different names, got 'f1, f1'"),
    ],
)
def test_what_does_not_fit_is_one_line_before_a_run_directory_is_made(
    settings: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{line}") as error:
        run("fedavg", num_server_rounds=1, out_dir=str(tmp_path), **settings)
    assert "\n" not in str(error.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("vectorize", ["off", "on"])
@pytest.mark.parametrize("function", [own.broken, own.no_tensor, own.is_right, own.detached])
def test_a_loss_that_fails_in_a_later_batch_is_named(
    function: Loss, vectorize: str, caplog: pytest.LogCaptureFixture
) -> None:
    def late(predictions: Tensor, targets: Tensor) -> Tensor:
        first = len(targets) == 2 or not torch.is_grad_enabled()
        return own.doubled(predictions, targets) if first else function(predictions, targets)

    with pytest.raises(FederationError, match="none of 1 rounds counted"):
        simulate("fedavg", loss=late, vectorize=vectorize, **SMALL)
    assert re.search(
        r"ValueError: loss: .*late .*(KeyError|got float|got \(20,\)|without)", caplog.text
    )


@pytest.mark.parametrize("function", [own.broken, own.no_tensor, own.is_right])
def test_a_loss_that_fails_in_an_evaluation_is_named(function: Loss) -> None:
    def late(predictions: Tensor, targets: Tensor) -> Tensor:
        first = torch.is_grad_enabled()
        return own.doubled(predictions, targets) if first else function(predictions, targets)

    with pytest.raises(ValueError, match=r"^loss: .*late .*(KeyError|got float|got \(20,\))"):
        simulate("fedavg", loss=late, **SMALL)


def test_a_loss_that_is_nan_has_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(FederationError):
        simulate("fedavg", loss=lambda p, y: math.nan * p.sum(), **SMALL)
    assert "is NaN for predictions of the untrained" in caplog.text


def test_a_metric_that_is_nan_has_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    simulate("fedavg", metrics=["accuracy", own.not_a_number], **SMALL)
    assert "metrics: not_a_number is NaN for predictions of the untrained" in caplog.text


def test_metrics_of_a_call_are_names_functions_or_a_list_of_both() -> None:
    for metrics in (own.brier, [own.brier, "f1"]):
        columns = simulate("fedavg", metrics=metrics, **PLAIN).metrics
        assert "test-brier" in columns
        assert ("test-f1" in columns) == isinstance(metrics, list)


def test_functions_of_a_notebook_are_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "score", own.is_right, raising=False)
    row = simulate("fedavg", metrics="accuracy, __main__:score", **PLAIN).metrics.iloc[-1]
    assert row["test-score"] == pytest.approx(row["test-accuracy"], rel=1e-12)
    with pytest.raises(ValueError, match=r"^metrics: expected functions of a module that workers"):
        simulate("fedavg", metrics="__main__:score", workers=2, **PLAIN)


def test_a_loss_of_other_outputs_than_the_usual_metric_has_none() -> None:
    keys: dict[str, Any] = {"dataset": "tests.own:one_target", "model": "tests.own:two_outputs"}
    keys |= {"loss": "tests.own:gaussian", "partition": "iid", "num_clients": 2}
    columns = simulate("fedavg", rounds=1, local_steps=1, **keys).metrics.columns
    assert "test-loss" in columns
    assert "test-mae" not in columns


def test_the_table_at_the_end_has_own_metrics_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(
        "fedavg", num_server_rounds=1, out_dir=str(tmp_path), metrics="tests.own:brier", threads=1
    )
    summary = json.loads((path / "summary.json").read_text())
    assert 0 < summary["test-brier-last"] < 2
    console = Console(width=100, file=io.StringIO())
    console.print(summary_table("fedavg", path))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "test brier, last" in text
    assert "accuracy" not in text


@pytest.mark.parametrize("loss", ["auto", own.huber])
def test_numbers_in_a_row_for_outputs_in_a_column(loss: Any) -> None:
    """PyTorch would make (n, n) of (n, 1) - (n,), and the model learn nothing."""
    line = r"^model: .* targets' shape \(2,\), got \(2, 1\); give targets as \(n, 1\)$"
    with pytest.raises(ValueError, match=line):
        simulate("fedavg", clients=[(X, Y[:, 0])], model=nn.Linear(3, 1), loss=loss, rounds=1)


@pytest.mark.parametrize(
    ("y", "model", "advice"),
    [
        (Y, nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), r"return \(n, 1\), without squeeze"),
        (CLASSES.float(), nn.Linear(3, 3), "layer of as many outputs, or give classes as integers"),
    ],
)
def test_numbers_of_another_shape_than_the_outputs(
    y: Tensor, model: nn.Module, advice: str
) -> None:
    with pytest.raises(ValueError, match=f"^model: .*{advice}$"):
        simulate("fedavg", clients=[(X, y)], model=model, rounds=1)


def test_a_module_as_loss_follows_the_precision_and_stays_as_it_is() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    module = nn.CrossEntropyLoss(weight)
    found, wanted = (
        simulate("fedavg", loss=loss, dtype=torch.float64, **SMALL).model["weight"]
        for loss in (module, lambda p, t: F.cross_entropy(p, t, weight.to(p)))
    )
    assert torch.equal(found, wanted)
    assert module.weight is not None
    assert module.weight.dtype == torch.float32


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(predictions * self.scale, targets)


class Remembering(nn.Module):
    """A loss relative to the mean of earlier ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.ones(()))

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(predictions, targets)
        if self.how == "in place":
            self.mean.lerp_(value.detach(), 0.1)
        elif self.how == "replaced":
            self.mean = self.mean.lerp(value.detach(), 0.1)
        return value / self.mean


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_loss_with_a_memory_is_refused(how: str) -> None:
    """It would pass from client to client, and from an evaluation to training."""
    with pytest.raises(ValueError, match=r"^loss: .* alone, Remembering changes its buffers"):
        simulate("fedavg", loss=Remembering(how), **SMALL)
    simulate("fedavg", loss=Remembering("not at all"), **SMALL)


def test_a_loss_with_parameters_that_no_step_would_change_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^loss: .* Scaled has 'scale', which no step"):
        simulate("fedavg", loss=Scaled(), **SMALL)
    simulate("fedavg", loss=Scaled().requires_grad_(False), **SMALL)
