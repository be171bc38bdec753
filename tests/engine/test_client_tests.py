"""The samples that each client of `simulate` evaluates on: its own, or a share of the test set."""

from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from fedaccord import simulate
from fedaccord.federation.errors import FederationError
from tests.engine.test_own_data import CLIENTS, MODEL, TEST, shuffled

SIZES = (3, 6, 1, 10)
Samples = tuple[Tensor, Tensor]


def numbers(n: int, seed: int) -> Samples:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True) * seed


NUMBERS = [numbers(n, i) for i, n in enumerate(SIZES)]
FUTURE = numbers(40, 5)
MSE: dict[str, Any] = {"loss": "mean-squared-error", "model": nn.Linear(3, 1), "lr": 0.1}


class Rows(Dataset[Any]):
    """Rows of which nothing is known before they are read."""

    def __init__(self, samples: Samples) -> None:
        self.x, self.y = samples

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Labelled(Rows):
    @property
    def targets(self) -> list[int]:
        return [int(label) for label in self.y]


def last(clients: Any, test: Any, algo: str = "fedavg", **more: Any) -> dict[str, float]:
    """The metrics of one round."""
    more = {"evaluation": "both", "participation": 1.0, "local_steps": 1, "lr": 0.5} | more
    row = simulate(algo, clients=clients, test=test, rounds=1, **more).metrics.iloc[-1]
    return dict(row.drop("seconds"))


@pytest.mark.parametrize("form", [lambda s: s, lambda s: TensorDataset(*s), Rows])
def test_numbers_are_dealt_out_by_the_clients_sizes(form: Any) -> None:
    counts = []

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and len(targets) < 40:
            counts.extend(targets.flatten().tolist())
        return (predictions - targets).square().mean()

    row = last([*map(form, NUMBERS)], form(FUTURE), **MSE | {"loss": loss, "eval_every": 9})
    assert row["client-loss-std"] > 0
    assert row["client-loss-worst-tenth"] > row["client-loss"] == pytest.approx(row["test-loss"])
    values = counts[-40:]
    assert sorted(values) == sorted(FUTURE[1].flatten().tolist())
    assert row["evaluation-empty"] == 0


def test_every_form_of_numbers_gives_the_same_metrics() -> None:
    one = last(NUMBERS, FUTURE, **MSE)
    for form in (lambda s: TensorDataset(*s), Rows):
        assert last([*map(form, NUMBERS)], form(FUTURE), **MSE) == one
    assert last(NUMBERS, FUTURE, seed=1, **MSE)["client-loss-std"] != one["client-loss-std"]


@pytest.mark.parametrize(
    ("client", "test"),
    [
        (lambda s: TensorDataset(*s), lambda s: TensorDataset(*s)),
        (lambda s: s, lambda s: Labelled(s)),
        (Labelled, lambda s: s),
        (lambda s: Subset(Labelled(s), [*range(len(s[1]))]), lambda s: TensorDataset(*s)),
    ],
)
def test_the_class_mixture_of_labels_that_are_known(client: Any, test: Any) -> None:
    one = last(CLIENTS, TEST, model=MODEL)
    other = last([*map(client, CLIENTS)], test(TEST), model=MODEL)
    assert other == pytest.approx(one)


def test_labels_that_are_not_known_are_dealt_out() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    clients = [(x[:10], torch.zeros(10).long()), (x[10:20], torch.ones(10).long())]
    test = x[20:], torch.arange(20) % 2
    model = nn.Linear(3, 2)
    by_class, by_size = (
        last([*map(form, clients)], form(test), model=model) for form in (lambda s: s, Rows)
    )
    assert by_class["client-loss-std"] != by_size["client-loss-std"]
    assert by_size["client-loss"] == pytest.approx(by_size["test-loss"])


