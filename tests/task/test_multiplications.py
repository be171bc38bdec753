"""The multiplications of a forward pass, and the threads of a run that follow from them."""

from typing import Any

import torch
from torch import nn

from fedaccord.core.request import ModelSettings
from fedaccord.task import models
from fedaccord.task.flat_model import flat_model
from fedaccord.task.multiplications import multiplications, threads_of_task


def count(module: nn.Module, inputs: Any) -> int:
    return multiplications(flat_model(module, ModelSettings("float32"), "cpu"), inputs)


def test_multiplications_are_counted_by_hand() -> None:
    assert count(models.build("mlp", (1, 8, 8), 10), torch.zeros(1, 1, 8, 8)) == (
        64 * 200 + 200 * 200 + 200 * 10
    )
    lenet = models.build("lenet", (3, 32, 32), 10)
    convolutions = 3 * 5 * 5 * 64 * 28 * 28 + 64 * 5 * 5 * 64 * 10 * 10
    work = count(lenet, torch.zeros(1, 3, 32, 32))
    assert work == convolutions + 1600 * 384 + 384 * 192 + 192 * 10
    in_groups = nn.Conv1d(4, 6, kernel_size=3, groups=2)
    assert count(in_groups, torch.zeros(1, 4, 10)) == 6 * (4 // 2) * 3 * 8
    layers = nn.Sequential(nn.PReLU(7), nn.LayerNorm(7))  # of another kind: their parameters
    assert count(layers, torch.zeros(1, 7)) == 7 + 2 * 7


def test_counting_leaves_no_trace() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    before = torch.get_rng_state()
    count(module, torch.ones(1, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(m._forward_hooks for m in module.modules())
    assert not module[0].weight.grad.any()  # of the flat model


def test_workers_have_one_thread_each() -> None:
    work: Any = None
    assert str(threads_of_task(0, work, work, workers=3)) == "1 thread: for each of 3 workers"
