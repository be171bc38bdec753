"""Batches cut for many clients at once are those of each, sample by sample."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaccord.task import Clients, Task, TaskConfig, load_task
from fedaccord.task.cohort_solver import Stack
from fedaccord.task.solver import Passes

SIZES = (40, 23, 21, 5)
ORDER = (2, 0, 3, 1)  # the client's number in a task; not the order in which it comes


def task(*, parts: bool = False, **more: Any) -> Task:
    """Client i holds the numbers 100 i, 100 i + 1, ...; a target says the same as its input."""
    xs, ys = [None] * 4, [None] * 4
    for i, n in zip(ORDER, SIZES, strict=True):
        xs[i] = 100.0 * i + torch.arange(n)[:, None]
        ys[i] = xs[i][:, 0].long()
    clients = Clients(xs, ys)
    if parts:
        rows = torch.arange(sum(SIZES)).flip(0).split([len(y) for y in ys])
        clients = Clients(torch.cat(xs), torch.cat(ys), [part.numpy() for part in rows])
    return Task(lambda: nn.Linear(1, 2), clients, **more)


def same(task: Task, clients: Any, batch_size: int, epochs: int, steps: int) -> list[Stack]:
    """Compares a cohort with each client; the stacks."""
    settings = (3, batch_size, 7, torch.float64)
    stacks = list(task.cohort_batches(clients, *settings, epochs, steps))
    for row, client in enumerate(clients):
        batches = task.train_batches(client, *settings)
        alone = list(Passes(batches, torch.device("cpu"), torch.float64).steps(epochs, steps))
        mine = [stack for stack in stacks if row < len(stack.sizes)]
        for (x, y), stack in zip(alone, mine, strict=True):
            size = int(stack.sizes[row])
            assert torch.equal(stack.inputs[row, :size], x)
            assert torch.equal(stack.targets[row, :size], y)
            assert (stack.inputs.dtype, stack.targets.dtype) == (x.dtype, y.dtype)
    return stacks


def shake(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.rand(x.shape, generator=generator) / 2


@pytest.mark.parametrize(("epochs", "steps"), [(1, 0), (3, 0), (1, 1), (1, 4), (1, 11)])
@pytest.mark.parametrize("batch_size", [0, 1, 10, 23, 64])
@pytest.mark.parametrize(
    "kind", [{}, {"parts": True}, {"augment": shake}], ids=["plain", "parts", "augmented"]
)
def test_each_client_gets_its_own_batches(
    kind: Any, batch_size: int, epochs: int, steps: int
) -> None:
    stacks = same(task(**kind), ORDER, batch_size, epochs, steps)
    if steps:
        assert {len(stack.sizes) for stack in stacks} == {4}
    assert all(stack.inputs.shape[1] == max(stack.sizes) for stack in stacks)


def test_a_short_batch_is_filled_up_with_samples_of_its_client() -> None:
    for kind in ({}, {"augment": shake}):
        for batch_size in (0, 10):
            for stack in task(**kind).cohort_batches(ORDER, 0, batch_size, 0, torch.float32, 2):
                owners = stack.inputs[..., 0].long() // 100
                expected = torch.tensor(ORDER)[: len(owners), None].expand_as(owners)
                assert torch.equal(owners, expected)
                assert torch.equal(stack.targets // 100, expected)


def test_images_are_prepared_as_alone() -> None:
    digits = load_task(TaskConfig(), num_clients=10)
    stacks = same(digits, range(10), 16, 2, 0)
    assert stacks[0].inputs.shape == (10, 16, 1, 8, 8)
    assert stacks[-1].sizes.tolist() == [143 % 16] * 10


def test_clients_come_in_the_order_of_falling_numbers_of_steps() -> None:
    for kind in ({}, {"augment": shake}):
        with pytest.raises(ValueError, match="in the order of falling numbers of steps"):
            list(task(**kind).cohort_batches([1, 3], 0, 10, 0, torch.float32, 1))
        assert len(same(task(**kind), [1, 3], 10, 1, 4)) == 4  # as many steps of each


@pytest.mark.parametrize("batch_size", [0, 10])
def test_a_client_without_samples_is_refused(batch_size: int) -> None:
    clients = Clients([torch.ones(3, 1), torch.ones(0, 1)], [torch.ones(3), torch.ones(0)])
    empty = Task(lambda: nn.Linear(1, 2), clients)
    with pytest.raises(ValueError, match="expected at least one batch of training data, got none"):
        list(empty.cohort_batches([0, 1], 0, batch_size, 0, torch.float32, 1))
