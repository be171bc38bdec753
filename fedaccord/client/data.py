"""A configured task's data for one request."""

from fedaccord.client.train import Data
from fedaccord.core.request import TrainInstruction
from fedaccord.task import Task


def training_data(task: Task, asked: TrainInstruction) -> Data:
    """The client's batches of the round."""
    model = task.model(asked.model_settings)
    batches = task.train_batches(
        asked.client, asked.round, asked.batch_size, asked.seed, model.w.dtype
    )
    return Data(model, batches, task.loss, task.num_examples(asked.client))


def test_data(task: Task, asked: TrainInstruction) -> Data:
    """The client's share of the test samples."""
    model = task.model(asked.model_settings)
    samples = task.client_test(asked.client)
    batches = task.batches(samples, model.w.dtype) if samples else []
    return Data(model, batches, task.loss)
