"""`simulate`: its one call, what it records, what it leaves alone, what it refuses."""

import copy
import json
import logging
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedaccord import run, simulate
from fedaccord.config import default, keys
from fedaccord.core.optimizer import AdamW
from fedaccord.engine import History, quiet
from fedaccord.federation.errors import FederationError
from fedaccord.plugins.sam import SAM
from fedaccord.runs import reader
from fedaccord.strategies import FedAvg, Scaffold
from tests.federation import half_square, linear
from tests.reference.problem import LeastSquares

C = 6
LEAST_SQUARES = LeastSquares(C, seed=2)
W0 = np.linspace(-1, 1, LEAST_SQUARES.dim)
SCHEDULE = [[0, 3], [1, 2, 5], [4], [0, 5]]
TASK: dict[str, Any] = {
    "clients": LEAST_SQUARES.clients(),
    "model": linear(W0),
    "loss": half_square,
    "rounds": len(SCHEDULE),
}
PLAIN: dict[str, Any] = {
    **TASK,
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


def test_averages_have_the_weights_of_the_method() -> None:
    """w^{t+1} = (w^t + w_bar) / 2, of clients with 1 to 6 samples."""
    uneven = [(x[: i + 1], y[: i + 1]) for i, (x, y) in enumerate(LEAST_SQUARES.clients())]
    more: dict[str, Any] = {"weighting": "examples", "fedavg.server-lr": 0.5}
    result = history("fedavg", clients=uneven, **more)
    torch.testing.assert_close(result.averages[1:], 2 * result.weights[1:] - result.weights[:-1])


def same(a: History, b: History) -> bool:
    return torch.equal(a.weights, b.weights)


# --- simulate -------------------------------------------------------------------------------------


def test_the_documented_call() -> None:
    """SCAFFOLD on least squares, its formulas written out for all clients at once."""
    result = simulate(
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
    np.testing.assert_allclose(result.weights, weights, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(result.averages, averages, rtol=1e-10, atol=1e-12)
    for i, state in enumerate(result.clients):
        np.testing.assert_allclose(state.c_i, c_i[i], rtol=1e-10, atol=1e-12)
    assert isinstance(result.metrics, pd.DataFrame)
    assert result.metrics["round"].tolist() == [0, 1, 2, 3, 4]
    assert result.metrics["replies"].tolist()[1:] == [2, 3, 1, 2]
    assert list(result.model) == ["weight"]
    assert torch.equal(result.model["weight"], result.weights[-1:])


def test_a_fraction_draws_cohorts_of_that_size() -> None:
    result = history(participation=0.5)
    assert result.metrics["replies"].tolist()[1:] == [3] * 4
    assert history(participation=1).metrics["replies"].tolist()[1:] == [6] * 4
    assert not same(result, history(participation=0.5, seed=1))


def test_a_strategy_is_as_good_as_its_name() -> None:
    settings = {
        k: PLAIN[k] for k in ("lr", "lr_decay", "weight_decay", "local_steps", "batch_size")
    }
    scaffold = Scaffold(precision="float64", clip_norm=0.0, **settings)
    result = simulate(scaffold, **TASK, participation=SCHEDULE, record="weights")
    assert same(result, history("scaffold"))
    assert result.settings == history("scaffold").settings


def test_a_strategy_serves_any_number_of_runs() -> None:
    """One instance, in turn and in two threads, gives what two instances give."""

    def run(method: Scaffold, cohorts: Any) -> History:
        return simulate(method, **TASK, participation=cohorts, record="weights")

    def make() -> Scaffold:
        return Scaffold(precision="float64", lr=0.05, local_steps=2, fraction_train=0.5)

    by_schedule, by_seed = run(make(), SCHEDULE), run(make(), None)
    assert not same(by_schedule, by_seed)
    one = make()
    assert same(run(one, SCHEDULE), by_schedule)
    assert same(run(one, None), by_seed)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(run, one, SCHEDULE), pool.submit(run, one, None)]
        assert same(both[0].result(), by_schedule)
        assert same(both[1].result(), by_seed)
    assert one == make()
    assert hash(one) == hash(make())
    with pytest.raises(FrozenInstanceError):
        one.lr = 0.5  # type: ignore[misc]
    assert replace(one, lr=0.5) == Scaffold(**{**vars_of(make()), "lr": 0.5})


@dataclass(frozen=True, kw_only=True)
class Recorder(FedAvg):
    """A method whose rate is set when it is made, and that notes its rounds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", self.lr / 10)
        object.__setattr__(self, "rounds", [])
        super().__post_init__()

    def aggregate(self, w: Any, ups: Any, state: Any, cohort: Any) -> Any:
        self.rounds.append(cohort.round)  # type: ignore[attr-defined]
        return super().aggregate(w, ups, state, cohort)


def test_a_run_leaves_what_a_method_set_itself() -> None:
    """It is made once, and a run uses it as it is."""
    keys: dict[str, Any] = {"precision": "float64", "local_steps": 2}
    own = Recorder(lr=0.5, **keys)
    history = simulate(own, **TASK, participation=SCHEDULE, record="weights")
    plain = simulate(FedAvg(lr=0.05, **keys), **TASK, participation=SCHEDULE, record="weights")
    assert same(history, plain)
    assert {*own.rounds} == {0, 1, 2, 3}  # type: ignore[attr-defined]


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(), nn.Linear(16, 10))


@pytest.mark.parametrize("model", [{}, {"model": f"{__name__}:dropout"}], ids=["plain", "dropout"])
def test_runs_in_two_threads_are_those_of_one(
    model: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Also of one data set, whose samples they share, and of the process's random numbers."""
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    keys: dict[str, Any] = {"num_clients": 10, "local_epochs": 1, "threads": 1, **model}

    def run(lr: float) -> list[float]:
        return [*simulate("fedavg", rounds=4, lr=lr, **keys).metrics["test-loss"]]

    rates = [0.05, 0.1] * 3
    expected = [run(lr) for lr in rates[:2]] * 3
    sys.setswitchinterval(1e-6)  # such numbers mix often, else once in many runs
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, rates)] == expected


