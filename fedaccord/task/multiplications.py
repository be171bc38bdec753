"""The multiplications of a model's forward pass, from which the threads of a run follow."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedaccord.core.request import ModelSettings
from fedaccord.process.threads import Threads, choose
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.generators import random_numbers
from fedaccord.task.task import Task


class Training(Protocol):
    """The settings of a strategy on which the work of a batch depends."""

    @property
    def model_settings(self) -> ModelSettings:
        """The settings of the model."""

    @property
    def batch_size(self) -> int:
        """Samples; 0: the whole client."""


def threads_of_task(wanted: int, task: Task, training: Training, workers: int = 0) -> Threads:
    """The threads of a run of ``training`` on ``task``; see `choose`."""
    return choose(wanted, lambda: batch_multiplications(task, training), workers)


def batch_multiplications(task: Task, training: Training) -> int:
    """Multiplications of the forward pass of a batch: of a mean client's samples if a batch is the
    whole client. A function's first batch counts as one sample."""
    whole = task.clients.total // len(task.clients)
    model = task.model(training.model_settings)
    number = 1 if task.function_of(0) else training.batch_size or whole
    return number * multiplications(model, task.example(1, model.w.dtype)[0])


def multiplications(model: FlatModel, inputs: Any) -> int:
    """Multiplications in linear layers and convolutions; one per parameter of other layers.

    inputs: of one or more samples, (n, ...), for the module.
    """
    module, own, device = model.module, model.forward, model.w.device
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    others = [layer for layer in module.modules() if not isinstance(layer, kinds)]
    work = sum(p.numel() for layer in others for p in layer.parameters(recurse=False))

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        nonlocal work
        assert isinstance(layer.weight, torch.Tensor)
        work += layer.weight.numel() * output.numel() // len(layer.weight)

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad(), Threads(1, "").in_use(), random_numbers(0, device):
            module.eval()  # solvers switch to training mode
            own(module, inputs) if own else module(inputs)
    except (RuntimeError, ValueError):  # a norm over a batch of one: keep the count so far
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return work
