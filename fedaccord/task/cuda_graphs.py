"""The gradients of clients on a GPU, recorded as CUDA graphs: one launch for a step of all.

A step of a small model has hundreds of kernels of a few microseconds each, which Python launches
more slowly than the GPU executes them. A graph launches all of them at once, and the clients'
kernels, which are its branches, run beside each other. They are the kernels of one client at a
time, and so are the gradients. A graph reads and writes the memory with which it was recorded:
batch, points, gradients and losses are copied to and from buffers.

Python code of a module runs only during the recording: `records` decides which are recorded.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedaccord.core.vectors import Vector
from fedaccord.data.seeding import ALONE
from fedaccord.task.flat_model import FlatModel, predictions
from fedaccord.task.generators import drawn_from, generators, states_of
from fedaccord.task.layers import is_plain

log = logging.getLogger("flwr")

Work = Callable[[], None]  # reads and writes only buffers
Loss = Callable[[Tensor, Tensor], Tensor]  # (predictions, targets) -> scalar

MAX_SHAPES = 16  # shapes of a model that are recorded
BRANCHES = 16  # clients whose kernels may run in parallel
WARM_UP = 3  # calls before a recording, in which libraries choose and allocate
LIBRARIES = ("torch", "torchvision", "fedaccord")  # modules from these only call PyTorch


@dataclass
class _Graph:
    """The buffers of batches of one shape, and the work of each client on them."""

    inputs: Tensor  # (m, b, ...)
    targets: Tensor  # (m, b, ...)
    losses: Tensor  # (m,)
    works: Sequence[Work]
    replay: Work | None = None  # runs all `works`; None: not recorded


class GradientGraphs:
    """The gradients of ``model`` and ``loss`` for stacks of clients.

    In the model's first visit they are computed client by client. From the second visit on a new
    shape is recorded; a model that is built for each visit is therefore never recorded.
    """

    def __init__(self, model: FlatModel, loss: Loss, precision: str) -> None:
        self.model = weakref.proxy(model)  # the model keeps this
        self.loss, self.precision = loss, precision
        self.visits = 0
        self.graphs: dict[Any, _Graph] = {}
        self.recorder: GraphRecorder | None = None
        self.can_record = True
        self._tried = False
        self._hold(0)

    def _hold(self, clients: int) -> None:
        """New buffers of this size; recorded graphs used the old ones."""
        w = self.model.w
        self.points, self.gradients = (w.new_empty(clients, len(w)) for _ in range(2))
        self.graphs.clear()
        self.recorder = None

    def gradient(self, inputs: Tensor, targets: Tensor, points: Vector, g: Vector) -> Tensor | None:
        """Write the gradients at ``points`` (m, d) to g (m, d); returns the losses (m,).

        None, and nothing is done, if the model cannot be recorded: it draws random numbers or
        synchronises.
        """
        if not self.can_record:
            return None
        m = len(targets)
        if m > len(self.points):
            self._hold(m)
        key = inputs.shape, inputs.dtype, targets.shape, targets.dtype
        graph = self.graphs.get(key) or self._prepared(inputs, targets)
        graph.inputs.copy_(inputs)
        graph.targets.copy_(targets)
        self.points[:m].copy_(points)
        if not self._tried:
            self._tried, self.can_record = True, not self._draws(graph)
        if len(self.graphs) < MAX_SHAPES:
            self.graphs[key] = graph
        if graph.replay is None and self.visits > 1 and key in self.graphs and self.can_record:
            self._record(graph)
        if not self.can_record:
            self._hold(0)
            return None
        (graph.replay or partial(run, graph.works))()
        g.copy_(self.gradients[:m])
        return graph.losses.clone()  # the next call writes to the buffer

    def _draws(self, graph: _Graph) -> bool:
        """Whether the model draws random numbers; their generators are set back."""
        states = states_of(generators(self.points.device, others=True))
        run(graph.works)
        drawn = drawn_from(states)
        for generator, state in states:
            generator.set(state)
        return bool(drawn)

    def _record(self, graph: _Graph) -> None:
        self.recorder = self.recorder or GraphRecorder(self.points.device)
        try:
            graph.replay = self.recorder(graph.works)
        except torch.OutOfMemoryError:  # of many clients at the same time
            graph.replay = partial(run, graph.works)
        except RuntimeError as error:
            log.warning(
                "steps are launched one by one: no CUDA graph of this model can be recorded (%s)",
                str(error).splitlines()[0],
            )
            self.can_record = False

    def _prepared(self, inputs: Tensor, targets: Tensor) -> _Graph:
        x, y = torch.empty_like(inputs), torch.empty_like(targets)
        losses = self.points.new_zeros(len(y))
        return _Graph(x, y, losses, [self._work(i, x[i], y[i], losses[i]) for i in range(len(y))])

    def _work(self, i: int, inputs: Tensor, targets: Tensor, loss: Tensor) -> Work:
        """Client i's gradient at its point."""
        model, loss_of, is_cast = self.model, self.loss, self.precision == "bfloat16"
        leaves = [view.requires_grad_() for view in model.views(self.points[i].detach())]
        views = model.views(self.gradients[i])

        def work() -> None:
            with torch.enable_grad():
                with torch.autocast(loss.device.type, torch.bfloat16, enabled=is_cast):
                    # a copy: the first layer may work in place
                    outputs = model.with_parameters(leaves, inputs.clone())
                value = loss_of(predictions(outputs).to(loss.dtype), targets)
                parts = torch.autograd.grad(value, leaves, materialize_grads=True)
            loss.copy_(value.detach())
            torch._foreach_copy_(views, parts)

        return work


