"""Curvature and shape of a loss at a point, by Hessian-vector products.

Eigenvalue and trace as PyHessian computes them (Yao et al. 2020, arXiv:1912.07145), the landscape
as Li et al. 2018 (arXiv:1712.09913) draw it, sharpness at a radius as SAM defines it (Foret et al.
2021, arXiv:2010.01412).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedaccord.task import losses
from fedaccord.task.batches import Batch
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.solver import Loss

Product = Callable[[Tensor], Tensor]  # v (d,) -> H v (d,)


class Surface:
    """The mean loss over samples as a function of the parameters (d,), in evaluation mode.

    batches: iterated for each value, gradient and product; of the dtype of the parameters, with
    weights as in `losses.weight`.
    """

    def __init__(self, model: FlatModel, loss: Loss, batches: Sequence[Batch]) -> None:
        self.model, self.loss = model, loss
        self.num_samples = sum(len(targets) for _, targets in batches)
        weights = [float(losses.weight(loss, targets)) for _, targets in batches]
        self.batches = [batch for batch, own in zip(batches, weights, strict=True) if own]
        total = sum(weights)
        self.shares = [own / total for own in weights if own]
        model.module.eval()

    def value(self, w: Tensor) -> float:
        with torch.no_grad():
            return sum(map(float, self._parts(w)))

    def gradient(self, w: Tensor) -> Tensor:
        w, g = w.detach().requires_grad_(), torch.zeros_like(w)
        for part in self._parts(w):
            g += torch.autograd.grad(part, w)[0]
        return g

    def product(self, w: Tensor) -> Product:
        """v -> H(w) v, by a second backward pass."""
        w = w.detach().requires_grad_()

        def times(v: Tensor) -> Tensor:
            h = torch.zeros_like(v)
            for part in self._parts(w):
                (g,) = torch.autograd.grad(part, w, create_graph=True)
                h += torch.autograd.grad(g @ v, w)[0]
            return h

        return times

    def _parts(self, w: Tensor) -> Iterator[Tensor]:
        """The contribution of each batch to the mean."""
        for (inputs, targets), share in zip(self.batches, self.shares, strict=True):
            with sdpa_kernel(SDPBackend.MATH):  # the attention that has a second derivative
                predictions = self.model.with_parameters(self.model.views(w), inputs)
            yield self.loss(predictions, targets) * share


class Eigen(NamedTuple):
    value: float
    vector: Tensor  # (d,), of norm 1
    residual: float  # ||H v - value v|| / |value|
    steps: int  # Hessian-vector products


def top_eigenvalue(
    product: Product, generator: torch.Generator, like: Tensor, tol: float, steps: int
) -> Eigen:
    """The largest eigenvalue of H, by power iteration until the residual is at most ``tol``.

    Power iteration finds the eigenvalue of largest magnitude; if that is negative, a second one on
    H minus it finds the largest. like: (d,) of the device and dtype.
    """
    first = _power(product, generator, like, 0.0, tol, steps)
    if first.value >= 0:
        return first
    second = _power(product, generator, like, first.value, tol, steps)
    return second._replace(steps=first.steps + second.steps)


def _power(
    product: Product, generator: torch.Generator, like: Tensor, shift: float, tol: float, steps: int
) -> Eigen:
    """Power iteration with H - shift I."""
    v = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
    v /= v.norm()
    value, residual, step = math.nan, math.inf, 0
    while step < steps:
        step += 1
        h = product(v) - shift * v
        value = float(h @ v)
        residual = float((h - value * v).norm()) / max(abs(value + shift), 1e-30)
        norm = h.norm()
        if residual <= tol or not norm > 0:
            break
        v = h / norm
    return Eigen(value + shift, v, residual, step)


class Trace(NamedTuple):
    mean: float
    error: float  # standard error of the mean
    probes: int


def trace(product: Product, probes: Iterable[Tensor]) -> Trace:
    """Hutchinson's estimate: the mean of v . H v over probes v of independent signs."""
    values = torch.tensor([float(v @ product(v)) for v in probes], dtype=torch.float64)
    error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else math.nan
    return Trace(float(values.mean()), error, len(values))


def signs(number: int, generator: torch.Generator, like: Tensor) -> Iterable[Tensor]:
    """Vectors (d,) of random signs."""
    for _ in range(number):
        bits = torch.randint(0, 2, like.shape, generator=generator)
        yield (2 * bits - 1).to(like)


def sharpness(surface: Surface, w: Tensor, radius: float, top: Tensor) -> float:
    """A lower bound of max over ||e|| <= radius of L(w + e) - L(w): the largest value of SAM's step
    along the gradient and of both steps along the top eigenvector, each of length ``radius``."""
    g = surface.gradient(w)
    steps = [top, -top] + ([g / g.norm()] if g.norm() > 0 else [])
    return max(surface.value(w + radius * step) for step in steps) - surface.value(w)


def filter_normalised(model: FlatModel, w: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction (d,) whose filters have the norms of w's filters; a filter is a row of a
    weight, along its first axis. Biases and other vectors are zero."""
    parts = []
    for weight in model.views(w):
        if weight.dim() < 2:
            parts.append(torch.zeros_like(weight).reshape(-1))
            continue
        rows = weight.reshape(len(weight), -1)
        noise = torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(rows)
        scale = rows.norm(dim=1) / noise.norm(dim=1)
        parts.append((noise * scale[:, None]).reshape(-1))
    return torch.cat(parts)


def landscape(surface: Surface, w: Tensor, one: Tensor, two: Tensor, at: Sequence[float]) -> Tensor:
    """(n, n) L(w + a one + b two): a along the columns, b along the rows, both of ``at``."""
    values = [[surface.value(w + a * one + b * two) for a in at] for b in at]
    return torch.tensor(values, dtype=torch.float64)
