"""Many clients in one call are the clients one at a time, but for the last bits."""

import copy
import logging
import tomllib
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import engine, simulate
from fedaccord.config import RunConfig
from fedaccord.core.vectors import leaves
from fedaccord.core.visit import Visit
from fedaccord.engine import History, Recorder
from fedaccord.engine.fleet import LocalFleet
from fedaccord.engine.vectorize import CLIENTS, choose
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.strategies import FedAvg, Scaffold
from fedaccord.task import Clients, Task, load_task
from tests.engine.test_resume import settings as settings  # a fixture
from tests.wire.methods import COMBINATIONS, make

SIZES = (7, 3, 5, 9, 2)  # samples of each client: other numbers of steps, and short last batches
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


def run(method: FederatedStrategy, vectorize: str, **more: Any) -> History:
    everyone = method.topology.everyone or type(method).__name__ == "FedPD"
    cohorts = EVERYONE if everyone else COHORTS
    if method.pools:
        cohorts = [[0]] * 3
    return simulate(
        method,
        clients=clients(),
        model=module(),
        rounds=len(cohorts),
        participation=cohorts,
        dtype=torch.float64,
        record="weights",
        vectorize=vectorize,
        **more,
    )


def small(name: str, plugins: str = "bare", **more: Any) -> FederatedStrategy:
    method = make(name, plugins)
    method.batch_size, method.local_epochs, method.lr = 2, 2, 0.05
    method.local_steps = 1 if name == "dpsgd" else 0
    for field, value in more.items():
        setattr(method, field, value)
    return method


SOME = [(name, plugins) for name, plugins in COMBINATIONS if plugins in ("bare", "sam+ri")]


@pytest.mark.parametrize(("name", "plugins"), SOME)
def test_every_method(name: str, plugins: str) -> None:
    alone, together = (run(small(name, plugins), how) for how in ("off", "on"))
    assert alone.weights is not None
    assert together.weights is not None
    torch.testing.assert_close(together.weights, alone.weights, rtol=1e-10, atol=1e-12)
    for one, other in zip(alone.clients, together.clients, strict=True):
        for (field, v), (_, w) in zip(leaves(one), leaves(other), strict=True):
            torch.testing.assert_close(w, v, rtol=1e-10, atol=1e-12, msg=field)
    np.testing.assert_allclose(
        together.metrics["train-loss"][1:], alone.metrics["train-loss"][1:], rtol=1e-10
    )
    assert (together.metrics["dropped"][1:] == 0).all()


def test_the_clients_do_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(visits: Any, *rest: Any) -> Any:
        calls.append(len(visits))
        return together(visits, *rest)

    together = engine.fleet.local_rounds
    monkeypatch.setattr("fedaccord.engine.fleet.local_rounds", counted)
    run(small("scaffold"), "on")
    # a first visit does not go with a later one
    assert calls == [3, 2, 2, 2, 5]
    monkeypatch.setattr("fedaccord.engine.fleet.MOST", 2)
    calls.clear()
    run(small("fedavg"), "on")
    assert max(calls) == 2