def graphs_of(model: FlatModel, loss: Loss, precision: str) -> GradientGraphs | None:
    """The model's graphs, stored in the model, for one visit; None: it is not recorded."""
    if not is_on_gpu(model) or not isinstance(loss, FunctionType):  # others may have no hash
        return None
    key = loss, precision
    if key not in model.graphs:
        model.graphs[key] = GradientGraphs(model, *key) if records(model, loss) else None
    graphs: GradientGraphs | None = model.graphs[key]
    if graphs is not None:
        graphs.visits += 1
    return graphs


def is_on_gpu(model: FlatModel) -> bool:
    return model.w.is_cuda


def records(model: FlatModel, loss: Loss) -> bool:
    """Whether a recording is equivalent to the model and the loss: their Python code is a library's
    or ours, without hooks, and training changes only the shared parameters."""
    return (
        model.is_plain
        and model.forward is None
        and _is_known(loss)
        and all(_is_plain(part) for part in model.module.modules())
    )


def _is_plain(part: nn.Module) -> bool:
    classes = [each for each in type(part).__mro__ if issubclass(each, nn.Module)]
    if any(each.__module__.startswith("torch.fx") for each in classes):  # may call any function
        return False
    functions = [v for v in vars(part).values() if callable(v) and not isinstance(v, nn.Module)]
    return (
        all(map(_is_known, classes))
        and all(map(_is_known, functions))
        and getattr(part, "max_norm", None) is None  # it changes a table in place
        and is_plain(part)
    )


def _is_known(code: Any) -> bool:
    """Whether a class or a function is a library's or ours."""
    while isinstance(code, partial):
        code = code.func
    module = getattr(code, "__module__", None) or "torch"  # PyTorch's own in C have none
    return module.partition(".")[0] in LIBRARIES


def run(works: Sequence[Work]) -> None:
    for work in works:
        work()


class GraphRecorder:
    """Records works as CUDA graphs, which share their memory: one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = None  # of the memory; None before the first graph
        with torch.cuda.device(device):
            self.main, *self.streams = (_stream() for _ in range(1 + BRANCHES))

    def __call__(self, works: Sequence[Work]) -> Work:
        """A function that repeats all works, beside each other. Raises RuntimeError if one of them
        cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        options: Any = {"stream": self.main, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.main.wait_stream(current)
            try:
                with torch.cuda.stream(self.main):
                    for _ in range(WARM_UP):
                        self._branches(works)
                current.wait_stream(self.main)
                with _without_collection(), torch.cuda.graph(graph, self.pool, **options):
                    self._branches(works)
            finally:  # after an error PyTorch 2.5 leaves the stream of the recording
                torch.cuda.set_stream(current)
        self.pool = graph.pool()
        return graph.replay

    def _branches(self, works: Sequence[Work]) -> None:
        streams = self.streams[: len(works)]
        for stream in streams:
            stream.wait_stream(self.main)
        for stream, work in zip(cycle(streams), works, strict=False):
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            self.main.wait_stream(stream)


def _stream() -> torch.cuda.Stream:
    stream: torch.cuda.Stream = cast(Any, torch.cuda.Stream)()  # its constructor is not annotated
    return stream


@contextmanager
def _without_collection() -> Iterator[None]:
    """A block without Python's cycle collection: it could destroy a graph, which ends the recording
    of another one. Other threads wait for its end."""
    with ALONE:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
