"""The local steps of one client: a module, its batches, and a gradient for each step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedaccord.core.client_half import ClientHalf, GradientHook
from fedaccord.core.optimizer import Optimizer, Schedule
from fedaccord.core.plugin import PlugIn
from fedaccord.core.rounds import Solution, descend
from fedaccord.core.rule import Direction, GradientAt, LocalConfig
from fedaccord.core.vectors import Vector, clip_
from fedaccord.data.seeding import ALONE
from fedaccord.task.batches import PAIRS, Batch, BatchFormat, numel
from fedaccord.task.cuda_graphs import Loss as Loss
from fedaccord.task.cuda_graphs import graphs_of
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.generators import (
    Generator,
    generators,
    random_numbers,
    seed_of,
    states_of,
)
from fedaccord.task.layers import Layers, layers_of

Pair = tuple[Any, Tensor]  # inputs, targets
AHEAD = 2**18  # values of the inputs that are cut ahead of the steps, within the caches


class SequentialSolver:
    """One client at a time: a gradient step of ``model`` per batch.

    Random numbers of the module (dropout) and of the loss depend only on seed, round and client.
    All passes of a step start with the same random numbers and running statistics, so a step has
    the effect of its last pass, for any number of passes. ``own_code``: making a batch may draw
    NumPy's or Python's random numbers, which then depend only on seed, round and client.
    ``precision="bfloat16"`` runs the forward pass under autocast, "tf32" lets a GPU round the
    factors of float32 products; w, g and the step keep their dtype.
    """

    def __init__(
        self,
        model: FlatModel,
        batches: Iterable[Pair],
        loss: Loss,
        precision: str = "float32",
        own_code: bool = False,
    ) -> None:
        self.model = model
        self.batches = batches
        self.loss = loss
        self.precision = precision
        self.layers = known_layers(model, loss, precision)
        self.graphs = graphs_of(model, loss, precision)
        self.own_code = own_code or self.layers is None  # otherwise only our code runs

    def __call__(self, w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
        model = self.model
        model.load(w_i0)
        if not model.module.training:  # only after `evaluate`: train() visits all layers
            model.train()
        device = model.w.device
        with (
            random_numbers(seed_of(hook.config), device, self.own_code),
            tf32_as(self.precision, device),
        ):
            after = local_steps(model, hook.half.optimizer, hook.half.schedule, hook.config)
            steps = self.gradients(after, repeats=not takes_one_gradient(hook.half))
            solution = descend(model.w, model.g, steps, direction, hook)
        return solution._replace(w_K=model.take())

    def gradients(
        self, after: Callable[[int], None] = lambda k: None, repeats: bool = False
    ) -> Iterator[GradientAt]:
        """For each batch, a function that writes its gradient at a point to ``model.g``.

        after: called with k after step k, from 0. repeats: a step may have several passes; all
        begin with the random numbers and running statistics of the first.
        """
        drawn = generators(self.model.w.device, others=True) if self.layers is None else []
        for k, (inputs, targets) in enumerate(self.batches):
            gradient_at = self._gradient_of(inputs, targets)
            if repeats and (drawn or self.model.statistics):
                gradient_at = _repeatable(gradient_at, self.model, drawn)
            yield gradient_at
            after(k)

    def _gradient_of(self, inputs: Any, targets: Tensor) -> GradientAt:
        model = self.model

        def gradient_at(point: Vector) -> Tensor:
            if self.graphs is not None and isinstance(inputs, Tensor):
                one = inputs[None], targets[None], point[None], model.g[None]
                if (losses := self.graphs.gradient(*one)) is not None:
                    return losses[0]
            if point is model.w:
                return self._backward(inputs, targets)
            with model.at(point):  # layers read their weights in the backward pass too
                return self._backward(inputs, targets)

        return gradient_at

    def _backward(self, inputs: Any, targets: Tensor) -> Tensor:
        model = self.model
        if self.layers is not None and self.layers.takes(inputs, targets, many=False):
            return self.layers.gradient(inputs, targets, model.parameters, model.gradients)
        return by_autograd(model, inputs, targets, self.loss, self.precision)


def _repeatable(
    gradient_at: GradientAt, model: FlatModel, generators: Iterable[Generator]
) -> GradientAt:
    """The same; each of its calls begins with the random numbers and buffers of the first."""
    statistics, states = [buffer.clone() for buffer in model.statistics], states_of(generators)
    is_first = True

    def again(point: Vector) -> Tensor:
        nonlocal is_first
        if not is_first:
            for generator, state in states:
                generator.set(state)
            for buffer, value in zip(model.statistics, statistics, strict=True):
                buffer.copy_(value)
        is_first = False
        return gradient_at(point)

    return again


def takes_one_gradient(half: ClientHalf) -> bool:
    """Whether a step needs one pass over its batch, with the method and its plug-ins."""
    return half.rule.takes_one_gradient and all(
        type(plugin).gradient is PlugIn.gradient for plugin in half.plugins
    )


def local_steps(
    model: FlatModel, optimizer: Optimizer, schedule: Schedule, config: LocalConfig
) -> Callable[[int], None]:
    """The steps of the parameters that stay at the client, beside those of w.

    They follow their own clipped gradient, the one of the step's last backward pass, with the
    run's optimiser, rates and weight decay; corrections and duals act only on w. The optimiser's
    vectors for them are reset in every round.
    """
    if not len(model.w_local):
        return lambda k: None
    moments = optimizer.init(model.w_local)
    own = config._replace(shapes=model.local_shapes, hidden=model.local_hidden)

    def step(k: int) -> None:
        clip_(model.g_local, config.clip_norm)
        lr = schedule.rate(k, config)
        optimizer.step(model.w_local, model.g_local, moments, lr, config.weight_decay, own)

    return step


def by_autograd(
    model: FlatModel, inputs: Any, targets: Tensor, loss: Loss, precision: str
) -> Tensor:
    """Write a batch's gradient to ``model.g``; returns the loss."""
    with torch.enable_grad():
        value = loss(forward(model, inputs, precision), targets)
        if model.is_large:  # layer after layer into g: the others' gradients make no second vector
            torch._foreach_zero_(model.gradients)
            torch.autograd.backward(value)
            return value.detach()
        # not `backward`: it accumulates into g; with large layers and small batches clearing and
        # adding cost up to a tenth of a step
        gradients = torch.autograd.grad(value, model.parameters, materialize_grads=True)
    torch._foreach_copy_(model.gradients, gradients)
    return value.detach()


