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

from fedaccord import engine, recorded_run, server_app, simulate
from fedaccord.client_app import configured_task
from fedaccord.config import RunConfig
from fedaccord.process import threads
from tests.grid import InProcessGrid
from tests.loading import ENDS_AT_PYTORCH

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


def not_called() -> int:
    raise AssertionError


def test_a_batch_gets_as_many_threads_as_it_keeps_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    small = threads.choose(0, lambda: 50 * 54_800)
    assert str(small) == "1 thread: the model is small (2,740,000 multiplications a batch)"
    lenet = 14_693_248
    assert str(threads.choose(0, lambda: 50 * lenet)) == "8 threads: all that this process may use"
    some = threads.choose(0, lambda: 10 * lenet)
    assert str(some) == "2 threads: 147 million multiplications a batch"
    assert threads.choose(0, lambda: lenet).number == 1
    assert torch.get_num_threads() == 8
    torch.set_num_threads(3)  # as by OMP_NUM_THREADS, or by a user
    assert threads.choose(0, lambda: 50 * lenet).number == 3
    monkeypatch.setattr(threads, "cores", lambda: 2)  # as by a container's quota
    assert threads.choose(0, lambda: 50 * lenet).number == 2


def test_what_is_set_is_taken_and_more_than_the_machine_has_is_refused() -> None:
    assert str(threads.choose(5, not_called)) == "5 threads: as set"
    threads.check(8)
    with pytest.raises(ValueError, match=r"^threads: expected at most 8, .*, got 9; 0 uses"):
        threads.check(9)
    with pytest.raises(ValueError, match=r"^threads: expected at most 8"):
        simulate("fedavg", rounds=1, threads=9)


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
    monkeypatch.setattr(recorded_run, "run", note)
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
        ("sys.argv[1:] = 'run', 'lr=0.1'; from fedaccord.cli import app; app()", "PASSIVE"),
        ("from fedaccord.apps import client_app, server_app", "PASSIVE"),
        # in a notebook, and in another Flower app
        ("from fedaccord import evaluate_locally, simulate, train_locally", "None"),
    ],
    ids=["command", "apps", "library"],
)  # fmt: skip
def test_the_environment_is_set_in_our_own_processes_alone(code: str, policy: str) -> None:
    """If at all, before PyTorch is loaded."""
    own = {name: value for name, value in os.environ.items() if name not in threads.POLICIES}
    until = ENDS_AT_PYTORCH.format(f"os.environ.get({POLICY!r})")
    command = [sys.executable, "-c", until + code]
    result = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [policy]


def test_as_many_processes_as_cores_or_one_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (threads.processes(0), threads.processes(3)) == (5, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (threads.processes(0), threads.processes(3)) == (1, 3)
