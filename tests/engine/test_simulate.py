"""`simulate`: its one call, what it records, what it leaves alone, what it refuses."""

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedaccord import simulate
from fedaccord.engine import History, quiet
from fedaccord.federation.errors import FederationError
from fedaccord.strategies import FedAvg, Scaffold
from tests.federation import half_square, linear
from tests.reference.problem import LeastSquares

C = 6
LEAST_SQUARES = LeastSquares(C, seed=2)
W0 = np.linspace(-1, 1, LEAST_SQUARES.dim)
SCHEDULE = [[0, 3], [1, 2, 5], [4], [0, 5]]
PLAIN: dict[str, Any] = {
    "clients": LEAST_SQUARES.clients(),
    "model": linear(W0),
    "loss": half_square,
    "rounds": len(SCHEDULE),
    "participation": SCHEDULE,
    "dtype": torch.float64,
    "local_steps": 3,
    "batch_size": 0,
    "lr": 0.05,
    "lr_decay": 1.0,
    "weight_decay": 0.0,
    "clip_norm": None,
}


def history(algo: Any = "scaffold", **changes: Any) -> History:
    return simulate(algo, **{**PLAIN, "record": "weights", **changes})


def same(a: History, b: History) -> bool:
    assert a.weights is not None
    assert b.weights is not None
    return torch.equal(a.weights, b.weights)


# --- simulate -------------------------------------------------------------------------------------


def test_the_documented_call() -> None:
    """SCAFFOLD on least squares, its formulas written out for all clients at once."""
    found = simulate(
        "scaffold",
        clients=LEAST_SQUARES.clients(),
        model=linear(W0),
        loss=lambda pred, y: 0.5 * ((pred - y) ** 2).sum(),
        rounds=4,
        local_steps=3,
        batch_size=0,
        lr=0.05,
        lr_decay=1.0,
        weight_decay=0.0,
        clip_norm=None,
        participation=SCHEDULE,
        dtype=torch.float64,
        seed=0,
        record="weights",
        **{"scaffold.server-lr": 0.5},
    )
    w, c, c_i = W0, np.zeros(5), np.zeros((C, 5))
    weights, averages = [w], [w]
    for cohort in SCHEDULE:
        local, before = {}, c_i.copy()
        for i in cohort:
            w_k = w
            for _ in range(3):
                w_k = w_k - 0.05 * (LEAST_SQUARES.grad(i, w_k) - c_i[i] + c)
            local[i] = w_k
            c_i[i] = c_i[i] - c + (w - w_k) / (3 * 0.05)
        averages.append(np.mean(list(local.values()), axis=0))
        w = w + 0.5 * (averages[-1] - w)
        weights.append(w)
        c = c + (c_i - before).sum(0) / C
    assert found.weights is not None
    assert found.averages is not None
    np.testing.assert_allclose(found.weights, weights, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.averages, averages, rtol=1e-10, atol=1e-12)
    for i, state in enumerate(found.clients):
        np.testing.assert_allclose(state.c_i, c_i[i], rtol=1e-10, atol=1e-12)
    assert isinstance(found.metrics, pd.DataFrame)
    assert found.metrics["round"].tolist() == [0, 1, 2, 3, 4]
    assert found.metrics["replies"].tolist()[1:] == [2, 3, 1, 2]
    assert list(found.model) == ["weight"]
    assert torch.equal(found.model["weight"], found.weights[-1:])


def test_a_fraction_draws_cohorts_of_that_size() -> None:
    found = history(participation=0.5)
    assert found.metrics["replies"].tolist()[1:] == [3] * 4
    assert history(participation=1).metrics["replies"].tolist()[1:] == [6] * 4
    assert not same(found, history(participation=0.5, seed=1))


def test_a_fraction_is_also_for_a_strategy_object() -> None:
    settings: dict[str, Any] = {"precision": "float64", "local_steps": 3, "batch_size": 0}
    found = history(FedAvg(**settings), participation=0.34)
    assert found.metrics["replies"].tolist()[1:] == [2] * 4
    kept = history(FedAvg(fraction_train=1.0, **settings), participation=None)
    assert kept.metrics["replies"].tolist()[1:] == [6] * 4


