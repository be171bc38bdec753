"""The local rounds of several clients in one call."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from fedaccord.client.train import CPU, DIVERGED, begun_state
from fedaccord.core.client_half import WithLocal, state_like
from fedaccord.core.request import TrainReply, TrainRequest
from fedaccord.core.rounds import client_round
from fedaccord.core.vectors import (
    Vector,
    all_to_device,
    each,
    fetch,
    is_finite,
    leaves,
    map_vectors,
    norm,
    row,
    stack,
)
from fedaccord.task import Task
from fedaccord.task.cohort_solver import CohortSolver


def local_rounds(
    requests: Sequence[TrainRequest], states: Sequence[Any], task: Task, home: torch.device = CPU
) -> list[tuple[TrainReply, Any] | str]:
    """The result of `train.local_round` for each request, or its error in one line.

    Requests are sorted by falling numbers of steps; their messages and states have the same fields
    (see `form`). Raises NotImplementedError if the model supports only one client at a time.
    """
    began = time.perf_counter()
    instruction, model = requests[0].instruction, task.model(requests[0].instruction.model_settings)
    device = model.w.device
    clients = [request.instruction.client for request in requests]
    begun = [
        begun_state(request, model, state) for request, state in zip(requests, states, strict=True)
    ]
    if instruction.half.keeps_local:  # no parts of these models stay at the clients
        begun = [state.base for state in begun]
    batches = task.cohort_batches(
        clients,
        round=instruction.round,
        batch_size=instruction.batch_size,
        seed=instruction.seed,
        dtype=model.w.dtype,
        epochs=instruction.local_epochs,
        steps=instruction.local_steps,
    )
    steps = [instruction.steps(task.num_examples(client)) for client in clients]
    solve = CohortSolver(model, batches, task.loss, instruction.precision)
    cohort_round = client_round(
        instruction.half,
        all_to_device(stack([request.down for request in requests]), device),
        stack(begun),
        instruction.config._replace(
            client=tuple(clients), steps=_together(steps), hidden=model.hidden
        ),
        solve,
    )
    up = all_to_device(cohort_round.up, home)
    # copies of the rows, which do not keep the other rows alive; from a GPU as in `to_device`
    states = [map_vectors(_to_host, row(cohort_round.state, j)) for j in range(len(clients))]
    if instruction.half.keeps_local:
        local = model.initial_local.to(CPU, copy=True)
        states = [WithLocal(state, local) for state in states]
    losses, w_K = each(cohort_round.result.loss), cohort_round.result.w_K
    trained = [
        TrainReply(row(up, j), task.num_examples(client), steps[j], losses[j])
        for j, client in enumerate(clients)
    ]
    if home.type == "cuda":  # reading the losses synchronises
        return [*zip(trained, states, strict=True)]
    numbers = fetch([*each(norm(w_K).flatten()), *losses])
    step = (time.perf_counter() - began) / sum(steps)  # seconds of the call divided by its steps
    replies: list[tuple[TrainReply, Any] | str] = []
    for j, reply in enumerate(trained):
        if is_finite(w_K[j], numbers[j]):
            reply = reply._replace(loss=numbers[len(trained) + j], seconds=step * steps[j])
            replies.append((reply, states[j]))
        else:
            replies.append(DIVERGED.format(steps[j], instruction.lr))
    return replies


def _together(steps: Sequence[int]) -> int | torch.Tensor:
    """K of all clients, or (n, 1) if they differ."""
    return steps[0] if len({*steps}) == 1 else torch.tensor(steps, dtype=torch.float64)[:, None]


def _to_host(v: Vector) -> Vector:
    return v.to("cpu", copy=True, non_blocking=v.is_cuda)


def form(request: TrainRequest, state: Any) -> tuple[Any, ...]:
    """Equal for requests that can be stacked: their round, the fields of messages and states."""
    instruction = request.instruction
    if state is None:
        state = state_like(instruction.half, ((1,),))
    names = (tuple(name for name, _ in leaves(part)) for part in (request.down, state))
    return instruction.round, *names
