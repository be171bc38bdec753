"""Many clients in one call are the clients one at a time, but for the last bits."""

import copy
import inspect
import logging
import os
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import engine, simulate
from fedaccord.config import RunConfig
from fedaccord.core.request import ModelSettings
from fedaccord.core.rule import Model
from fedaccord.core.vectors import leaves
from fedaccord.engine import History, fleet, vectorize
from fedaccord.engine.fleet import LocalFleet
from fedaccord.engine.vectorize import VectorizeChoice, choose
from fedaccord.experiments.sweep import Plan
from fedaccord.federation.errors import FederationError
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.runs.logbook import vectorize_of
from fedaccord.strategies import FedAvg, Scaffold
from fedaccord.task import Clients, Task, load_task
from fedaccord.task.batches import PAIRS, BatchFormat
from fedaccord.task.sources import FunctionSource, SourceClients
from tests.engine.test_resume import settings as settings  # a fixture
from tests.wire.methods import COMBINATIONS, COMPRESSED, STEPS, all_or_slow, make

SIZES = (5, 3, 4, 6, 2)  # samples of each client: other numbers of steps, and short last batches
COHORTS = [[0, 1, 3], [1, 2, 3, 4], [0, 2], [0, 1, 2, 3, 4]]
EVERYONE = [list(range(len(SIZES)))] * 3


def clients() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 4, generator=g, dtype=torch.float64), torch.arange(n) % 3) for n in SIZES
    ]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def sizes_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of clients of each call from now on, in a list that grows."""
    calls, together = list[int](), engine.fleet.local_rounds

    def counted(requests: Any, *rest: Any) -> Any:
        calls.append(len(requests))
        return together(requests, *rest)

    monkeypatch.setattr("fedaccord.engine.fleet.local_rounds", counted)
    return calls


def run(method: FederatedStrategy, vectorize: str, **more: Any) -> History:
    everyone = method.topology.is_decentralised or method.all_clients
    cohorts = EVERYONE if everyone else COHORTS
    return simulate(
        method,
        clients=clients(),
        model=module(),
        rounds=len(cohorts),
        participation=cohorts,
        record="weights",
        vectorize=vectorize,
        **more,
    )


def small(name: str, plugins: str = "bare", **more: Any) -> FederatedStrategy:
    steps = 1 if name == "dpsgd" else 0
    of: dict[str, Any] = {"batch_size": 2, "local_epochs": 2, "local_steps": steps, "lr": 0.05}
    return replace(make(name, plugins), **of | more)


SOME = [(name, parts) for name, parts in COMBINATIONS if parts in ("bare", "sam+ri", *STEPS)]
SOME += [it for it in COMPRESSED if it[1] != "qsgd"]  # whose draws differ where the last bits do


def test_states_that_are_kept_with_no_parts_of_the_model_are_those_of_the_method(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With buffers=local and a model that has none."""
    alone, kept = (run(small("scaffold", **more), "on") for more in ({}, {"buffers": "local"}))
    assert torch.equal(alone.weights, kept.weights)
    assert "at once failed" not in caplog.text


@pytest.mark.parametrize(("name", "plugins"), all_or_slow(SOME))
def test_every_method(name: str, plugins: str) -> None:
    alone, together = (run(small(name, plugins), how) for how in ("off", "on"))
    torch.testing.assert_close(together.weights, alone.weights, rtol=1e-10, atol=1e-12)
    for one, other in zip(alone.clients, together.clients, strict=True):
        for (field, v), (_, w) in zip(leaves(one), leaves(other), strict=True):
            torch.testing.assert_close(w, v, rtol=1e-10, atol=1e-12, msg=field)
    np.testing.assert_allclose(
        together.metrics["train-loss"][1:], alone.metrics["train-loss"][1:], rtol=1e-10
    )
    assert (together.metrics["dropped"][1:] == 0).all()


