"""In a round a GPU is waited for once, however many clients and steps it has."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from fedaccord import recorded_run, simulate
from fedaccord.config import RunConfig
from fedaccord.core.vectors import leaves, map_vectors
from fedaccord.data.kind import Dataset
from fedaccord.data.transforms import augment, normalise
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.run import Run
from fedaccord.storage.in_process import FileStore
from fedaccord.strategies import METHODS
from fedaccord.task import Clients, Task, models
from tests.fake_gpu import GPU, FakeGPU, fake_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    with fake_gpu(monkeypatch) as mode:
        yield mode


def task(clients: int, augmented: bool) -> Task:
    g = torch.Generator().manual_seed(0)
    sizes = [12 - i % 3 for i in range(clients)]
    x = torch.randint(256, (sum(sizes), 3, 8, 8), generator=g, dtype=torch.uint8)
    y = torch.randint(3, (len(x),), generator=g)
    data = Dataset("random", x[:0], y[:0], x[:0], y[:0], 3, (0.5,) * 3, (0.2,) * 3)
    return Task(
        lambda: models.build("mlp", (3, 8, 8), 3),
        Clients([*x.split(sizes)], [*y.split(sizes)]),
        (x[:9], y[:9]),
        device=GPU,
        prepare=lambda x, dtype: normalise(x, data, dtype),
        augment=augment if augmented else None,
    )


def waits(
    gpu: FakeGPU,
    clients: int,
    steps: int,
    algo: str,
    augmented: bool = False,
    store: Any = None,
    **more: Any,
) -> list[str]:
    """What waited in a second round."""
    config = RunConfig.make(
        {"algo": algo, "num-clients": clients, "local-steps": steps, "batch-size": 4}
        | {"fraction-train": 1.0, **more}
    )
    own, strategy = task(clients, augmented), config.strategy
    own.model(strategy.model_settings).in_stacks = True  # the fake's numbers compare to nothing
    fleet = LocalFleet(own, vectorize=config.vectorize == "on", store=store, home=GPU)
    run = Run(strategy, fleet, recorded_run.initial_arrays(own, strategy.model_settings, GPU), 4)
    run.begin()
    for _ in range(2):
        gpu.waits.clear()
        metrics = run.train_round().metrics
        assert metrics["dropped"] == 0
    places = [*gpu.waits]
    for i in fleet.store.clients():  # copies that were not waited for have arrived
        state = fleet.store.unpack(fleet.store.load(i).latest.state)
        assert all(v.is_cpu and v.isfinite().all() for _, v in leaves(state))
    return places


COHORTS = [("off", True), ("on", True), ("on", False)]


@pytest.mark.parametrize(("vectorize", "augmented"), COHORTS)
def test_a_round_waits_once(gpu: FakeGPU, vectorize: str, augmented: bool) -> None:
    places = waits(gpu, 3, 2, "fedavg", augmented, vectorize=vectorize)
    assert len(places) == 1, places


@pytest.mark.parametrize("algo", METHODS)
def test_a_round_of_every_method_waits_once(gpu: FakeGPU, algo: str) -> None:
    places = waits(gpu, 2, 1, algo)
    assert len(places) == 1, places


@pytest.mark.parametrize("bound", ["max-client-norm", "max-update-norm"])
@pytest.mark.parametrize("algo", ["fedavg", "scaffold", "dfedavg"])
def test_a_round_with_bounds_waits_once(gpu: FakeGPU, algo: str, bound: str) -> None:
    places = waits(gpu, 2, 1, algo, **{bound: 1e9})
    assert len(places) == 1, places


def test_an_evaluation_waits_once(gpu: FakeGPU) -> None:
    own = task(2, augmented=True)
    own.evaluate(own.model().w)  # which sends the samples and makes the model
    gpu.waits.clear()
    # the fake's numbers are ones: sums of losses, of counted targets and of hits
    assert own.evaluate(own.model().w) == {"test-loss": 1, "test-accuracy": 1}
    assert len(gpu.waits) == 1


@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_states_are_written_to_disk_when_they_are_there(gpu: FakeGPU, vectorize: str) -> None:
    """After one wait for all of them; `waits` looks at their values."""
    places = waits(gpu, 3, 1, "scaffold", store=FileStore(), vectorize=vectorize)
    assert len(places) == 2, places


def test_states_that_take_too_much_memory_are_written_in_parts(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaccord.engine.fleet.PENDING_BYTES", 2 * 4 * 79403 * 2)  # of 2 clients
    places = waits(gpu, 5, 2, "scaffold", store=FileStore())
    assert len(places) == 3, places


# --- a reply that turns out to be bad -------------------------------------------------------------


@pytest.mark.parametrize("algo", ["scaffold", "dfedavg"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e31])
def test_what_is_read_late_is_dropped_as_if_it_had_never_come(
    monkeypatch: pytest.MonkeyPatch, algo: str, bad: float
) -> None:
    """1e31: of the loss, else of a vector. Losses are tensors, as those on a GPU."""
    usual, weights, tables, model = LocalFleet.train, [], [], nn.Linear(2, 2)
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 2, generator=g), torch.arange(4) % 2) for _ in range(4)]

    def spoilt(reply: Any, is_late: bool) -> Any:
        reply = reply._replace(loss=torch.tensor(reply.loss)) if is_late else reply
        if bad == 1e31:
            return reply._replace(loss=reply.loss * 0 + bad)
        return reply._replace(up=map_vectors(lambda v: v + bad, reply.up))

    for is_late in (False, True):

        def train(fleet: Any, requests: Any, timeout: float, is_late: bool = is_late) -> Any:
            replies = dict(usual(fleet, requests, timeout))
            for i, reply in replies.items():
                if requests[0].instruction.round == 1 and i == 2:
                    replies[i] = spoilt(reply, is_late)
                elif is_late:
                    replies[i] = reply._replace(loss=torch.tensor(reply.loss))
            return replies.items()

        monkeypatch.setattr(LocalFleet, "train", train)
        history = simulate(
            algo, clients=data, model=model, rounds=3, batch_size=2, record="weights",
            participation=1.0,
        )  # fmt: skip
        assert history.metrics["dropped"].tolist()[1:] == [0, 1, 0]
        weights.append(history.weights)
        tables.append(history.metrics.drop(columns="seconds"))
    assert torch.equal(*weights)
    pd.testing.assert_frame_equal(*tables, rtol=1e-6)


# --- on a GPU that is there -----------------------------------------------------------------------

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu_only
@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_a_round_on_a_gpu_waits_for_it_once(vectorize: str) -> None:
    """By PyTorch's own warnings."""
    config = RunConfig.make(
        {"algo": "scaffold", "num-clients": 4, "local-steps": 3, "batch-size": 4}
        | {"fraction-train": 1.0}
    )
    own, strategy = task(4, augmented=True), config.strategy
    fleet = LocalFleet(own, vectorize=vectorize == "on", home=GPU)
    run = Run(strategy, fleet, recorded_run.initial_arrays(own, strategy.model_settings, GPU), 4)
    run.begin()
    for _ in range(3):
        run.train_round()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            run.train_round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(warning.message) for warning in records) == 1


@gpu_only
@pytest.mark.parametrize("client_state", ["memory", "disk"])
@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_a_run_on_a_gpu_is_that_of_the_cpu(vectorize: str, client_state: str) -> None:
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(n, 5, generator=g).double(), torch.arange(n) % 3) for n in (9, 8, 5, 4)]
    model, weights = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), []
    for device in ("cuda", "cpu"):
        history = simulate(
            "afedpd", clients=data, model=model, rounds=6, batch_size=4, record="weights",
            participation=0.5, dtype=torch.float64, device=device, vectorize=vectorize,
            client_state=client_state,
        )  # fmt: skip
        weights.append(history.weights)
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-9)


@gpu_only
def test_dropout_on_a_gpu_draws_the_same_in_every_run() -> None:
    model, weights = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3)), []
    data = [(torch.ones(8, 5), torch.arange(8) % 3)] * 2
    for seed in (0, 0, 1):
        history = simulate(
            "fedavg", clients=data, model=model, rounds=2, batch_size=4, record="weights",
            participation=1.0, device="cuda", seed=seed,
        )  # fmt: skip
        weights.append(history.weights)
    first, second, other = weights
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
