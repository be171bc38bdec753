"""Whether clients train one at a time or many in one call: as set, or by a rule.

The rule depends only on sizes, never on a timing, the machine or its load: the choice changes the
last bits of a run, and the same settings must give the same weights everywhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedaccord.core.request import ModelSettings
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.task import Task
from fedaccord.task.cohort_solver import CohortSolver, Stack
from fedaccord.task.multiplications import batch_multiplications
from fedaccord.task.sources import SourceClients

# within these limits many clients in one call were never slower for any model and batch measured
# on a CPU, and up to 8 times faster: docs/results/cohort.md
MIN_CLIENTS = 5  # of a round: a call of two or three was up to 1.6 times as slow
MAX_MODEL_BYTES = 2**16  # of the parameters: many larger models exceed the caches
MAX_MULTIPLICATIONS = 1_000_000  # of a batch's forward pass; above it arithmetic dominates


class VectorizeChoice(NamedTuple):
    vectorize: bool
    why: str  # in one line

    @property
    def as_set(self) -> str:
        """The setting that gives this choice without the rule."""
        return "on" if self.vectorize else "off"

    def __str__(self) -> str:
        return self.why


def choose(setting: str, task: Task, strategy: FederatedStrategy, clients: int) -> VectorizeChoice:
    """on and off as set; auto: by the rule, with ``clients`` a round."""
    if setting != "auto":
        return VectorizeChoice(setting == "on", "as set")
    on_gpu = torch.device(task.device).type == "cuda"
    reason = (_against_on_gpu if on_gpu else _against)(task, strategy, clients)
    if reason:
        return VectorizeChoice(False, f"one client at a time: {reason}")
    why = "a GPU runs their kernels in parallel" if on_gpu else "the model is small"
    return VectorizeChoice(True, f"many clients in one call: {why}, a round has {clients}")


def _against(task: Task, strategy: FederatedStrategy, clients: int) -> str:
    """Why clients train one at a time; empty: many in one call."""
    if clients < MIN_CLIENTS:
        return f"a round has {clients}, a call pays off from {MIN_CLIENTS} on"
    size = task.model(strategy.model_settings).w.nbytes
    if size > MAX_MODEL_BYTES:
        return f"the model has {size:,} bytes, a call pays off up to {MAX_MODEL_BYTES:,}"
    work = batch_multiplications(task, strategy)
    if work > MAX_MULTIPLICATIONS:
        return (
            f"a batch has {work:,} multiplications, a call pays off up to {MAX_MULTIPLICATIONS:,}"
        )
    return _against_stack(task, strategy)


def _against_on_gpu(task: Task, strategy: FederatedStrategy, clients: int) -> str:
    """On a GPU a call of ten clients was never slower for a recorded model, small or large:
    docs/results/gpu.md."""
    return "a round has 1" if clients < 2 else _against_stack(task, strategy)


def _against_stack(task: Task, strategy: FederatedStrategy) -> str:
    if accepts_stack(task, strategy.model_settings):
        return ""
    return "the model does not accept a stack of clients"


def accepts_stack(task: Task, settings: ModelSettings) -> bool:
    """Whether clients can share a call of the model and the loss: tried with a sample of the first
    client as the samples of two."""
    model = task.model(settings)
    inputs, targets = task.example(1, model.w.dtype)
    if not isinstance(inputs, Tensor) or model.forward is not None:
        return False
    if isinstance(task.clients, SourceClients) and not task.clients.in_rows:
        return False
    both = [part.expand(2, *part.shape).contiguous() for part in (inputs, targets)]
    points = model.w.expand(2, -1).clone()
    model.train()  # with dropout, which no stack accepts
    try:
        solver = CohortSolver(model, (), task.loss, settings.precision)
        solver.gradient(Stack(both[0], both[1], targets.new_ones(2)), points.clone(), points)
    except NotImplementedError:
        return False
    return True