def test_a_strategy_is_as_good_as_its_name() -> None:
    settings = {
        k: PLAIN[k] for k in ("lr", "lr_decay", "weight_decay", "local_steps", "batch_size")
    }
    scaffold = Scaffold(precision="float64", clip_norm=0.0, **settings)
    assert same(history(scaffold), history("scaffold"))


def test_what_is_recorded() -> None:
    found = history()
    assert found.weights is not None
    assert found.averages is not None
    assert found.states is not None
    assert found.weights.shape == found.averages.shape == (5, 5)
    assert torch.equal(found.weights[0], torch.from_numpy(W0))
    assert torch.equal(found.averages[0], found.weights[0])
    active = [[state is not None for state in states] for states in found.states]
    seen: set[int] = set()
    for t, cohort in enumerate([[], *SCHEDULE]):
        seen |= set(cohort)
        assert active[t] == [i in seen for i in range(C)]
    less = simulate("scaffold", **PLAIN)
    assert less.weights is less.averages is less.states is None
    assert torch.equal(less.model["weight"], found.model["weight"])
    assert torch.equal(less.clients[3].c_i, found.clients[3].c_i)


def test_dtype_is_that_of_every_vector() -> None:
    for dtype in (torch.float32, torch.float64):
        found = history(dtype=dtype)
        assert found.weights is not None
        assert {found.weights.dtype, found.model["weight"].dtype} == {dtype}
        assert found.clients[0].c_i.dtype == dtype
    double, single = history(), history(dtype=torch.float32)
    assert double.weights is not None
    assert single.weights is not None
    torch.testing.assert_close(single.weights.double(), double.weights, rtol=1e-4, atol=1e-5)
    assert not torch.equal(single.weights.double(), double.weights)


def test_clip_norm_none_is_off() -> None:
    assert same(history(clip_norm=None), history(clip_norm=0.0))
    assert same(history(clip_norm=None), history(clip_norm=1e9))
    assert not same(history(clip_norm=None), history(clip_norm=0.1))


def test_a_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1)).double().eval()
    before = copy.deepcopy(module.state_dict())
    pointers = [p.data_ptr() for p in module.parameters()]
    found = history(model=module, dtype=torch.float32)
    assert found.weights is not None
    assert not torch.equal(found.weights[0], found.weights[-1])
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert [p.data_ptr() for p in module.parameters()] == pointers
    assert all(p.grad is None and p.dtype == torch.float64 for p in module.parameters())
    assert not module.training


def test_the_clients_tensors_are_left_as_they_were() -> None:
    clients = LEAST_SQUARES.clients()
    history(clients=clients, batch_size=4)
    for (x, y), (x_0, y_0) in zip(clients, LEAST_SQUARES.clients(), strict=True):
        assert torch.equal(x, x_0)
        assert torch.equal(y, y_0)


def test_a_run_depends_on_its_seed_and_on_nothing_that_ran_before() -> None:
    settings: dict[str, Any] = {"participation": 0.5, "batch_size": 4, "weight_decay": 0.01}
    first = history(**settings)
    torch.manual_seed(77)
    np.random.seed(77)
    history("afedpd", batch_size=3)
    assert same(history(**settings), first)
    assert not same(history(**settings, seed=1), first)
    a, b = first.metrics.drop(columns="seconds"), history(**settings).metrics
    pd.testing.assert_frame_equal(a, b.drop(columns="seconds"))


def test_a_data_set_by_name_twice() -> None:
    """The task is loaded once; what one run left in its model does not reach the next."""
    keys: dict[str, Any] = {"rounds": 2, "participation": 0.5, "record": "weights"}
    keys |= {"num_clients": 4, "local_epochs": 1}
    first = simulate("fedinit", **keys)
    simulate("scaffold", **keys)
    assert same(simulate("fedinit", **keys), first)
    assert first.metrics["test-accuracy"].iloc[-1] > first.metrics["test-accuracy"].iloc[0]