@pytest.mark.parametrize("how", ["off", "on"])
def test_the_seconds_of_clients_are_those_of_their_round(how: str) -> None:
    """In one call each has its share of the steps."""
    method = small("fedavg")
    metrics = run(method, how).metrics
    assert isinstance(method.on_round, Recorder)
    rows = pd.DataFrame(method.on_round.client_rows)
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
    found = []
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
        assert history.weights is not None
        found.append(history.weights)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_client_that_fails_concerns_itself_alone() -> None:
    """Its data are not numbers: its model is not, and those of the others are."""
    data = clients()
    data[1][0][:] = float("nan")
    for how in ("off", "on"):
        history = simulate(
            small("scaffold", clip_norm=0.0),
            clients=data,
            model=module(),
            rounds=2,
            participation=[[0, 1, 2]] * 2,
            dtype=torch.float64,
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
    found = [
        run(small("fedinit"), how, faults=lambda t, i: "crash" if (t, i) == (1, 3) else None)
        for how in ("off", "on")
    ]
    assert found[0].weights is not None
    assert found[1].weights is not None
    torch.testing.assert_close(found[1].weights, found[0].weights, rtol=1e-10, atol=1e-12)
    assert [h.metrics["dropped"].iloc[2] for h in found] == [1, 1]


class Branching(nn.Module):
    """A module that vmap refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


def task_of(model: nn.Module) -> Task:
    xs, ys = zip(*clients(), strict=True)
    return Task(lambda: copy.deepcopy(model), Clients(xs, ys), loss=F.cross_entropy)


def test_a_module_that_takes_no_stack_is_trained_one_client_at_a_time() -> None:
    choice = choose("auto", task_of(Branching()), FedAvg(precision="float64", batch_size=2))
    assert not choice.vectorize
    assert "takes no stack of clients" in choice.why
    found = [
        simulate(
            Scaffold(precision="float64", batch_size=2, lr=0.05),
            clients=clients(),
            model=Branching(),
            rounds=2,
            dtype=torch.float64,
            record="weights",
            seed=0,
            vectorize=how,
        ).metrics["replies"][1:]
        for how in ("off", "on")
    ]
    assert (found[0] == found[1]).all()


def test_a_module_that_takes_no_stack_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def counted(visits: Any, *rest: Any) -> Any:
        tries.append(len(visits))
        return together(visits, *rest)

    together = engine.fleet.local_rounds
    monkeypatch.setattr("fedaccord.engine.fleet.local_rounds", counted)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    method = FedAvg(precision="float64", batch_size=2, fraction_train=1.0)
    keys: dict[str, Any] = {"rounds": 3, "dtype": torch.float64, "vectorize": "on"}
    simulate(method, clients=clients(), model=Branching(), **keys)
    assert tries == [len(SIZES)]
    told = [r.getMessage() for r in caplog.records if "one client at a time" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("one client at a time from now on: expected a model and a loss that")


def test_a_trial_begins_at_fresh_parameters() -> None:
    """The task's model still holds what was computed with it last, which may have diverged."""
    task, method = task_of(module()), FedAvg(precision="float64", batch_size=2, fraction_train=1.0)
    task.model("float64").w.fill_(float("nan"))
    assert "a trial failed" not in choose("auto", task, method).why


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    task, method = task_of(module()), FedAvg(precision="float64", batch_size=2, fraction_train=1.0)
    assert choose("on", task, method) == (True, "many clients in one call: as set")
    assert choose("off", task, method) == (False, "one client at a time: as set")
    before = task.model("float64").w.clone()
    for seconds, expected in (([0.1, 4.0, 1.0], True), ([0.1, 0.04, 1.0], False)):
        times = iter(seconds).__next__
        monkeypatch.setattr("fedaccord.engine.vectorize._seconds", lambda *_, t=times: t())
        monkeypatch.setattr("fedaccord.engine.vectorize.SLOW", 9.0)
        assert choose("auto", task, method).vectorize == expected
    monkeypatch.setattr("fedaccord.engine.vectorize.SLOW", 0.0)
    monkeypatch.setattr("fedaccord.engine.vectorize._seconds", lambda *_: 1.0)
    assert "work enough" in choose("auto", task, method).why
    monkeypatch.setattr("fedaccord.engine.vectorize.BYTES", 1)
    assert "fills the caches" in choose("auto", task, method).why
    assert torch.equal(task.model("float64").w, before)


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 10), (0.008, 7), (0.019, 3), (0.07, 1)])
def test_the_trial_is_as_long_as_a_visit_but_not_too_long(
    monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
) -> None:
    """Where visits are shorter than in the run, what comes with each one counts for too much."""
    taken: list[int] = []

    def timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
        work()
        return seconds * min(CLIENTS, len(clients()))

    def counted(visit: Visit, state: Any, data: Any) -> None:
        taken.append(visit.instruction.local_steps)

    monkeypatch.setattr("fedaccord.engine.vectorize._seconds", timed)
    monkeypatch.setattr("fedaccord.engine.vectorize.local_round", counted)
    monkeypatch.setattr("fedaccord.engine.vectorize.SLOW", 1.0)
    method = FedAvg(precision="float64", local_steps=12, fraction_train=1.0)
    choose("auto", task_of(module()), method)
    few = len(taken) // 2
    assert taken == [1] * few + [steps] * few
    taken.clear()
    method = FedAvg(precision="float64", local_steps=2, fraction_train=1.0)
    choose("auto", task_of(module()), method)
    assert max(taken) == min(steps, 2)


def test_the_choice_is_written_down_and_kept_by_a_run_that_goes_on(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.make(settings | {"name": "chosen", "vectorize": "auto"})
    with engine.quiet():
        path = engine.run(config).path
    written = tomllib.loads((path / "config.toml").read_text())["run"]
    assert written["vectorize"] in ("on", "off")
    more = config.flat | {"resume": True, "num-server-rounds": 7}
    monkeypatch.setattr("fedaccord.engine.vectorize._seconds", lambda *_: 1 / 0)  # no trial
    with engine.quiet():
        engine.run(RunConfig.make(more))
    again = tomllib.loads((path / "config.toml").read_text())["run"]
    assert again["vectorize"] == written["vectorize"]


def test_a_cohort_of_a_real_run(settings: dict[str, Any]) -> None:
    """Of a data set with its preparation, as `fedaccord run` deals it."""
    config = RunConfig.make(settings)
    task = load_task(config.task, num_clients=config.num_clients)
    assert LocalFleet(task).vectorize is False
    found = {}
    for how in ("on", "off"):
        keys = {k: v for k, v in settings.items() if k not in ("num-server-rounds", "out-dir")}
        history = simulate("feddyn", rounds=3, record="weights", **(keys | {"vectorize": how}))
        assert history.weights is not None
        found[how] = history.weights
    torch.testing.assert_close(found["on"], found["off"], rtol=1e-4, atol=1e-6)
    assert not torch.equal(found["on"][0], found["on"][-1])