def known_layers(model: FlatModel, loss: Loss, precision: str) -> Layers | None:
    """The model's layers, if they compute its gradients faster than autograd."""
    usual = model.w.is_cpu and loss is F.cross_entropy and precision != "bfloat16"
    usual = usual and model.is_plain and not model.frozen and not model.is_tied
    usual = usual and model.forward is None
    return layers_of(model.module) if usual else None


@contextmanager
def tf32_as(precision: str, device: torch.device) -> Iterator[None]:
    """In this block float32 means float32 on a GPU too; by default PyTorch rounds convolutions.

    The process's flags are restored afterwards; on a GPU other threads wait for its end.
    """
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with ALONE:
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = precision in ("tf32", "bfloat16")
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before


def forward(model: FlatModel, inputs: Any, precision: str) -> Tensor:
    """The predictions in w's dtype; with ``precision="bfloat16"`` computed under autocast."""
    if precision == "bfloat16":
        with torch.autocast(model.w.device.type, torch.bfloat16):
            predictions = model(inputs)
    else:
        predictions = model(inputs)
    return predictions.to(model.w.dtype)


class Passes:
    """Repeated passes over a client's batches; counts the samples of the first one.

    Batches are read by ``format``, with floating inputs in ``dtype``.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        device: torch.device | str,
        dtype: torch.dtype,
        format: BatchFormat = PAIRS,
    ) -> None:
        self.batches = batches
        self.device = device
        self.dtype = dtype
        self.format = format
        self.examples = 0  # in the batches of the first pass that were read

    @property
    def size(self) -> int:
        """The samples of a pass; if the first one was cut short, those of a list or a DataLoader,
        else those that were read."""
        return max(self.examples, self.format.size(self.batches))

    def one_pass(self, first: bool) -> Iterator[Pair]:
        """The batches of a pass; ``first``: count their samples in ``examples``.

        Raises ValueError if the batches could be iterated only once.
        """
        has_batches = False
        for batch in self.batches:
            has_batches = True
            inputs, targets = self.format.read(batch, self.device, self.dtype)
            if first:
                self.examples += targets.shape[0]
            yield inputs, targets
        if not has_batches and self.examples:
            raise ValueError(
                "expected batches that can be iterated more than once (a list, a DataLoader), "
                f"got a {type(self.batches).__name__} that was used up after the first pass"
            )

    def steps(self, epochs: int, steps: int) -> Iterator[Pair]:
        """The batches of ``epochs`` passes, or of ``steps`` steps if that is not 0."""
        passes = (self.one_pass(e == 0) for e in (self._epochs() if steps else range(epochs)))
        return ahead(islice(chain.from_iterable(passes), steps or None))

    def _epochs(self) -> Iterator[int]:
        """0, 1, 2, ... until a pass is empty."""
        yield 0
        if self.examples:
            yield from repeat(1)


def ahead(batches: Iterable[Pair]) -> Iterator[Pair]:
    """The same batches; small ones are cut several at a time.

    One at a time, cutting took a sixth of a small model's step, because its code had left the
    processor's caches.
    """
    batches = iter(batches)
    for first in batches:
        yield from (first, *islice(batches, max(0, AHEAD // max(1, numel(first[0])) - 1)))
