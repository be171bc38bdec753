"""Gradients recorded as CUDA graphs: one launch instead of the hundreds of both passes.

A graph reads and writes the memory that it was recorded with: batch, point, gradient and loss lie
in buffers that stay where they are. Nothing here waits for the GPU.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedaccord.core.rule import GradientAt
from fedaccord.core.vectors import Vector
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.solver import Batch, Loss, SequentialSolver, by_autograd

log = logging.getLogger("flwr")

Work = Callable[[], None]  # takes nothing, gives nothing: all in buffers
Record = Callable[[Work], Work]  # makes of some work what repeats it
MOST = 256  # shapes that are recorded
WORTH = 2  # times that a batch of some shape comes before its gradient is recorded
WARM_UP = 3  # passes before a recording, in which libraries choose and allocate


class Recorded(NamedTuple):
    """A recorded gradient and the buffers that it reads and writes, beside that of gradients."""

    inputs: Tensor
    targets: Tensor
    point: Vector  # (..., d): the models themselves, or the buffer of all other points
    loss: Tensor  # (...)
    replay: Work

    def gradient_at(self, inputs: Tensor, targets: Tensor, point: Vector) -> Tensor:
        """Leave the batch's gradient at ``point`` in the buffer of gradients; the loss."""
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        if point is not self.point:
            self.point.copy_(point)
        self.replay()
        return self.loss.clone()  # the buffer is the next replay's


class Recordings:
    """Recorded gradients, by the shapes of their batches.

    A module that cannot be recorded, such as one that waits for the GPU, is computed as before,
    after one warning. What a module does outside of PyTorch happens once, in the recording.
    """

    def __init__(self, record: Record | None) -> None:
        self.record = record
        self.seen: Counter[Any] = Counter()
        self.recorded: dict[Any, Recorded] = {}

    def look(
        self, inputs: Tensor, targets: Tensor, at_w: bool, make: Callable[[Record], Recorded]
    ) -> Recorded | None:
        """The graph for batches like this one, at w or elsewhere; None: not yet, or not at all."""
        key = (inputs.shape, inputs.dtype, targets.shape, targets.dtype, at_w)
        if key not in self.recorded and self.record is not None and len(self.recorded) < MOST:
            self.seen[key] += 1
            if self.seen[key] >= WORTH:
                try:
                    self.recorded[key] = make(self.record)
                except RuntimeError as error:
                    log.warning("no CUDA graphs of this model: %s", str(error).splitlines()[0])
                    self.record = None
        return self.recorded.get(key)


class Graphs(Recordings):
    """The recorded gradients of a model, of one client at a time."""

    def __init__(self, model: FlatModel, loss: Loss, precision: str, record: Record | None) -> None:
        super().__init__(record)
        self.model = model
        self.loss = loss
        self.precision = precision
        self.elsewhere = torch.empty_like(model.w)  # the points that are not w
        self.cohort = CohortGraphs(model.w, record)

    def find(self, inputs: Tensor, targets: Tensor, at_w: bool) -> Recorded | None:
        return self.look(
            inputs, targets, at_w, lambda record: self._recorded(inputs, targets, at_w, record)
        )

    def _recorded(self, inputs: Tensor, targets: Tensor, at_w: bool, record: Record) -> Recorded:
        model = self.model
        x, y = inputs.clone(), targets.clone()
        point = model.w if at_w else self.elsewhere
        loss = torch.zeros((), dtype=model.w.dtype, device=model.w.device)

        def work() -> None:
            with model.at(point):
                loss.copy_(by_autograd(model, x, y, self.loss, self.precision))

        return Recorded(x, y, point, loss, record(work))


StackGradient = Callable[[Tensor, Tensor, Vector, Vector], Tensor]
"""(inputs, targets, g (m, d), point (m, d)) -> the losses (m,); the gradients go to g."""


class CohortGraphs(Recordings):
    """The recorded gradients of many clients together: a step of all is one launch.

    Their models and gradients lie in rows of buffers that all rounds share. A batch's filling is
    marked in its targets, so that masks are in the buffers too.
    """

    def __init__(self, like: Vector, record: Record | None) -> None:
        super().__init__(record)
        self.w = self.g = self.elsewhere = like.new_empty(0, len(like))

    def room(self, n: int) -> tuple[Vector, Vector]:
        """Buffers of w and g for n clients, (n, d)."""
        if n > len(self.w):
            shape = n, self.w.shape[1]
            self.w, self.g, self.elsewhere = (self.w.new_empty(shape) for _ in range(3))
            self.recorded.clear()  # they use the old ones
        return self.w[:n], self.g[:n]

    def gradient(
        self, plain: StackGradient, inputs: Tensor, targets: Tensor, g: Vector, point: Vector
    ) -> Tensor:
        """What ``plain`` does, from a graph where stacks of this shape come again."""
        m = len(g)
        if not g.is_set_to(self.g[:m]):  # rows from elsewhere than the first on
            return plain(inputs, targets, g, point)
        at_w = point.is_set_to(self.w[:m])

        def make(record: Record) -> Recorded:
            x, y, losses = inputs.clone(), targets.clone(), g.new_zeros(m)
            points = self.w[:m] if at_w else self.elsewhere[:m]

            def work() -> None:
                losses.copy_(plain(x, y, g, points))

            return Recorded(x, y, points, losses, record(work))

        graph = self.look(inputs, targets, at_w, make)
        if graph is None:
            return plain(inputs, targets, g, point)
        return graph.gradient_at(inputs, targets, graph.point if at_w else point)


class GraphSolver(SequentialSolver):
    """One client at a time, its gradients from ``graphs`` where batches of a shape come again.

    It leaves the bits of `SequentialSolver`.
    """

    def __init__(self, graphs: Graphs, batches: Iterable[Batch]) -> None:
        super().__init__(graphs.model, batches, graphs.loss, graphs.precision)
        self.graphs = graphs

    def _gradient_of(self, inputs: Tensor, targets: Tensor) -> GradientAt:
        plain = super()._gradient_of(inputs, targets)

        def gradient_at(point: Vector) -> Tensor:
            graph = self.graphs.find(inputs, targets, point is self.model.w)
            return graph.gradient_at(inputs, targets, point) if graph else plain(point)

        return gradient_at


def recorder(device: torch.device | None = None) -> Record:
    """Records CUDA graphs, which share their memory: one is replayed at a time.

    device: where they compute; None: on the current one.
    """
    with torch.cuda.device(device):
        pool, number = torch.cuda.graph_pool_handle(), torch.cuda.current_device()
        beside = cast(Any, torch.cuda.Stream)()  # its constructor is not annotated

    def record(work: Work) -> Work:
        # the replays draw anew
        with torch.cuda.device(number), torch.random.fork_rng([number]):
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(WARM_UP):
                    work()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=beside):
                work()
        return graph.replay

    return record
