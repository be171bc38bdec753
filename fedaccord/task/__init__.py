"""The learning task: clients' samples, a model, a loss; without Flower and methods."""

from fedaccord.task.clients import Clients, Samples
from fedaccord.task.config import TaskConfig
from fedaccord.task.load import forget_tasks, load_task, task_of_card
from fedaccord.task.task import Task, TrainBatches, find_device

__all__ = [
    "Clients",
    "Samples",
    "Task",
    "TaskConfig",
    "TrainBatches",
    "find_device",
    "forget_tasks",
    "load_task",
    "task_of_card",
]
