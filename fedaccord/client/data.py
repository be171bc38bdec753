"""A configured task's data for one request."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fedaccord.client.train import Data
from fedaccord.core.request import TrainInstruction
from fedaccord.task import Samples, Task, TrainBatches
from fedaccord.task.batches import Batch, PreparedFormat
from fedaccord.task.sources import Source


def training_data(task: Task, instruction: TrainInstruction) -> Data:
    """The client's batches of the round."""
    model = task.model(instruction.model_settings)
    batches = task.train_batches(
        instruction.client,
        round=instruction.round,
        batch_size=instruction.batch_size,
        seed=instruction.seed,
        dtype=model.w.dtype,
    )
    examples = task.num_examples(instruction.client)
    form = task.format
    if isinstance(batches, TrainBatches):
        form = PreparedFormat(form.forward)
    return Data(model, batches, task.loss, examples, format=form)


def test_data(task: Task, instruction: TrainInstruction) -> Data:
    """The client's part of the test samples."""
    model = task.model(instruction.model_settings)
    samples = task.client_test(instruction.client)
    batches: Iterable[Batch] = ()
    if samples and not (isinstance(samples, tuple) and not len(samples[1])):
        batches = TestBatches(task, samples, model.w.dtype)
    return Data(model, batches, task.loss, metrics=task.metrics, format=task.format)


@dataclass(frozen=True)
class TestBatches:
    """Samples in order, prepared anew in each pass."""

    task: Task
    samples: Samples | Source
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Batch]:
        return self.task.batches(self.samples, self.dtype)
