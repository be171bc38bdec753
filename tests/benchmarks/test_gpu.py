"""The path of benchmarks/gpu.py, on a CPU."""

from types import SimpleNamespace
from typing import Any

import gpu
import pytest
import torch

from fedaccord import simulate
from fedaccord.strategies import METHODS

OPTIONS: Any = SimpleNamespace(device="cpu", quick=True, repetitions=1, clock="wall", threads=1)


def test_bare_steps_and_rounds_of_a_model_are_measured() -> None:
    bare, whole = gpu.compared("mlp", "bfloat16", gpu.TINY, OPTIONS)
    assert 0 < bare < 10
    assert 0 < whole < 10
    assert 0 < gpu.rounds_of("mlp", "float32", gpu.TINY, OPTIONS, together=True) < 10
    assert gpu.evaluation("mlp", "float32", gpu.TINY, OPTIONS) > 0


UNUSUAL = [name for name, m in METHODS.items() if m.replaces or m.all_clients or name == "dpsgd"]


def test_methods_with_steps_or_cohorts_of_their_own_are_compared_and_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "METHODS", ["fedavg", *UNUSUAL])
    monkeypatch.setattr(gpu, "simulate", lambda *a, **more: simulate(*a, **more | {"rounds": 1}))
    assert "scaffnew" in UNUSUAL
    assert f"{1 + len(UNUSUAL)} methods" in gpu.checked(OPTIONS)
    for name in UNUSUAL:
        size = gpu.TINY._replace(clients=gpu.TINY.active)
        assert gpu.rounds_of("linear", "float32", size, OPTIONS, name, together=True) > 0


def test_every_client_has_whole_batches() -> None:
    for size in (gpu.USUAL, gpu.PFL, gpu.FLUTE, gpu.TINY):
        assert size.samples % size.batch == 0
        assert size.active <= size.clients
    assert gpu.PFL.steps == gpu.PFL.samples // gpu.PFL.batch  # one epoch
    assert gpu.FLUTE.steps == gpu.FLUTE.samples // gpu.FLUTE.batch


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="expected a GPU, found none"):
        gpu.main()
