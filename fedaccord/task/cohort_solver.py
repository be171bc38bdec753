"""The local steps of n clients at once: one forward and one backward pass for all of them.

`torch.vmap` runs the module over a stack of parameters and a stack of batches; the backward pass
is PyTorch's own and leaves the gradients in rows of g. (`torch.func.grad` would load a compiler.)
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from fedaccord.core.client_half import GradientHook
from fedaccord.core.rounds import CohortGradient, Solution, descend_cohort
from fedaccord.core.rule import Direction, GradientAt
from fedaccord.core.vectors import Vector, to_device
from fedaccord.data.samples import IGNORED
from fedaccord.data.seeding import seeded
from fedaccord.task.cuda_graphs import graphs_of
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.generators import OTHERS, drawn_from, states_of
from fedaccord.task.layers import has_backward_hooks
from fedaccord.task.solver import Loss, Pair, by_autograd, known_layers, tf32_as

ALIKE = 0.05  # share of the largest element; gradients in bfloat16 differ by less, others by more


class Stack(NamedTuple):
    """The batches of one step of the first m clients of a cohort.

    A batch that is shorter than the longest is padded with samples of its client.
    """

    inputs: Tensor  # (m, b, ...)
    targets: Tensor  # (m, b, ...)
    sizes: Tensor  # (m,) int64, on the CPU: how many samples of each batch count


def stacked(batches: Sequence[Iterable[Pair]]) -> Iterator[Stack]:
    """A stack for each step of n clients, each with its own batches, one or more.

    Raises ValueError if a client has more batches than the one before it.
    """
    iterators = [iter(client) for client in batches]
    while iterators:
        step = [next(client, None) for client in iterators]
        present = [batch for batch in step if batch is not None]
        if None in step[: len(present)]:
            raise ValueError("expected clients in the order of falling numbers of steps")
        iterators = iterators[: len(present)]
        if present:
            if not all(isinstance(inputs, Tensor) for inputs, _ in present):
                raise NotImplementedError("expected inputs in one tensor")
            sizes = torch.tensor([len(targets) for _, targets in present])
            longest = int(sizes.max())
            inputs, targets = (
                torch.stack([_fill(part, longest) for part in parts])
                for parts in zip(*present, strict=True)
            )
            yield Stack(inputs, targets, sizes)


def _fill(part: Tensor, length: int) -> Tensor:
    if len(part) == length:
        return part
    return torch.cat([part, part[:1].expand(length - len(part), *part.shape[1:])])


def _check_stacks(model: FlatModel) -> None:
    """Raise NotImplementedError if a trial found that the model trains other parameters."""
    if model.in_stacks is False:
        raise NotImplementedError(
            "expected a model that reads its parameters as attributes of its modules, got "
            f"{type(model.module).__name__}, whose gradient differs with many clients, e.g. "
            "of parameters in a list, a dict or a closure; train its clients one at a time"
        )


def _counts_rows(part: nn.Module) -> bool:
    """Whether a row's gradient depends on its index or on how often it is read: in one call of
    many clients all their rows are in one table."""
    return isinstance(part, nn.Embedding | nn.EmbeddingBag) and (
        part.padding_idx is not None or part.scale_grad_by_freq
    )


class CohortSolver:
    """n clients at once: a gradient step of each per stack of batches.

    Clients are sorted by falling numbers of steps. ``model`` gives the module and the layout of w;
    its own w and g are not used. ``precision`` as in `SequentialSolver`. Modules that draw random
    numbers are refused: theirs would not be those of one client at a time.

    A short batch is padded and its padding masked if the loss is `F.cross_entropy` on classes and a
    prediction depends on its own sample alone; otherwise clients with batches of equal length form
    a call.

    Raises NotImplementedError for a module that supports only one client at a time.
    """

    def __init__(
        self,
        model: FlatModel,
        stacks: Iterable[Stack],
        loss: Loss,
        precision: str = "float32",
    ) -> None:
        if model.forward is not None:
            raise NotImplementedError(
                "expected a model that is called with its inputs, without forward=; train its "
                "clients one at a time"
            )
        if not model.is_plain:
            raise NotImplementedError(
                "expected a model without local parameters and without buffers that change in "
                "training; train its clients one at a time"
            )
        if has_backward_hooks(model.module):
            raise NotImplementedError(
                "expected a model without hooks of its backward pass; train its clients one at a "
                "time"
            )
        if any(_counts_rows(part) for part in model.module.modules()):
            raise NotImplementedError(
                "expected no nn.Embedding with padding_idx or scale_grad_by_freq, whose gradient "
                "differs with many clients; train its clients one at a time"
            )
        _check_stacks(model)
        self.model = model
        self.stacks = stacks
        self.loss = loss
        self.precision = precision
        self.layers = known_layers(model, loss, precision)
        self.graphs = graphs_of(model, loss, precision)
        self._forward = torch.vmap(self._forward_one)

    def __call__(self, w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution:
        self.model.unsaved.reset()
        self.model.train()
        with tf32_as(self.precision, w_i0.device):
            w = w_i0.clone(memory_format=torch.contiguous_format)
            g = torch.empty_like(w)
            return descend_cohort(w, g, self.gradients(g), direction, hook)

    def gradients(self, g: Vector) -> "Iterator[_StackGradient]":
        """For each stack, a function that writes its gradients to the first rows of g (n, d)."""
        for stack in self.stacks:
            yield _StackGradient(self, self._masked(stack), g)

    def gradient(self, stack: Stack, g: Vector, point: Vector) -> Tensor:
        """The losses (m,) at ``point`` (m, d); writes the gradients to g (m, d)."""
        if (stack.sizes == stack.inputs.shape[1]).all():
            return self._gradient(stack.inputs, stack.targets, g, point)
        losses = g.new_empty(len(g))
        lengths = sorted(set(stack.sizes.tolist()))
        for length in lengths:
            rows = to_device((stack.sizes == length).nonzero().squeeze(1), g.device)
            x, y = (part[rows, :length] for part in (stack.inputs, stack.targets))
            g_rows, own = g.new_empty(len(rows), g.shape[1]), point[rows]
            losses[rows] = self._gradient(x, y, g_rows, own)
            g[rows], point[rows] = g_rows, own  # a forward pass may change weights in place
        if len(lengths) > 1 and self.model.unsaved.has_changed():
            raise NotImplementedError(
                "expected a model that does not count its passes, for batches of unequal size, "
                f"got {type(self.model.module).__name__}, whose attributes or unsaved buffers "
                "change; train its clients one at a time"
            )
        return losses

    def _gradient(self, inputs: Tensor, targets: Tensor, g: Vector, point: Vector) -> Tensor:
        views = self.model.views
        if self.layers is not None and self.layers.takes(inputs, targets, many=True):
            return self.layers.gradient(inputs, targets, views(point), views(g))
        is_new = self.model.in_stacks is None
        own = self._own_gradient(inputs, targets, point) if is_new else None
        with torch.enable_grad():
            leaves = [view.requires_grad_() for view in views(point.detach())]
            try:
                if self.graphs is not None and not is_new:
                    recorded = self.graphs.gradient(inputs, targets, point, g)
                    if recorded is not None:
                        return recorded
                states = [] if self.layers is not None else states_of(OTHERS)
                losses = self._losses(self._predictions(leaves, inputs).to(g.dtype), targets)
                gradients = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
            except (RuntimeError, ValueError) as error:  # of vmap, and of an `OwnLoss`
                raise NotImplementedError(
                    "expected a model and a loss that many clients can share a call of, got "
                    f"{type(self.model.module).__name__}: {str(error).splitlines()[0]}; "
                    "train its clients one at a time"
                ) from error
        if drawn_from(states):  # one draw for all clients; vmap itself refuses those of PyTorch
            raise NotImplementedError(
                "expected a model and a loss without random numbers, got "
                f"{type(self.model.module).__name__}, where NumPy's or Python's are drawn; train "
                "its clients one at a time"
            )
        if is_new:
            last = torch.cat([gradient[-1].reshape(-1) for gradient in gradients]).nan_to_num()
            own = last if own is None else own  # nothing to compare with
            pairs = zip(views(last), views(own), strict=True)
            unread = any(not ours.any() and theirs.any() for ours, theirs in pairs)
            is_alike = (last - own).abs().max() <= ALIKE * own.abs().max()
            self.model.in_stacks = bool(is_alike) and not unread
            _check_stacks(self.model)
        for view, gradient in zip(views(g), gradients, strict=True):
            view.copy_(gradient)
        return losses.detach()

    def _own_gradient(self, inputs: Tensor, targets: Tensor, point: Vector) -> Tensor | None:
        """The gradient (d,) of the last client by the model itself, whose vectors do not change;
        None: its pass fails."""
        model = self.model
        w, g = model.w.clone(), model.g.clone()
        try:
            with seeded(0):
                model.w.copy_(point[-1])
                by_autograd(model, inputs[-1], targets[-1], self.loss, self.precision)
                return model.g.nan_to_num()
        except (RuntimeError, ValueError):
            return None
        finally:
            model.w.copy_(w)
            model.g.copy_(g)
            model.unsaved.reset()

    def _predictions(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        if self.precision != "bfloat16":
            return self._forward(inputs, *parameters)
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return self._forward(inputs, *parameters)

    def _forward_one(self, inputs: Tensor, *parameters: Tensor) -> Tensor:
        """The predictions of one client, which vmap extends to all."""
        predictions: Tensor = self.model.with_parameters(parameters, inputs)
        return predictions

    def _losses(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """(m,), the loss of each client's batch."""
        if not self._counts(targets):
            losses: Tensor = torch.vmap(self.loss)(predictions, targets)
            return losses
        # as vmap would, without loading a symbolic library
        values = F.cross_entropy(predictions.flatten(0, 1), targets.flatten(0, 1), reduction="none")
        counted = (targets != IGNORED).flatten(1).sum(1)
        return values.view(len(targets), -1).sum(1) / counted

    def _counts(self, targets: Tensor) -> bool:
        """Whether the loss is the mean over the samples whose class is not `IGNORED`."""
        return self.loss is F.cross_entropy and not targets.is_floating_point()

    def _masked(self, stack: Stack) -> Stack:
        """The stack with its padding masked, if that is possible."""
        length = stack.inputs.shape[1]
        short = stack.sizes < length
        if not (short.any() and self._counts(stack.targets) and self._goes_by_sample(stack)):
            return stack
        filling = to_device(torch.arange(length) >= stack.sizes[:, None], stack.targets.device)
        filling = filling.view(*filling.shape, *[1] * (stack.targets.ndim - 2))
        targets = stack.targets.masked_fill(filling, IGNORED)
        return Stack(stack.inputs, targets, torch.full_like(stack.sizes, length))

    @torch.no_grad()
    def _goes_by_sample(self, stack: Stack) -> bool:
        """Whether a prediction depends only on its own sample: tried once per model.

        At random parameters, because at special ones (zero) all predictions may be equal.
        """
        model = self.model
        if model.by_sample is None:
            i = int(stack.sizes.argmin())
            size, other = int(stack.sizes[i]), stack.inputs[int(stack.sizes.argmax())]
            x = torch.cat([stack.inputs[i][:size], other[size:]])  # different samples
            w = torch.randn(len(model.w), generator=torch.Generator().manual_seed(0)).to(model.w)
            views = model.views(w / 10)
            model.train()  # in evaluation mode a layer may not look at the others of its batch
            for part in model.module.modules():
                if isinstance(part, _DropoutNd):  # draw none of the process's random numbers
                    part.eval()
            filled = model.with_parameters(views, x)
            model.unsaved.reset()
            short = model.with_parameters(views, x[:size])
            model.unsaved.reset()
            model.train()
            error = (filled[:size] - short).abs().max()
            model.by_sample = bool(error <= 1e-4 * short.abs().max())
        return model.by_sample


class _StackGradient(CohortGradient):
    """The gradients of one stack."""

    def __init__(self, solver: CohortSolver, stack: Stack, g: Vector) -> None:
        self.solver, self.stack, self.g = solver, stack, g
        self.clients = len(stack.sizes)

    def at(self, rows: slice) -> GradientAt:
        stack = Stack(*(part[rows] for part in self.stack))
        return partial(self.solver.gradient, stack, self.g[rows])
