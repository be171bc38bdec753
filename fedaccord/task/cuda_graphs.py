"""The gradients of clients on a GPU, recorded as CUDA graphs: one launch for a step of all.

A step of a small model has hundreds of kernels of a few microseconds each, which Python launches
more slowly than the GPU runs them. A graph launches them at once, and the clients' kernels, which
it holds as branches, run beside each other. They are the kernels of one client at a time, so the
gradients are, too. A graph reads and writes the memory with which it was recorded: batch, points,
gradients and losses are copied to and from buffers.

What a module does in Python happens only in the recording: `records` says which are taken.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaccord.core.vectors import Vector
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.generators import drawn_from, generators, states_of
from fedaccord.task.layers import is_plain

log = logging.getLogger("flwr")

Work = Callable[[], None]  # reads and writes buffers alone
Loss = Callable[[Tensor, Tensor], Tensor]

WORTH = 2  # calls of a shape from which on it is recorded
MOST = 16  # recorded shapes of a model
BRANCHES = 16  # clients whose kernels may run beside each other
WARM_UP = 3  # calls before a recording, in which libraries choose and allocate
LIBRARIES = ("torch", "torchvision", "fedaccord")  # their modules do nothing in Python but call


class _Graph(NamedTuple):
    """The buffers of batches of one shape, and the work of each client on them."""

    inputs: Tensor  # (m, b, ...)
    targets: Tensor  # (m, b, ...)
    losses: Tensor  # (m,)
    works: Sequence[Work]


class GradientGraphs:
    """The gradients of ``model`` and ``loss`` for stacks of clients.

    A shape is computed client by client when it comes first, and recorded when it comes again.
    """

    def __init__(self, model: FlatModel, loss: Loss, precision: str) -> None:
        self.model, self.loss, self.precision = model, loss, precision
        self.points = self.gradients = model.w.new_empty(0, len(model.w))  # of all shapes
        self.graphs: dict[Any, _Graph] = {}
        self.replays: dict[Any, Work] = {}
        self.recorder: Recorder | None = None
        self.can_record = True
        self._tried = False

    def gradient(self, inputs: Any, targets: Tensor, points: Vector, g: Vector) -> Tensor | None:
        """Write the gradients at ``points`` (m, d) to g (m, d); returns the losses (m,).

        None, and nothing is done, if the model cannot be recorded: it draws random numbers or
        synchronises.
        """
        if not self.can_record or not isinstance(inputs, Tensor):
            return None
        m = len(targets)
        if m > len(self.points):
            self.points, self.gradients = (g.new_empty(m, g.shape[1]) for _ in range(2))
            self.graphs.clear()  # they use the buffers from before
            self.replays.clear()
        key = inputs.shape, inputs.dtype, targets.shape, targets.dtype
        graph = self.graphs.get(key) or self._prepared(inputs, targets)
        graph.inputs.copy_(inputs)
        graph.targets.copy_(targets)
        self.points[:m].copy_(points)
        if not self._run(key, graph):
            return None
        g.copy_(self.gradients[:m])
        return graph.losses.clone()  # the next call writes to the buffer

    def _run(self, key: Any, graph: _Graph) -> bool:
        """Whether the work was done."""
        if replay := self.replays.get(key):
            replay()
            return True
        if not self._tried:
            states = states_of(generators(self.points.device, others=True))
            run(graph.works)
            self._tried, drawn = True, drawn_from(states)
            for generator, state in states:
                generator.set(state)
            self.can_record = not drawn
        elif key not in self.graphs:
            run(graph.works)
        else:
            try:
                self.recorder = self.recorder or Recorder(self.points.device)
                self.replays[key] = self.recorder(graph.works)
            except RuntimeError as error:
                log.warning(
                    "steps are launched one by one: no CUDA graph of this model can be recorded "
                    "(%s)",
                    str(error).splitlines()[0],
                )
                self.can_record = False
                self.graphs.clear()
                self.replays.clear()
                return False
            self.replays[key]()
        if len(self.graphs) < MOST:
            self.graphs[key] = graph
        return self.can_record

    def _prepared(self, inputs: Tensor, targets: Tensor) -> _Graph:
        x, y = torch.empty_like(inputs), torch.empty_like(targets)
        losses = self.points.new_zeros(len(y))
        return _Graph(x, y, losses, [self._work(i, x[i], y[i], losses[i]) for i in range(len(y))])

    def _work(self, i: int, inputs: Tensor, targets: Tensor, loss: Tensor) -> Work:
        """Client i's gradient at its point."""
        model = self.model
        leaves = [view.requires_grad_() for view in model.views(self.points[i].detach())]
        views, named = model.views(self.gradients[i]), dict(zip(model.names, leaves, strict=True))

        def predictions() -> Tensor:
            found: Tensor = functional_call(
                model.module, named, (inputs,), tie_weights=model.is_tied
            )
            return found.to(loss.dtype)

        def work() -> None:
            with torch.enable_grad():
                if self.precision == "bfloat16":
                    with torch.autocast(loss.device.type, torch.bfloat16):
                        found = predictions()
                else:
                    found = predictions()
                value = self.loss(found, targets)
                parts = torch.autograd.grad(value, leaves, materialize_grads=True)
            loss.copy_(value.detach())
            torch._foreach_copy_(views, parts)

        return work


def graphs_of(model: FlatModel, loss: Loss, precision: str) -> GradientGraphs | None:
    """Those of the model, which keeps them; None: they are not recorded."""
    if not model.w.is_cuda:
        return None
    key = loss, precision
    if key not in model.graphs:
        model.graphs[key] = GradientGraphs(*(model, *key)) if records(model, loss) else None
    found: GradientGraphs | None = model.graphs[key]
    return found


def records(model: FlatModel, loss: Loss) -> bool:
    """Whether a recording does what the model and the loss do: their Python code is a library's or
    ours, without hooks, and training changes the shared parameters alone."""
    return (
        model.is_plain
        and model.forward is None
        and isinstance(loss, FunctionType)
        and _of_libraries(loss.__module__)
        and all(_is_known(part) for part in model.module.modules())
    )


def _of_libraries(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _is_known(part: nn.Module) -> bool:
    return _of_libraries(type(part).__module__) and is_plain(part)


def run(works: Sequence[Work]) -> None:
    for work in works:
        work()


class Recorder:
    """Records works as CUDA graphs, which share their memory: one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.main, *self.streams = (_stream() for _ in range(1 + BRANCHES))

    def __call__(self, works: Sequence[Work]) -> Work:
        """A function that repeats all works, beside each other. Raises RuntimeError if one of them
        cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            self.main.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.main):
                for _ in range(WARM_UP):
                    self._branches(works)
            torch.cuda.current_stream().wait_stream(self.main)
            options: Any = {"stream": self.main, "capture_error_mode": "thread_local"}
            with _without_collection(), torch.cuda.graph(graph, self.pool, **options):
                self._branches(works)
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
    """A block in which Python frees no cycles: a graph among them would be destroyed, which ends
    the recording of another."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