def vars_of(method: Scaffold) -> dict[str, Any]:
    return {field.name: getattr(method, field.name) for field in fields(method)}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"lr": 0.5}, "lr: expected it in the strategy, e.g. FedAvg(lr=...), which has its"),
        (
            {"dtype": torch.float64},
            "precision: expected it in the strategy, e.g. FedAvg(precision=",
        ),
        (
            {"participation": 0.5},
            "fraction-train: expected it in the strategy, e.g. FedAvg(fraction",
        ),
        (
            {"fedavg.server-lr": 0.5},
            "fedavg.server-lr: expected it in the strategy, e.g. FedAvg(ser",
        ),
        ({"sam.rho": 0.5}, "sam.rho: expected it in the strategy, e.g. FedAvg(plugins=(SAM(rho="),
        ({"momentum.mu": 0.5}, "momentum.mu: expected it in the strategy, e.g. FedAvg(local_opt"),
        ({"scaffold.server-lr": 0.5}, "scaffold.server-lr: expected options of FedAvg, got one "),
        ({"out_dir": "/tmp"}, "out-dir: simulate writes no run directory; use fedaccord.run"),
        ({"keep_best": "nonsense"}, "keep-best: simulate writes no run directory"),
        ({"partition": "iid"}, "partition: expected it without clients=, whose samples are used "),
    ],
)
def test_what_would_have_no_effect_is_refused_in_one_line(more: dict[str, Any], line: str) -> None:
    with pytest.raises(TypeError) as error:
        simulate(FedAvg(), **TASK, **more)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_key_of_the_method_that_a_strategy_extends_is_one_of_its_own() -> None:
    class Mine(FedAvg):
        """A method of one's own."""

    line = r"^fedavg.server-lr: expected it in the strategy, e.g. Mine\(server_lr=...\), which has"
    with pytest.raises(TypeError, match=line):
        simulate(Mine(), **TASK, **{"fedavg.server-lr": 0.5})


