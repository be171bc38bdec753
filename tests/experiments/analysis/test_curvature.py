"""Curvature equals that of the dense Hessian; directions and sharpness follow their papers."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord.data.samples import IGNORED
from fedaccord.experiments.analysis import curvature
from fedaccord.experiments.analysis.curvature import Surface
from fedaccord.task.evaluation import evaluate
from fedaccord.task.flat_model import FlatModel

DOUBLE = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def surface() -> Surface:
    """A network of 16 parameters on 30 samples in three batches of unequal size."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    model = FlatModel(module, dtype=DOUBLE)
    x = torch.randn(30, 3, dtype=DOUBLE, generator=seeded(1))
    y = torch.randn(30, 1, dtype=DOUBLE, generator=seeded(2))
    batches = [(x[a:b], y[a:b]) for a, b in pairwise((0, 5, 17, 30))]
    return Surface(model, F.mse_loss, batches)


def point(surface: Surface, seed: int = 3) -> Tensor:
    return torch.randn(surface.model.w.shape, dtype=DOUBLE, generator=seeded(seed))


def dense(surface: Surface, w: Tensor) -> Tensor:
    """The Hessian of the mean loss over all samples at once."""
    x, y = (torch.cat(parts) for parts in zip(*surface.batches, strict=True))

    def loss(v: Tensor) -> Tensor:
        parameters = dict(zip(surface.model.names, surface.model.views(v), strict=True))
        return F.mse_loss(torch.func.functional_call(surface.model.module, parameters, (x,)), y)

    hessian = torch.autograd.functional.hessian(loss, w)
    assert isinstance(hessian, Tensor)
    return hessian


@pytest.mark.parametrize("seed", range(4))
def test_the_top_eigenvalue_and_its_vector_are_those_of_the_dense_hessian(
    surface: Surface, seed: int
) -> None:
    w = point(surface, seed)
    values, vectors = torch.linalg.eigh(dense(surface, w))
    result = curvature.top_eigenvalue(surface.product(w), seeded(), w, tol=1e-7, steps=5000)
    assert result.value == pytest.approx(float(values[-1]), rel=1e-6)
    assert abs(float(result.vector @ vectors[:, -1])) == pytest.approx(1, abs=1e-6)
    assert result.residual <= 1e-7


@pytest.mark.parametrize(("diagonal", "value"), [((-5.0, 1.0, 2.0), 2), ((0.0, 0.0), 0)])
def test_the_largest_eigenvalue_is_not_that_of_largest_magnitude(
    diagonal: tuple[float, ...], value: float
) -> None:
    h = torch.diag(torch.tensor(diagonal, dtype=DOUBLE))
    result = curvature.top_eigenvalue(lambda v: h @ v, seeded(), h[0], tol=1e-9, steps=1000)
    assert result.value == pytest.approx(value, abs=1e-9)
    assert value or result.steps == 1  # no curvature: it ends
    error = float((h @ result.vector - result.value * result.vector).norm())
    assert error == pytest.approx(result.residual * abs(result.value), rel=1e-3)


def test_the_trace_over_orthogonal_signs_is_that_of_the_dense_hessian(surface: Surface) -> None:
    w = point(surface)
    assert len(w) == 16
    hadamard = torch.ones(1, 1, dtype=DOUBLE)
    for _ in range(4):
        hadamard = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=DOUBLE), hadamard)
    estimate = curvature.trace(surface.product(w), hadamard)
    assert estimate.mean == pytest.approx(float(dense(surface, w).trace()), rel=1e-6)


def test_random_signs_estimate_it_within_their_error(surface: Surface) -> None:
    w = point(surface)
    estimate = curvature.trace(surface.product(w), curvature.signs(200, seeded(), w))
    assert abs(estimate.mean - float(dense(surface, w).trace())) < 4 * estimate.error
    assert estimate.error < 0.2 * abs(estimate.mean)
    (one,) = curvature.signs(1, seeded(), w)
    assert {*one.tolist()} == {-1, 1}


def test_value_and_gradient_are_those_of_all_samples_at_once(surface: Surface) -> None:
    w = point(surface)
    x, y = (torch.cat(parts) for parts in zip(*surface.batches, strict=True))
    whole = Surface(surface.model, surface.loss, [(x, y)])
    assert surface.value(w) == pytest.approx(whole.value(w), rel=1e-12)
    torch.testing.assert_close(surface.gradient(w), whole.gradient(w))


def test_ignored_targets_count_as_in_an_evaluation() -> None:
    """Of batches with one, three and no counted targets."""
    model = FlatModel(nn.Linear(4, 3), dtype=DOUBLE)
    x = torch.randn(12, 4, dtype=DOUBLE, generator=seeded(4))
    y = torch.full((12,), IGNORED)
    y[[2, 5, 6, 7]] = torch.tensor([0, 1, 2, 1])
    batches = [(x[a:b], y[a:b]) for a, b in pairwise((0, 4, 9, 12))]
    surface = Surface(model, F.cross_entropy, batches)
    loss = evaluate(model, model.w, batches, F.cross_entropy)["loss"]
    assert surface.value(model.w) == pytest.approx(loss, rel=1e-12)
    assert surface.gradient(model.w).isfinite().all()


def test_sharpness_is_the_largest_rise_of_its_three_steps(surface: Surface) -> None:
    w = point(surface)
    top = curvature.top_eigenvalue(surface.product(w), seeded(), w, tol=1e-6, steps=5000).vector
    g = surface.gradient(w)
    radius = 1e-4
    rise = curvature.sharpness(surface, w, radius, top)
    assert rise == pytest.approx(radius * float(g.norm()), rel=1e-2)  # first order: the gradient
    assert curvature.sharpness(surface, w, 0.0, top) == 0
    far = curvature.sharpness(surface, w, 3.0, top)
    ends = [surface.value(w + 3 * step) for step in (top, -top, g / g.norm())]
    assert far == max(ends) - surface.value(w)
    assert curvature.sharpness(surface, w, 3.0, -top) == far  # an eigenvector has no sign


def test_a_filter_of_a_direction_has_the_norm_of_the_weights_filter() -> None:
    torch.manual_seed(0)
    model = FlatModel(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2)))
    direction = curvature.filter_normalised(model, model.w, seeded())
    for name, d, w in zip(model.names, model.views(direction), model.views(model.w), strict=True):
        if name.endswith("bias"):
            assert not d.any()
        else:
            torch.testing.assert_close(d.flatten(1).norm(dim=1), w.flatten(1).norm(dim=1))
            assert not torch.allclose(d, w)


def test_the_landscape_has_the_model_at_its_centre_and_its_axes_in_order(surface: Surface) -> None:
    w, one, two = (point(surface, seed) for seed in (3, 4, 5))
    heights = curvature.landscape(surface, w, one, two, [-0.5, 0.0, 1.0])
    assert float(heights[1, 1]) == surface.value(w)
    assert float(heights[1, 2]) == pytest.approx(surface.value(w + one))
    assert float(heights[0, 1]) == pytest.approx(surface.value(w - 0.5 * two))
