"""A configured task's data for one client's visit."""

from fedaccord.client.train import Data
from fedaccord.core.request import TrainInstruction
from fedaccord.task import Task


def training_data(task: Task, asked: TrainInstruction) -> Data:
    """The client's batches of the round."""
    model = task.model(asked.precision)
    batches = task.train_batches(
        asked.client, asked.round, asked.batch_size, asked.seed, model.w.dtype
    )
    examples, graphs = task.num_examples(asked.client), task.graphs(asked.precision)
    return Data(model, batches, task.loss, examples, graphs)


def test_data(task: Task, asked: TrainInstruction) -> Data:
    """The client's share of the test samples."""
    model = task.model(asked.precision)
    samples = task.client_test(asked.client)
    batches = task.batches(samples, model.w.dtype) if samples else []
    return Data(model, batches, task.loss)