@pytest.mark.parametrize(
    ("algo", "line"),
    [
        (FedAvg, r"^algo: expected a name, or a strategy, e.g. FedAvg\(\), got <class"),
        (3, r"^algo: expected a name, or a strategy, e.g. Scaffold\(lr=0.05\), got 3$"),
    ],
)
def test_what_is_no_strategy_is_one_line(algo: Any, line: str) -> None:
    for more in ({}, {"local_steps": 2}):
        with pytest.raises(ValueError, match=line):
            simulate(algo, **TASK, **more)


OTHERS: dict[str, Any] = {"algo": "afedpd", "device": "cpu", "model": "mlp", "local-steps": 2}
OTHERS["tokenizer"] = "tests.own:letters"


def another(key: str, field: Any) -> Any:
    """A value of a key that is not its default."""
    usual, choices = default(field), field.metadata["choices"]
    if key in OTHERS:
        return OTHERS[key]
    if choices:
        return next(choice for choice in choices if choice != usual)
    if field.metadata["auto"]:
        return field.default
    if isinstance(usual, bool):
        return not usual
    if isinstance(usual, float) and usual > 0:
        return usual / 2
    return "other" if isinstance(usual, str) else usual + 1


@cache
def plain_settings() -> dict[str, Any]:
    with quiet():
        return simulate("fedinit", rounds=1, num_clients=3, local_steps=1, model="linear").settings


@pytest.mark.parametrize("key", [key for key in keys() if key != "workers"])  # which start Ray
def test_a_key_is_recorded_or_refused(key: str) -> None:
    """Nothing that is given is dropped silently."""
    other = another(key, keys()[key])
    small: dict[str, Any] = {"rounds": 1, "num_clients": 3, "local_steps": 1, "model": "linear"}
    plain = plain_settings()
    renamed = {"num-server-rounds": "rounds", "num-clients": "num_clients"}
    arguments = small | {renamed.get(key, key.replace("-", "_") if "." not in key else key): other}
    algo = arguments.pop("algo", "fedinit")
    try:
        with quiet():
            settings = simulate(algo, **arguments).settings
    except (TypeError, ValueError, FileNotFoundError, FederationError):
        return
    assert settings[key] == other
    assert settings != plain


def test_what_is_recorded() -> None:
    result = history()
    assert result.weights.shape == result.averages.shape == (5, 5)
    assert torch.equal(result.weights[0], torch.from_numpy(W0))
    assert torch.equal(result.averages[0], result.weights[0])
    active = [[state is not None for state in states] for states in result.states]
    clients: set[int] = set()
    for t, cohort in enumerate([[], *SCHEDULE]):
        clients |= set(cohort)
        assert active[t] == [i in clients for i in range(C)]
    less = simulate("scaffold", **PLAIN)
    assert less.weights is less.averages is less.states is None
    assert torch.equal(less.model["weight"], result.model["weight"])
    assert torch.equal(less.clients[3].c_i, result.clients[3].c_i)


def test_dtype_is_that_of_every_vector() -> None:
    for dtype in (torch.float32, torch.float64):
        result = history(dtype=dtype)
        assert {result.weights.dtype, result.model["weight"].dtype} == {dtype}
        assert result.clients[0].c_i.dtype == dtype
    double, single = history(), history(dtype=torch.float32)
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
    result = history(model=module, dtype=torch.float32)
    assert not torch.equal(result.weights[0], result.weights[-1])
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert [p.data_ptr() for p in module.parameters()] == pointers
    assert all(p.grad is None and p.dtype == torch.float64 for p in module.parameters())
    assert not module.training


