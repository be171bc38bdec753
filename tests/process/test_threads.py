"""How many threads suit a run, who sets them, who puts them back, and how they wait."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedaccord import engine, server_app, simulate
from fedaccord.client_app import configured_task
from fedaccord.config import RunConfig
from fedaccord.process import threads
from fedaccord.task import models
from tests.grid import InProcessGrid

POLICY = "OMP_WAIT_POLICY"
NO_DATA = {"dataset": "npz", "data-dir": "/no/such.npz"}  # would be the error where it is loaded


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert 1 <= threads.cores() <= (os.cpu_count() or 1)
    before = torch.get_num_threads()
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def lenet() -> tuple[nn.Module, torch.Tensor]:
    return models.build("lenet", (3, 32, 32), 10), torch.zeros(1, 3, 32, 32)


def test_multiplications_are_counted_by_hand() -> None:
    assert threads.multiplications(models.build("mlp", (1, 8, 8), 10), torch.zeros(1, 1, 8, 8)) == (
        64 * 200 + 200 * 200 + 200 * 10
    )
    convolutions = 3 * 5 * 5 * 64 * 28 * 28 + 64 * 5 * 5 * 64 * 10 * 10
    assert threads.multiplications(*lenet()) == convolutions + 1600 * 384 + 384 * 192 + 192 * 10
    in_groups = nn.Conv1d(4, 6, kernel_size=3, groups=2)
    assert threads.multiplications(in_groups, torch.zeros(1, 4, 10)) == 6 * (4 // 2) * 3 * 8
    layers = nn.Sequential(nn.PReLU(7), nn.LayerNorm(7))  # of another kind: their parameters
    assert threads.multiplications(layers, torch.zeros(1, 7)) == 7 + 2 * 7


def test_counting_leaves_no_trace() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    before = torch.get_rng_state()
    threads.multiplications(module, torch.ones(1, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(m._forward_hooks for m in module.modules())
    assert module[0].weight.grad is None


def test_a_batch_gets_as_many_threads_as_it_keeps_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    small = threads.choose(0, models.build("mlp", (1, 8, 8), 10), torch.zeros(1, 1, 8, 8), 50)
    # 50 x 54,800
    assert str(small) == "1 thread: the model is small (2,740,000 multiplications a batch)"
    module, sample = lenet()  # 14,693,248 multiplications
    assert str(threads.choose(0, module, sample, 50)) == "8 threads: all that this process may use"
    some = threads.choose(0, module, sample, 10)
    assert str(some) == "2 threads: 147 million multiplications a batch"
    assert threads.choose(0, module, sample, 1).number == 1
    assert torch.get_num_threads() == 8
    torch.set_num_threads(3)  # as by OMP_NUM_THREADS, or by a user
    assert threads.choose(0, module, sample, 50).number == 3
    monkeypatch.setattr(threads, "cores", lambda: 2)  # as by a container's quota
    assert threads.choose(0, module, sample, 50).number == 2


def test_what_is_set_is_taken_and_more_than_the_machine_has_is_refused() -> None:
    assert str(threads.choose(5, *lenet(), 50)) == "5 threads: as set"
    threads.check(8)
    with pytest.raises(ValueError, match=r"^threads: expected at most 8, .*, got 9; 0 uses"):
        threads.check(9)
    with pytest.raises(ValueError, match=r"^threads: expected at most 8"):
        simulate("fedavg", rounds=1, threads=9)
    work: Any = None
    assert str(threads.of_task(0, work, work, workers=3)) == "1 thread: for each of 3 workers"


def test_threads_are_put_back_also_after_an_error() -> None:
    before = torch.get_num_threads()
    with suppress(KeyError), threads.Threads(before + 2, "").in_use():
        assert torch.get_num_threads() == before + 2
        raise KeyError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("keys", "number"), [({}, 1), ({"threads": 3}, 3)])
def test_runs_compute_with_them_and_put_back_what_they_found(
    keys: dict[str, Any], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`simulate`, a run in process, and Flower's server."""
    torch.set_num_threads(2)
    counts: list[int] = []

    def note(*_: Any, **__: Any) -> None:
        counts.append(torch.get_num_threads())

    def loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        note()
        return (predictions - targets).square().mean()

    clients = [(torch.ones(4, 2), torch.ones(4, 1))] * 2
    simulate("fedavg", clients=clients, model=nn.Linear(2, 1), loss=loss, rounds=1, **keys)
    counts = counts[-1:]  # in training; the model is tried before
    settings = {"model": "linear", "num-server-rounds": 1, "out-dir": str(tmp_path), **keys}
    engine.run(RunConfig.make(settings), on_client=note)
    monkeypatch.setattr(server_app, "run", note)
    server_app.app(InProcessGrid(ClientApp(), 2), context({"model": "linear", **keys}))
    assert {*counts} == {number}
    assert len(counts) > 2
    assert torch.get_num_threads() == 2


def context(run: dict[str, Any], **node: Any) -> Context:
    config = {"partition-id": 0, "num-partitions": 2, **node}
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config=run)


def test_a_node_sets_its_own() -> None:
    configured_task(context({"model": "linear"}))
    assert torch.get_num_threads() == 1
    configured_task(context({"model": "linear", "threads": 2}, threads=5))
    assert torch.get_num_threads() == 5
    with pytest.raises(ValueError, match=r"^threads: expected at most 8"):
        configured_task(context(NO_DATA, threads=9, **{"allow-server-data": True}))


def test_the_server_refuses_before_it_loads_or_writes(tmp_path: Path) -> None:
    own = context({**NO_DATA, "out-dir": str(tmp_path), "threads": 9})
    with pytest.raises(ValueError, match=r"^threads: "):
        server_app.app(InProcessGrid(ClientApp(), 2), own)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("before", "loaded", "after"),
    [
        ({}, False, {POLICY: "PASSIVE"}),
        ({}, True, {}),  # too late: it would only reach other programs
        ({POLICY: "ACTIVE"}, False, {POLICY: "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "100"}, False, {"GOMP_SPINCOUNT": "100"}),
        ({"KMP_BLOCKTIME": "1"}, False, {"KMP_BLOCKTIME": "1"}),
    ],
)
def test_waiting_is_passive_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], loaded: bool, after: dict[str, str]
) -> None:
    environment = dict(before)
    monkeypatch.setattr(threads, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(threads, "sys", SimpleNamespace(modules={"torch": None} if loaded else {}))
    threads.wait_passively()
    assert environment == after


@pytest.mark.parametrize(
    ("code", "policy"),
    [
        ("from typer.testing import CliRunner as R; from fedaccord.cli import app; R().invoke(app)",
         "PASSIVE"),
        ("from fedaccord.apps import client_app, server_app", "PASSIVE"),
        # in a notebook, and in another Flower app
        ("from fedaccord import evaluate_locally, simulate, train_locally", "None"),
    ],
    ids=["command", "apps", "library"],
)  # fmt: skip
def test_the_environment_is_set_in_our_own_processes_alone(code: str, policy: str) -> None:
    """Set at all: before PyTorch was loaded."""
    own = {name: value for name, value in os.environ.items() if name not in threads.POLICIES}
    code += f"; import os; print(os.environ.get({POLICY!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True
    )
    assert result.stdout.split()[-1] == policy


def test_as_many_processes_as_cores_or_one_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (threads.processes(0), threads.processes(3)) == (5, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (threads.processes(0), threads.processes(3)) == (1, 3)