@pytest.mark.parametrize(
    ("name", "optimizer", "schedule"),
    [
        ("fedavg", "sgd", "linear"),
        ("fedavg", "momentum", "cosine"),
        ("fedavg", "adamw", "linear"),
        ("fedavg", "muon", "cosine"),
        ("scaffold", "sgd", "cosine"),
        ("scaffold", "momentum", "linear"),
        ("scaffold", "adamw", "cosine"),
        ("scaffold", "muon", "linear"),
        ("fedpac", "sgd", "cosine"),
    ],
)
def test_rates_that_fall_within_the_round_of_each_client(
    name: str, optimizer: str, schedule: str
) -> None:
    """Clients of unequal numbers of steps have rates of their own."""
    method = small(name, optimizer=optimizer, lr_schedule=schedule, optimizer_state="keep")
    alone, together = (run(method, how) for how in ("off", "on"))
    torch.testing.assert_close(together.weights, alone.weights, rtol=1e-10, atol=1e-10)
    constant = run(small(name, optimizer=optimizer, optimizer_state="keep"), "on")
    assert not torch.allclose(constant.weights, together.weights, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("how", ["off", "on"])
@pytest.mark.parametrize(
    "roles",
    [{"local_parameters": "4.*"}, {"frozen_parameters": "4.*"}, {"local_parameters": "2.*"}],
)
def test_muon_makes_steps_of_hidden_matrices_orthogonal(roles: dict[str, str], how: str) -> None:
    """With the head, too, or a hidden matrix, beside the shared parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3, bias=False), nn.Linear(3, 3))
    net.insert(3, nn.Tanh())
    sample = torch.randn(20, 9, dtype=torch.float64), torch.arange(20) % 3
    settings: dict[str, Any] = {"batch_size": 0, "local_steps": 1, "weight_decay": 0.0, **roles}
    history = simulate(
        FedAvg(optimizer="muon", lr=0.01, precision="float64", fraction_train=1.0, **settings),
        **{"clients": [sample] * 3, "model": net, "rounds": 1, "vectorize": how},
        **{"record": "weights", "loss": "cross-entropy"},
    )
    is_local = roles == {"local_parameters": "2.*"}
    after = history.clients[0].local if is_local else history.weights[1][60:78]
    before = net[2].weight.detach().double().reshape(-1)
    lengths = torch.linalg.svdvals((after - before).view(3, 6))
    assert lengths.max() < 2 * lengths.min()


def test_the_clients_do_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = sizes_of_calls(monkeypatch)
    run(small("scaffold"), "on")
    assert calls == [3, 4, 2, 5]  # also first visits with later ones
    monkeypatch.setattr("fedaccord.engine.fleet.CALL_CLIENTS", 2)
    calls.clear()
    run(small("fedavg"), "on")
    assert max(calls) == 2


@pytest.mark.parametrize("how", ["off", "on"])
def test_the_seconds_of_clients_are_those_of_their_round(how: str) -> None:
    """In one call each has its share of the steps."""
    clients: list[dict[str, Any]] = []
    metrics = run(small("fedavg"), how, on_round=lambda r: clients.extend(r.clients)).metrics
    rows = pd.DataFrame(clients)
    sums = rows.groupby("round")["seconds"].sum()
    assert (rows["seconds"] > 0).all()
    assert (sums.to_numpy() <= metrics["seconds"][1:].to_numpy()).all()
    if how == "on":
        last = rows[rows["round"] == len(COHORTS)]  # all of them had a visit before
        assert last["steps"].nunique() > 1
        assert (last["seconds"] / last["steps"]).to_numpy() == pytest.approx(
            last["seconds"].sum() / last["steps"].sum()
        )


def test_in_float32_the_last_bits_differ_and_no_more() -> None:
    weights = []
    for how in ("off", "on"):
        history = simulate(
            "scaffold",
            clients=[(x.float(), y) for x, y in clients()],
            model=module(),
            rounds=4,
            participation=COHORTS,
            record="weights",
            batch_size=2,
            vectorize=how,
        )
        weights.append(history.weights)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


def test_a_client_that_fails_concerns_itself_alone() -> None:
    """Its inputs are so large that its model diverges, and those of the others do not."""
    data = clients()
    data[1][0][:] = 1e300
    for how in ("off", "on"):
        history = simulate(
            small("scaffold", clip_norm=0.0),
            clients=data,
            model=module(),
            rounds=2,
            participation=[[0, 1, 2]] * 2,
            record="weights",
            vectorize=how,
        )
        assert history.clients[1] is None
        assert list(history.metrics["dropped"][1:]) == [1, 1]


def test_a_clients_state_has_a_memory_of_its_own() -> None:
    """A part of its cohort's would keep all the others' from being freed."""
    history = run(small("scaffold"), "on")
    for state in history.clients:
        for _, v in leaves(state):
            assert v.untyped_storage().nbytes() == v.numel() * v.itemsize


def test_a_crash_within_a_cohort() -> None:
    histories = [
        run(small("fedinit"), how, faults=lambda t, i: "crash" if (t, i) == (1, 3) else None)
        for how in ("off", "on")
    ]
    torch.testing.assert_close(histories[1].weights, histories[0].weights, rtol=1e-10, atol=1e-12)
    assert [h.metrics["dropped"].iloc[2] for h in histories] == [1, 1]


class Branching(nn.Module):
    """A module that vmap refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


class Untrainable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("in every client")
        return super().forward(x)


class Recurrent(nn.Module):
    """An LSTM, which vmap refuses too."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cell(x)[0]
        return y


def task_of(model: nn.Module) -> Task:
    xs, ys = zip(*clients(), strict=True)
    return Task(lambda: copy.deepcopy(model), Clients(xs, ys), loss=F.cross_entropy)


def test_a_module_that_takes_no_stack_is_trained_one_client_at_a_time() -> None:
    """With the clients' states, as if it had not been tried."""
    model = Branching()
    off, on = (
        simulate(
            Scaffold(precision="float64", batch_size=2, lr=0.05, fraction_train=1.0),
            clients=clients(),
            model=model,
            rounds=2,
            record="weights",
            vectorize=how,
        )
        for how in ("off", "on")
    )
    assert torch.equal(on.weights, off.weights)
    assert off.metrics["replies"].tolist()[1:] == [len(SIZES)] * 2


def test_a_module_that_takes_no_stack_has_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = sizes_of_calls(monkeypatch)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    method = FedAvg(precision="float64", batch_size=2, fraction_train=1.0)
    keys: dict[str, Any] = {"rounds": 3, "vectorize": "on"}
    simulate(method, clients=clients(), model=Branching(), **keys)
    assert tries == [len(SIZES)] * 3  # a round does not depend on earlier ones
    texts = [r.getMessage() for r in caplog.records if "one client at a time" in r.getMessage()]
    assert len(texts) == 1
    assert texts[0].startswith("one client at a time: expected a model and a loss that")


class InAList(nn.Module):
    """Its forward pass reads some parameters where no stack replaces them."""

    def __init__(self, number: int, scale: float) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(0.1 * torch.randn(4, 4)) for _ in range(2))
        self.number, self.read = number, [self.second, self.first][:number]
        self.scale = scale  # of what the list adds, and so of its gradient

    def forward(self, x: Tensor) -> Tensor:
        first = self.read[1] if self.number > 1 else self.first
        return (1 - self.scale) * x + (x @ first).tanh() @ (self.scale * self.read[0])