@pytest.mark.parametrize(
    "form",
    [lambda *parts: parts, TensorDataset, lambda *parts: lambda generator: [parts]],
    ids=["tensors", "Dataset", "function"],
)
def test_complex_targets_are_refused(form: Any) -> None:
    x, y = torch.randn(6, 3), torch.arange(6) % 3
    real, wrong = form(x, y), form(x, y.cfloat())
    line = "(batch: )?expected classes or real numbers as targets, got torch.complex64"
    for clients, test, what in (
        ([wrong], real, "clients: client 0"),
        ([real, wrong], real, "clients: client 1"),
        ([real], [wrong], "test of client 0"),
    ):
        with pytest.raises(ValueError, match=f"^{what}: {line}$"):
            simulate("fedavg", clients=clients, test=test, model=nn.Linear(3, 3), rounds=1)


class Turned(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 1)
        self.t = self.weight.detach().t()


def test_a_view_of_a_weight_is_a_warning(flower_log: list[logging.LogRecord]) -> None:
    """The copy that trains has none, and would not say so."""
    history(model=Turned())
    assert [record.getMessage().partition(";")[0] for record in flower_log] == [
        "model: t is a view of a weight and does not follow its training"
    ]


@pytest.mark.parametrize("frozen_parameters", ["", "weight"])
def test_a_view_of_a_frozen_weight_is_none(
    frozen_parameters: str, flower_log: list[logging.LogRecord]
) -> None:
    model = Turned()
    model.weight.requires_grad_(bool(frozen_parameters))
    history(model=model, frozen_parameters=frozen_parameters)
    assert not flower_log


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
    """What one run left in its model does not reach the next."""
    keys: dict[str, Any] = {"rounds": 2, "participation": 0.5, "record": "weights"}
    keys |= {"num_clients": 4, "local_epochs": 1}
    first = simulate("fedinit", **keys)
    simulate("scaffold", **keys)
    assert same(simulate("fedinit", **keys), first)
    assert first.metrics["test-accuracy"].iloc[-1] > first.metrics["test-accuracy"].iloc[0]


WIDTH = 3  # of `hidden`


def hidden(classes: int) -> nn.Module:
    """A model of what is in this module when it is built, as in a notebook's loop."""
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes))


@pytest.mark.parametrize("call", [simulate, run])
def test_files_and_functions_are_read_again_by_the_next_run(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(y: Any, sizes: list[int]) -> None:
        x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
        np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        owners = iter(range(8))
        parts = [[next(owners) for _ in range(size)] for size in sizes]
        (tmp_path / "parts.json").write_text(json.dumps(parts))

    def loss() -> float:
        keys: dict[str, Any] = {
            "dataset": "npz",
            "data_dir": str(tmp_path / "data.npz"),
            "partition": "file",
            "partition_file": str(tmp_path / "parts.json"),
            "model": f"{__name__}:hidden",
            "num_clients": 2,
            "batch_size": 2,
            "num_server_rounds": 2,
        }
        if call is run:
            result = run("fedavg", **keys, out_dir=str(tmp_path / "runs"))
            return float(reader.read(result).metrics["test-loss"].iloc[-1])
        keys["rounds"] = keys.pop("num_server_rounds")
        return float(simulate("fedavg", **keys).metrics["test-loss"].iloc[-1])

    labels = np.arange(8) % 2
    write(labels, [4, 4])
    losses = [loss(), loss()]
    assert losses[0] == losses[1]
    write(labels, [7, 1])
    losses.append(loss())
    write(1 - labels, [7, 1])
    losses.append(loss())
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 5)
    losses.append(loss())
    assert len({*losses}) == 4