@pytest.mark.parametrize("form", [lambda s: s, Rows, shuffled])
def test_samples_of_each_clients_own(form: Any) -> None:
    """The server evaluates on all of them."""
    tests = [numbers(4, 2), None, numbers(2, 7), None]
    own = [None if samples is None else form(samples) for samples in tests]
    history = simulate(
        "ditto", clients=NUMBERS, test=own, rounds=1, evaluation="both", **MSE, participation=1.0
    )
    row = history.metrics.iloc[-1]
    assert (row["evaluation-replies"], row["evaluation-empty"]) == (2, 2)
    with torch.no_grad():
        model = nn.Linear(3, 1)
        model.load_state_dict(history.model)
        losses = [(model(x) - y).square() for x, y in (tests[0], tests[2])]
        expected = pd.Series([float(loss.mean()) for loss in losses])
        assert row["test-loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert row["client-loss-worst-tenth"] == pytest.approx(expected.max(), rel=1e-5)
    assert row["client-loss-std"] == pytest.approx(expected.std(ddof=0), rel=1e-4)
    assert row["personal-loss-std"] > 0


def test_a_client_whose_targets_are_all_ignored_has_no_samples() -> None:
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 2
    tests = [(x[:4], y[:4]), (x[4:], torch.full((2,), -100))]
    history = simulate(
        "fedavg",
        **{"clients": [(x, y)] * 2, "test": tests, "model": nn.Linear(3, 2), "rounds": 1},
        **{"participation": 1.0, "evaluation": "both"},
    )
    row = history.metrics.iloc[-1]
    assert (row["evaluation-replies"], row["evaluation-empty"]) == (1, 1)
    assert row["evaluation-dropped"] == 0
    assert row["client-loss"] == pytest.approx(row["test-loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("test", "line"),
    [
        (
            [FUTURE],
            "^test: expected .* a list with the samples of each of 4 clients, .* got a list of 1$",
        ),
        ([FUTURE, None, 3, None], "^test of client 2: expected tensors"),
        ([FUTURE, None, None, (FUTURE[0], FUTURE[1][:2])], "^test of client 3: expected equally"),
        (shuffled(FUTURE), r"^test: .* got a function, which cannot be divided; give test=\[...\]"),
    ],
)
@pytest.mark.parametrize("algo", ["fedavg", "ditto"])
def test_what_cannot_be_dealt_out_is_one_line(algo: str, test: Any, line: str) -> None:
    evaluation = "clients" if algo == "fedavg" else "server"
    with pytest.raises(ValueError, match=line) as error:
        last(NUMBERS, test, algo, evaluation=evaluation, **MSE)
    assert "\n" not in str(error.value)


def test_the_server_evaluates_on_the_batches_of_a_function() -> None:
    row = last(NUMBERS, shuffled(FUTURE), evaluation="server", **MSE)
    assert row["test-loss"] == pytest.approx(last(NUMBERS, FUTURE, **MSE)["test-loss"])


@pytest.mark.flower
@pytest.mark.slow  # it starts Ray
def test_workers_deal_out_the_same_shares() -> None:
    for clients, test in ((NUMBERS, FUTURE), ([*map(Rows, NUMBERS)], Rows(FUTURE))):
        assert last(clients, test, workers=2, **MSE) == last(clients, test, **MSE)


def test_a_model_that_no_client_can_evaluate_has_diverged() -> None:
    """Its last good evaluation would look like the end of the run."""

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        value = ((predictions - targets) ** 2).mean()
        return value if torch.is_grad_enabled() or value > 0.1 else value * torch.nan

    near = [(x, 0 * y) for x, y in NUMBERS]
    model = nn.Linear(3, 1)
    nn.init.ones_(model.bias)
    settings: dict[str, Any] = {"loss": loss, "model": model, "evaluation": "clients"}
    with pytest.raises(FederationError, match=r"^the model diverged: its client loss is inf after"):
        simulate("fedavg", clients=near, test=near, rounds=30, local_steps=3, lr=0.1, **settings)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_one_client_with_a_loss_of_nan_ends_no_run(share: float) -> None:
    """Also if no other one is asked."""

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        value = ((predictions - targets) ** 2).mean()
        return value * torch.nan if float(targets.max()) > 100 else value

    test = [(x, 0 * y + 1000 * (i == 2)) for i, (x, y) in enumerate(NUMBERS)]
    settings = MSE | {"evaluation": "clients", "fraction_evaluate": share, "loss": loss}
    history = simulate("fedavg", clients=NUMBERS, test=test, rounds=12, **settings)
    assert history.metrics["evaluation-dropped"].max() == 1
    assert not history.metrics["client-loss"].isin([torch.inf]).any()