@pytest.mark.parametrize(("number", "scale"), [(1, 1.0), (2, 1.0), (1, 0.01)])
@pytest.mark.parametrize("vectorize", ["auto", "on"])
def test_parameters_that_a_stack_does_not_replace_are_trained_too(
    number: int, scale: float, vectorize: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(6, 4, generator=generator), torch.randint(4, (6,), generator=generator))
        for _ in range(6)
    ]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return InAList(number, scale)

    weights = []
    for setting in ("off", vectorize):
        method = FedAvg(precision="float64", batch_size=2, fraction_train=1.0)
        own = simulate(method, clients=data, model=build, rounds=2, vectorize=setting)
        weights.append(torch.cat([part.flatten() for part in own.model.values()]))
    assert torch.equal(*weights)


def test_a_last_batch_of_one_sample_shows_that_a_model_looks_at_others() -> None:
    """Padding with copies of it would not."""
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in (20, 17, 9, 12, 30, 6)
    ]

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Centred()

    weights = []
    for setting in ("off", "on"):
        method = FedAvg(precision="float64", batch_size=5, fraction_train=1.0)
        own = simulate(method, clients=data, model=build, rounds=2, vectorize=setting)
        weights.append(torch.cat([part.flatten() for part in own.model.values()]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


def test_what_fails_for_many_clients_alone_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As memory that suffices for one client: the last bits of the round are others."""

    def failing(*_: Any) -> Any:
        raise MemoryError("too little")

    monkeypatch.setattr("fedaccord.engine.fleet.local_rounds", failing)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    method = FedAvg(precision="float64", fraction_train=1.0)
    keys: dict[str, Any] = {"clients": clients(), "rounds": 1, "vectorize": "on"}
    messages = []
    for model in (module(), Untrainable(4, 3)):  # whose clients' own errors say enough
        caplog.clear()
        with suppress(FederationError):  # no round counts
            simulate(method, model=model, **keys)
        messages.append([m for r in caplog.records if "at once failed" in (m := r.getMessage())])
    assert messages == [
        ["5 clients at once failed, one at a time did not: MemoryError: too little"],
        [],
    ]


def forbidden(*_: Any) -> Any:
    raise AssertionError("the rule read a clock or counted the cores")


def sizes_of(
    module: Callable[[], nn.Module], inputs: int, batch_size: int, clients: int, **more: Any
) -> VectorizeChoice:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, inputs, generator=g), torch.arange(20) % 3
    task = Task(module, Clients(x, y, [np.arange(20)] * clients))
    return choose("auto", task, FedAvg(batch_size=batch_size, **more), clients)


def linear(inputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(inputs, 10, bias=False))


@pytest.mark.parametrize(
    ("inputs", "batch_size", "clients", "expected"),
    [
        (64, 20, 5, "many clients in one call: the model is small, a round has 5"),
        (64, 20, 4, "one client at a time: a round has 4, a call pays off from 5 on"),
        (1638, 20, 100, "many clients in one call: the model is small, a round has 100"),
        (1639, 20, 100, "one client at a time: the model has 65,560 bytes, a call pays off up to "),
        (1000, 100, 10, "many clients in one call: the model is small, a round has 10"),
        (
            1000,
            101,
            10,
            "one client at a time: a batch has 1,010,000 multiplications, a call pays ",
        ),
        (1600, 0, 10, "many clients in one call: the model is small, a round has 10"),  # 20 samples
    ],
)
def test_the_rule_knows_sizes_alone(
    inputs: int, batch_size: int, clients: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock, and neither the cores nor the threads of the machine."""
    for name in ("perf_counter", "process_time", "thread_time", "monotonic", "time"):
        monkeypatch.setattr(time, name, forbidden)
    for name in ("cpu_count", "sched_getaffinity", "getloadavg"):
        monkeypatch.setattr(os, name, forbidden)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    choices = {sizes_of(linear(inputs), inputs, batch_size, clients) for _ in range(20)}
    [choice] = choices
    assert choice.why.startswith(expected)
    assert choice.vectorize == expected.startswith("many")


@pytest.mark.parametrize(
    ("clients", "accepts", "expected"),
    [
        (2, True, "many clients in one call: a GPU runs their kernels in parallel, a round"),
        (1, True, "one client at a time: a round has 1"),
        (9, False, "one client at a time: the model does not accept a stack of clients"),
    ],
)
def test_on_a_gpu_models_of_any_size_take_a_call(
    clients: int, accepts: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectorize, "accepts_stack", lambda *_: accepts)
    x = torch.randn(9, 5000)
    own = Task(linear(5000), Clients([x], [torch.zeros(9).long()]), device=torch.device("cuda"))
    choice = choose("auto", own, FedAvg(), clients)
    assert choice.why.startswith(expected)
    assert choice.vectorize == expected.startswith("many")


@pytest.mark.parametrize(("device", "calls"), [("cpu", [1, 1, 1]), ("cuda", [3])])
def test_a_call_on_a_gpu_holds_larger_models(device: str, calls: list[int]) -> None:
    data = Clients([torch.randn(2, 4)] * 3, [torch.arange(2)] * 3)
    own = Task(linear(4), data, device=torch.device(device))
    down = Model(torch.zeros(2**23))  # 32 MiB
    instruction = SimpleNamespace(client=0, round=0, half=FedAvg().client_half())
    visits: Any = [(SimpleNamespace(instruction=instruction, down=down), None)] * 3
    assert [len(part) for part in fleet._parts(visits, own)] == calls


def test_the_rule_counts_bytes_and_not_numbers() -> None:
    assert sizes_of(linear(1000), 1000, 20, 10).vectorize
    assert not sizes_of(linear(1000), 1000, 20, 10, precision="float64").vectorize


def test_the_rule_does_not_know_where_the_parameters_are() -> None:
    """The task's model still holds what was computed with it last, which may have diverged."""
    task, method = task_of(module()), FedAvg(precision="float64", batch_size=2)
    task.model(ModelSettings("float64")).w.fill_(float("nan"))
    assert choose("auto", task, method, 5).vectorize


@pytest.mark.parametrize(
    "model", [Branching(), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), Recurrent()]
)
def test_a_model_that_accepts_no_stack_goes_one_client_at_a_time(model: nn.Module) -> None:
    choice = choose("auto", task_of(model), FedAvg(precision="float64", batch_size=2), 5)
    assert choice == (False, "one client at a time: the model does not accept a stack of clients")


def test_batches_that_are_no_rows_of_two_tensors_go_one_client_at_a_time() -> None:
    """With a forward of one's own, and of a function, which batch-size does not cut."""
    x, y = clients()[0]
    rows, form = Clients([x] * 5, [y] * 5), BatchFormat(lambda model, batch: model(batch[0]))
    of_function = FunctionSource(lambda generator: [(x, y)], PAIRS).counted()
    method = FedAvg(precision="float64", batch_size=2)
    for own in (
        Task(module, rows, loss=F.cross_entropy, format=form),
        Task(module, SourceClients([of_function] * 5), loss=F.cross_entropy),
    ):
        choice = choose("auto", own, method, 5)
        assert choice.why == "one client at a time: the model does not accept a stack of clients"
    assert choose("auto", Task(module, rows, loss=F.cross_entropy), method, 5).vectorize


def test_what_is_set_is_taken() -> None:
    task, method = task_of(Branching()), FedAvg(precision="float64", batch_size=2)
    assert choose("on", task, method, 1).vectorize
    assert not choose("off", task_of(module()), method, 5).vectorize


def test_simulate_chooses_by_the_cohorts_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def seen(how: str, task: Task, strategy: FederatedStrategy, clients: int) -> VectorizeChoice:
        sizes.append(clients)
        return choose(how, task, strategy, clients)

    monkeypatch.setattr("fedaccord.engine.vectorize.choose", seen)
    for participation, rounds in ((COHORTS, len(COHORTS)), (EVERYONE, len(EVERYONE)), (0.4, 3)):
        simulate(
            "fedavg",
            clients=clients(),
            model=module(),
            rounds=rounds,
            participation=participation,
            dtype=torch.float64,
            batch_size=2,
            vectorize="auto",
        )
    assert sizes == [4, 5, 2]  # (3 + 4 + 2 + 5) / 4 = 3.5


def test_one_default_everywhere() -> None:
    """One client at a time, with which all runtimes give the same bits."""
    default = inspect.signature(simulate).parameters["vectorize"].default
    plan = Plan.make({"space": {"algo": ["fedavg"]}})
    [configuration] = plan.configurations("fedavg")
    assert default == RunConfig.make({}).vectorize == configuration.config.vectorize == "off"


def test_the_choice_is_written_down_and_kept_by_a_resumed_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings |= {"vectorize": "auto", "fraction-train": 1.0, "num-clients": 6}
    config = RunConfig.make(settings | {"name": "chosen"})

    def vectorize_of_run() -> str:
        return str(tomllib.loads((path / "config.toml").read_text())["run"]["vectorize"])

    with engine.quiet():
        path = engine.run(config).path
    assert vectorize_of_run() == "on"
    monkeypatch.setattr("fedaccord.engine.vectorize.MIN_CLIENTS", 10**6)  # another version's rule
    more = config.flat | {"resume": True, "num-server-rounds": 7}
    with engine.quiet():
        engine.run(RunConfig.make(more))
    assert vectorize_of_run() == "on"
    keys = {k: v for k, v in settings.items() if k not in ("num-server-rounds", "out-dir")}
    calls = sizes_of_calls(monkeypatch)
    simulate("fedinit", rounds=8, resume=path, **keys)
    assert calls == [6]


def test_a_run_that_flower_left_took_one_client_at_a_time() -> None:
    """Its settings of an earlier version say "auto", which nothing resolved there."""
    for keys in ({}, {"vectorize": "auto"}, {"vectorize": "off"}):
        assert vectorize_of({"settings": keys}) == "off"
    assert vectorize_of({"settings": {"vectorize": "on"}}) == "on"


def test_a_cohort_of_a_real_run(settings: dict[str, Any]) -> None:
    """Of a data set with its preparation, as `fedaccord run` deals it."""
    config = RunConfig.make(settings)
    task = load_task(config.task, num_clients=config.num_clients)
    assert LocalFleet(task).vectorize is False
    weights = {}
    for how in ("on", "off"):
        keys = {k: v for k, v in settings.items() if k not in ("num-server-rounds", "out-dir")}
        history = simulate("feddyn", rounds=3, record="weights", **(keys | {"vectorize": how}))
        weights[how] = history.weights
    torch.testing.assert_close(weights["on"], weights["off"], rtol=1e-4, atol=1e-6)
    assert not torch.equal(weights["on"][0], weights["on"][-1])