def test_a_model_by_name_fits_the_clients_tensors() -> None:
    torch.manual_seed(0)
    clients = [(torch.randn(8, 3), torch.arange(8) % 4) for _ in range(3)]
    result = simulate(
        "fedavg", clients=clients, test=clients[0], model="linear", rounds=2, participation=1.0
    )
    assert [tuple(v.shape) for v in result.model.values()] == [(4, 3), (4,)]
    assert result.metrics["test-loss"].iloc[-1] < result.metrics["test-loss"].iloc[0]


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
            "clients: client 1: expected inputs (n, ...) as at client 0, (5,) torch.float32,",
        ),
        (
            {"model": nn.Linear(4, 1)},
            "model: expected one that accepts inputs (n, ...) of (5,) and returns predictions",
        ),
        (
            {"loss": lambda p, y: p - y},
            "loss: expected <lambda> to return one number for a batch, a tensor of (), got (2, 1)",
        ),
        (
            {"loss": torch.nn.MSELoss},
            "loss: expected a function of (predictions, targets), got the class MSELoss; create "
            "an object, e.g. MSELoss()",
        ),
        (
            {"model": torch.nn.Linear(5, 1, device="meta")},
            "model: expected parameters with values, Linear has one on the device meta",
        ),
        (
            {"clients": {"a": (torch.ones(3, 5), torch.ones(3, 1))}},
            "clients: expected a list of the samples of each client, got dict",
        ),
        (
            {
                "clients": [(torch.ones(3, 5), torch.eye(3, dtype=torch.int64))],
                "model": torch.nn.Linear(5, 3),
                "loss": "auto",
            },
            "model: expected one that accepts inputs (n, ...) of (5,) and returns predictions for "
            "targets of (3,) torch.int64, with loss=sequence-cross-entropy: ValueError: Expected "
            "input batch_size (2) to match target batch_size (6).; replace one-hot targets by",
        ),
        ({"clients": []}, "num-clients: expected at least 1, got 0"),
        ({"test": (torch.ones(3, 5), torch.ones(2, 1))}, "test: expected equally many"),
        ({"clients": None}, "model: expected a name with dataset=, or a module with clients="),
        ({"record": "all"}, "record: expected 'metrics' or 'weights', got 'all'"),
        ({"dtype": torch.float16}, "dtype: expected torch.float32 or torch.float64, got"),
        ({"model": "lenett"}, "model: expected one of linear, mlp, lenet, "),
        ({"participation": 1.5}, "fraction-train: expected at least 1e-06 and at most 1, got"),
        ({"participation": [[0]]}, "participation: expected a cohort for each of 4 rounds, got 1"),
        (
            {"participation": []},
            "participation: expected a cohort for each of 4 rounds, got 0; giv",
        ),
        ({"on_round": 3}, "on_round: expected a function, or None, got a int"),
        ({"faults": "late"}, "faults: expected a function, or None, got a str"),
        (
            {"participation": [[0]] * 5},
            "participation: expected a cohort for each of 4 rounds, got 5; give 4 cohorts, or set",
        ),
        ({"max_examples": 1}, "max-examples: expected at least "),
        ({"rounds": 0}, "num-server-rounds: expected at least 1, got 0"),
        ({"local_stepps": 3}, "unknown key 'local-stepps' (did you mean local_steps=... or "),
        ({"algo": "scafold"}, "algo: expected one of afedpd, "),
    ],
    ids=lambda v: str(next(iter(v))) if isinstance(v, dict) else "",
)
def test_settings_that_do_not_fit_are_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        history(changes.pop("algo", "scaffold"), **changes)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_run_without_a_trained_model_is_no_history() -> None:
    with pytest.raises(FederationError, match=r"^none of 2 rounds counted .* untrained"):
        history("fedavg", lr=3e38, rounds=2, participation=0.5)
    with pytest.raises(FederationError, match=r"^3 rounds in a row failed"):
        history("fedavg", lr=3e38)


def test_a_model_that_diverged_is_no_history() -> None:
    """A rate that grows the weights to 1e20: the only step's loss is small, the next is not."""
    keys: dict[str, Any] = {"lr": 1e20, "local_steps": 1, "participation": [[0]], "rounds": 1}
    test = LEAST_SQUARES.clients()[0]
    with pytest.raises(FederationError, match=r"^the model diverged: its test loss is .*e\+4. af"):
        history("fedavg", test=test, **keys)


@pytest.fixture
def flower_log() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)
    log.setLevel(level)


