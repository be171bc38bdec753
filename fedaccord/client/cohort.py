"""The local rounds of several clients in one call."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from fedaccord.client.train import CPU, DIVERGED, first_state, to_device
from fedaccord.core.rounds import client_round
from fedaccord.core.vectors import is_finite, leaves, map_vectors, norm, row, stack
from fedaccord.core.visit import Answer, Visit
from fedaccord.task import Task
from fedaccord.task.cohort_solver import CohortSolver


def local_rounds(
    visits: Sequence[Visit], states: Sequence[Any], task: Task, home: torch.device = CPU
) -> list[tuple[Answer, Any] | str]:
    """What `train.local_round` gives for each visit, or what is wrong, in one line.

    Visits come in the order of falling numbers of steps; their messages and states have the same
    fields (see `form`). Raises NotImplementedError where the model takes one client at a time only.
    """
    began = time.perf_counter()
    asked, model = visits[0].instruction, task.model(visits[0].instruction.precision)
    device = model.w.device
    clients = [visit.instruction.client for visit in visits]
    begun = [
        first_state(visit, device) if state is None else to_device(device, state)
        for visit, state in zip(visits, states, strict=True)
    ]
    batches = task.cohort_batches(
        *(clients, asked.round, asked.batch_size, asked.seed, model.w.dtype),
        *(asked.local_epochs, asked.local_steps),
    )
    done = client_round(
        asked.half,
        to_device(device, stack([visit.down for visit in visits])),
        stack(begun),
        asked.config._replace(client=tuple(clients)),
        CohortSolver(model, batches, task.loss, asked.precision),
    )
    up, state = to_device(home, done.up), to_device(CPU, done.state)
    steps, losses = done.result.steps.flatten().tolist(), done.result.loss.tolist()
    each = (time.perf_counter() - began) / sum(steps)  # of a step: a client's share of the call
    finite = norm(done.result.w_K).isfinite().flatten().tolist()  # a norm may overflow
    answers: list[tuple[Answer, Any] | str] = []
    for j, client in enumerate(clients):
        if not (finite[j] or is_finite(done.result.w_K[j])):
            answers.append(DIVERGED.format(int(steps[j]), asked.lr))
            continue
        answer = Answer(
            *(row(up, j), task.num_examples(client), int(steps[j]), losses[j]),
            seconds=each * steps[j],
        )
        # a state stays when the others' go
        answers.append((answer, map_vectors(torch.clone, row(state, j))))
    return answers


def form(visit: Visit, state: Any) -> tuple[Any, ...]:
    """Equal for visits that can be stacked: the fields of their messages and states."""
    kept = None if state is None else tuple(name for name, _ in leaves(state))
    return tuple(name for name, _ in leaves(visit.down)), kept