def test_a_model_by_name_fits_the_clients_tensors() -> None:
    torch.manual_seed(0)
    clients = [(torch.randn(8, 3), torch.arange(8) % 4) for _ in range(3)]
    found = simulate(
        "fedavg",
        clients=clients,
        test=clients[0],
        model="linear",
        rounds=2,
        participation=1.0,
    )
    assert [tuple(v.shape) for v in found.model.values()] == [(4, 3), (4,)]
    assert found.metrics["test-loss"].iloc[-1] < found.metrics["test-loss"].iloc[0]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"clients": [(torch.ones(3, 5), torch.ones(2, 1))]},
            "clients: client 0: expected equally many",
        ),
        (
            {"clients": [(torch.ones(0, 5), torch.ones(0, 1))]},
            "clients: client 0: expected equally many",
        ),
        (
            {"clients": [(np.ones((3, 5)), np.ones((3, 1)))]},
            "clients: client 0: expected tensors, got ndarray; use torch.as_tensor",
        ),
        (
            {"clients": [(torch.ones(3, n), torch.ones(3, 1)) for n in (5, 4)]},
            "clients: client 1: expected inputs (n, ...) as client 0 has, (5,) torch.float32,",
        ),
        (
            {"model": nn.Linear(4, 1)},
            "model: expected one that takes inputs (n, ...) of (5,) and gives what the loss",
        ),
        ({"loss": lambda p, y: p - y}, "loss: expected one number for a batch, got (2, 1)"),
        ({"clients": []}, "num-clients: expected at least 1, got 0"),
        ({"test": (torch.ones(3, 5), torch.ones(2, 1))}, "test: expected equally many"),
        ({"clients": None}, "model: expected a name with dataset=, or a module with clients="),
        ({"record": "all"}, "record: expected 'metrics' or 'weights', got 'all'"),
        ({"dtype": torch.float16}, "dtype: expected torch.float32 or torch.float64, got"),
        ({"model": "lenett"}, "model: expected one of linear, mlp, lenet, "),
        ({"participation": 1.5}, "fraction-train: expected at least 1e-06 and at most 1, got"),
        ({"participation": [[0]]}, "participation: expected a cohort for each of 4 rounds, got 1"),
        ({"rounds": 0}, "num-server-rounds: expected at least 1, got 0"),
        ({"local_stepps": 3}, "unknown key 'local-stepps' (did you mean 'local-steps', "),
        ({"algo": "scafold"}, "algo: expected one of fedavg, "),
    ],
    ids=lambda v: str(next(iter(v))) if isinstance(v, dict) else "",
)
def test_settings_that_do_not_fit_are_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        history(changes.pop("algo", "scaffold"), **changes)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_run_without_a_trained_model_is_no_history() -> None:
    with pytest.raises(FederationError, match=r"^none of 2 rounds counted .* untrained"):
        history("fedavg", lr=1e200, rounds=2)
    with pytest.raises(FederationError, match=r"^3 rounds in a row failed"):
        history("fedavg", lr=1e200)


def test_a_model_that_diverged_is_no_history() -> None:
    """A rate that grows the weights to 1e160: the only step's loss is small, the next is not."""
    keys: dict[str, Any] = {"lr": 1e160, "local_steps": 1, "participation": [[0]], "rounds": 1}
    test = LEAST_SQUARES.clients()[0]
    with pytest.raises(FederationError, match=r"^the model diverged: its test loss is inf after 1"):
        history("fedavg", test=test, **keys)


@pytest.fixture
def flower_log() -> Iterator[list[logging.LogRecord]]:
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield seen
    log.removeHandler(handler)
    log.setLevel(level)


def test_simulate_is_quiet(
    flower_log: list[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    history()
    assert flower_log == []
    assert capsys.readouterr() == ("", "")
    assert logging.getLogger("flwr").level == logging.INFO


def test_keys_without_effect_are_told(flower_log: list[logging.LogRecord]) -> None:
    history("fedavg", **{"fedprox.mu": 0.1})
    line = "fedprox.mu=0.1 has no effect: nothing reads it without algo=fedprox"
    assert [record.getMessage() for record in flower_log] == [line]


def test_quiet_lets_warnings_through(flower_log: list[logging.LogRecord]) -> None:
    log = logging.getLogger("flwr")
    with suppress(RuntimeError), quiet():
        log.info("a round")
        log.warning("a client was dropped")
        raise RuntimeError
    assert [r.getMessage() for r in flower_log] == ["a client was dropped"]
    assert log.level == logging.INFO


def test_workers_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedaccord.engine.workers", None)
    with pytest.raises(ValueError, match="workers: expected Ray, found none"):
        history(workers=2)