def test_simulate_is_quiet(
    flower_log: list[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    history()
    assert flower_log == []
    assert capsys.readouterr() == ("", "")
    assert logging.getLogger("flwr").level == logging.INFO


def test_keys_without_effect_are_refused() -> None:
    line = "^fedprox.mu: it needs algo=fedprox; leave it out$"
    with pytest.raises(TypeError, match=line):
        history("fedavg", **{"fedprox.mu": 0.1})


@pytest.mark.parametrize("more", [{"participation": 0.5}, {"fraction_train": 0.5}])
def test_a_share_of_the_nodes_of_a_graph_is_refused_by_the_name_it_has(more: Any) -> None:
    (name,) = (key.replace("_", "-") for key in more)
    with pytest.raises(TypeError, match=f"^{name}: under gossip all nodes train in every round; l"):
        simulate("dfedavg", dataset="digits", num_clients=4, rounds=1, **more)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"num_server_rounds": 9}, "num-server-rounds: expected it as rounds=, got num_s"),
        ({"num_clients": 9}, "num-clients: expected it or clients="),
        ({"dtype": torch.float32, "precision": "float64"}, "precision: expected it or dtype="),
        ({"fraction_train": 0.3}, "fraction-train: expected it or participation="),
        ({"participation": 0.5, "fraction_train": 0.3}, "fraction-train: expected it or particip"),
        ({"sampling": "bernoulli"}, "sampling: expected it or participation="),
    ],
)
def test_what_an_argument_sets_too_is_refused(more: dict[str, Any], line: str) -> None:
    with pytest.raises(TypeError, match=f"^{line}"):
        simulate("fedavg", **{**PLAIN, "dtype": None, **more})


MASK = [False, True, True]


@pytest.mark.parametrize(
    "form", ["half", [0, 1], [["0"]], [0.5], True, [MASK], [torch.tensor(MASK)], [np.array(MASK)]]
)
def test_a_participation_of_another_form_is_one_line(form: Any) -> None:
    with pytest.raises(ValueError, match=r"^participation: expected a share .*, got [^\n]+$"):
        history(participation=form)


