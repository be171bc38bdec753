"""Whether the model runs in bfloat16 or float32: measured on a trial, where it is left open."""

import time
from itertools import islice
from typing import NamedTuple

from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.task import Task
from fedaccord.task.solver import SequentialSolver

STEPS, TRIALS = 3, 3  # of a trial; how many, of which the best counts
GAIN = 1.1  # what bfloat16 must gain: it costs accuracy in the last bits


class Choice(NamedTuple):
    precision: str
    why: str  # in one line

    def __str__(self) -> str:
        return self.why


def choose(task: Task, strategy: FederatedStrategy) -> Choice:
    """The faster of both on batches of the largest client; gradients only, no step is taken."""
    [client] = task.clients.largest(1)
    model = task.model("float32")
    batches = task.train_batches(client, 0, strategy.batch_size, strategy.seed, model.w.dtype)
    few = [*islice(batches, STEPS)]
    clock = time.process_time if model.w.is_cpu else time.perf_counter

    def seconds(precision: str) -> float:
        began = clock()
        for gradient_at in SequentialSolver(model, few, task.loss, precision).gradients():
            float(gradient_at(model.w))  # which waits for a GPU
        return clock() - began

    model.module.train()
    try:
        both = [(seconds("float32"), seconds("bfloat16")) for _ in range(1 + TRIALS)][1:]
    except Exception:  # told in the first round, of the client that it concerns
        return Choice("float32", "float32: a trial of bfloat16 failed")
    exact, rounded = map(min, zip(*both, strict=True))
    if exact > GAIN * rounded:
        return Choice("bfloat16", f"bfloat16: {exact / rounded:.1f} times faster in a trial")
    return Choice(
        "float32", f"float32: bfloat16 takes {rounded / exact:.2f} of its time in a trial"
    )