@pytest.mark.parametrize(
    "argument",
    [
        {"test": torch.ones(2)},
        {"loss": lambda p, y: (p - y).square().mean()},
        {"forward": lambda model, batch: model(batch[0])},
        {"targets": "digit"},
    ],
)
def test_arguments_about_ones_own_samples_need_clients(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(TypeError, match=f"^{name}: expected it with clients=, got it without$"):
        simulate("fedavg", rounds=1, num_clients=2, local_steps=1, **argument)


def test_quiet_lets_warnings_through(flower_log: list[logging.LogRecord]) -> None:
    log = logging.getLogger("flwr")
    with suppress(RuntimeError), quiet():
        log.info("a round")
        log.warning("a client was dropped")
        raise RuntimeError
    assert [r.getMessage() for r in flower_log] == ["a client was dropped"]
    assert log.level == logging.INFO


def test_a_folder_of_states_and_tf32_without_a_gpu_are_a_warning(
    tmp_path: Path, flower_log: list[logging.LogRecord]
) -> None:
    run("fedavg", num_server_rounds=1, out_dir=str(tmp_path), state_dir="/states")
    history("fedavg", dtype=None, precision="tf32", device="cpu")
    run("fedavg", num_server_rounds=1, dataset="tests.own:augmented", batch_size=0, partition="iid")
    assert [record.getMessage().partition(":")[0] for record in flower_log] == [
        "state-dir=/states has no effect here",
        "precision=tf32 has no effect on cpu",
        "batch-size=0",
    ]


@pytest.mark.parametrize(("capability", "warnings"), [("AVX2", 1), ("AVX512", 0)])
def test_bfloat16_without_avx512_is_a_warning(
    capability: str,
    warnings: int,
    flower_log: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    history("fedavg", dtype=None, precision="bfloat16", device="cpu")
    assert len(flower_log) == warnings
    assert all("set float32" in record.getMessage() for record in flower_log)


def test_workers_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedaccord.engine.workers", None)
    with pytest.raises(ValueError, match="workers: expected Ray, found none"):
        history(workers=2)


def test_the_advice_for_a_wrong_keyword_is_python() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'rho' ") as error:
        simulate("afedpd", rho=0.1)
    (advice,) = re.findall(r"did you mean (.*)\?\)", str(error.value))
    advice, _, _ = advice.partition(" or ")
    assert advice == '**{"afedpd.rho": ...}'
    keys: dict[str, Any] = eval(advice[2:].replace("...", "0.2"))
    simulate("afedpd", rounds=1, num_clients=2, local_steps=1, **keys)


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ({"num_rounds": 3}, r" \(did you mean rounds=\.\.\.\?\)"),
        ({"num_nodes": 3}, r" \(did you mean clients=\.\.\.\?\)"),
        ({"fraction_fit": 0.5}, r" \(did you mean participation=\.\.\.\?\)"),
        ({"output_dir": "/runs"}, "; out-dir: simulate writes no run directory; use fedaccord.run"),
        ({"datset": "digits"}, "; dataset: expected it without clients=, whose samples are used.*"),
    ],
)
def test_what_is_advised_for_a_wrong_keyword_is_accepted(more: dict[str, Any], advice: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^unknown key '[a-z-]*'{advice}$"):
        history(**more)


def test_numbers_of_numpy_are_settings_and_arguments() -> None:
    """They are the same run, whose settings are Python's numbers."""
    numbers: dict[str, Any] = {"rounds": 2, "participation": 1.0, "lr": 0.5, "local_steps": 2}
    options: dict[str, Any] = {"rho": 0.5}, {"beta1": 0.5}, {"min_train_nodes": 2}

    def weights(of: Any) -> Any:
        sam, adam, own = ({name: of(value) for name, value in each.items()} for each in options)
        by_name = history("fedavg", **{name: of(value) for name, value in numbers.items()})
        assert all(type(value) in (bool, int, float, str) for value in by_name.settings.values())
        method = FedAvg(local_optimizer=AdamW(**adam), plugins=(SAM(**sam),), **own)
        own_run = simulate(method, **{**TASK, "rounds": of(2)}, record="weights")
        return by_name.weights, own_run.weights

    for plain, others in zip(weights(lambda it: it), weights(np.array), strict=True):
        assert torch.equal(plain, others)


def test_a_history_is_shown_in_one_line() -> None:
    history = simulate("fedavg", rounds=2, num_clients=3, local_steps=1)
    assert repr(history) == str(history)
    form = r"History\(2 rounds, 3 clients, 55,210 parameters, test-accuracy 0\S+, test-loss \S+, "
    assert re.fullmatch(form + r"train-loss \S+\)", repr(history))


def test_a_function_that_returns_the_model_is_called_once() -> None:
    calls = []

    def build() -> nn.Module:
        calls.append(1)
        torch.manual_seed(3)
        return nn.Linear(4, 2)

    clients = [(torch.randn(6, 4), torch.arange(6) % 2)] * 2
    options: dict[str, Any] = {"clients": clients, "rounds": 2, "local_steps": 2}
    one, other = (simulate("fedavg", model=m, **options) for m in (build, build()))
    assert len(calls) == 2  # once for each
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)


def test_a_functions_model_comes_from_the_runs_seed() -> None:
    """So runs of two methods start from one model; the caller's random numbers are untouched."""
    clients = [(torch.randn(6, 4), torch.arange(6) % 2)] * 2

    options: dict[str, Any] = {"clients": clients, "rounds": 1, "record": "weights"}

    def first(algo: str, seed: int = 0) -> torch.Tensor:
        return simulate(algo, model=lambda: nn.Linear(4, 2), seed=seed, **options).weights[0]

    before = torch.get_rng_state()
    assert torch.equal(first("fedavg"), first("scaffold"))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first("fedavg"), first("fedavg", seed=1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear, "without arguments that returns one: .*missing 2 required"),
        (lambda: 3, "got a function that returns int"),
        (3, "got int"),
    ],
)
def test_what_gives_no_model_is_one_line(model: Any, reason: str) -> None:
    clients = [(torch.randn(6, 4), torch.arange(6) % 2)]
    with pytest.raises(ValueError, match=f"^model: expected a name, a module, .*{reason}"):
        simulate("fedavg", model=model, clients=clients)
