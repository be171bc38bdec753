"""Our own way through a stack of layers, beside autograd's."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from fedaccord.core.client_half import ClientHalf, GradientHook
from fedaccord.core.rule import Direction, LocalConfig, LocalRule, Model, Stateless
from fedaccord.data.samples import IGNORED
from fedaccord.task.cohort_solver import CohortSolver, Stack
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.layers import layers_of
from fedaccord.task.models import build
from fedaccord.task.solver import SequentialSolver

IMAGES = (3, 16, 16)
Net = Callable[[], nn.Sequential]


def dense(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 7, bias=bias), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4)
    )


def unusual() -> nn.Sequential:
    """Every setting of a convolution and of a pool that is known; one ReLU in two places."""
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(3, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=3),
        relu,
        nn.MaxPool2d((2, 3), stride=2, padding=1, dilation=(1, 2), ceil_mode=True),
        nn.Conv2d(6, 4, 2, bias=False),
        nn.Flatten(),
        relu,
        nn.LazyLinear(4),
    )


def named(name: str, shape: tuple[int, ...]) -> Net:
    def net() -> nn.Sequential:
        module = build(name, shape, 4)
        assert isinstance(module, nn.Sequential)
        return module

    return net


NETS: dict[str, tuple[Net, tuple[int, ...]]] = {
    "dense": (dense, (5,)),
    "without bias": (lambda: dense(bias=False), (5,)),
    "unusual": (unusual, IMAGES),
    "linear": (named("linear", IMAGES), IMAGES),
    "mlp": (named("mlp", IMAGES), IMAGES),
    "lenet": (named("lenet", IMAGES), IMAGES),
    "lenet5": (named("lenet5", IMAGES), IMAGES),
    "cnn": (named("cnn", IMAGES), IMAGES),
}
MANY = ["dense", "without bias", "linear", "mlp"]  # that support many clients in a call


def model_of(name: str, dtype: torch.dtype = torch.float64) -> tuple[FlatModel, tuple[int, ...]]:
    net, shape = NETS[name]
    torch.manual_seed(0)
    module = net()
    module(torch.zeros(2, *shape))  # which makes what is lazy
    return FlatModel(module, dtype=dtype), shape


def batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=dtype), torch.randint(4, shape[:1])


def by_autograd(model: FlatModel, x: Tensor, y: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the gradient (d,)."""
    with model.at(point):
        loss = F.cross_entropy(model.module(x), y)
        gradients = torch.autograd.grad(loss, model.parameters)
    return loss.detach(), torch.cat([part.flatten() for part in gradients])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETS)
def test_loss_and_gradient_are_autograds_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model, shape = model_of(name, dtype)
    x, y = batch((6, *shape), dtype)
    y[2] = IGNORED
    before = x.clone()
    for point in (model.w, model.w + 0.1):
        torch.manual_seed(2)  # of dropout
        loss, g = by_autograd(model, x, y, point)
        model.g.fill_(torch.nan)
        torch.manual_seed(2)
        [gradient_at] = SequentialSolver(model, [(x, y)], F.cross_entropy).gradients()
        assert gradient_at(point).equal(loss)
        assert model.g.equal(g)
    assert x.equal(before)
    assert g.any()


@pytest.mark.parametrize("name", NETS)
def test_autograd_is_not_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = model_of(name)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("autograd was asked")

    monkeypatch.setattr(torch.autograd, "grad", never)
    SequentialSolver(model, [], F.cross_entropy)._backward(*batch((6, *shape)))
    if name in MANY:
        x, y = batch((6, *shape))
        solver = CohortSolver(model, [], F.cross_entropy)
        w = model.w.expand(2, -1)
        stack = Stack(x.expand(2, *x.shape), y.expand(2, 6), torch.tensor([6, 6]))
        solver.gradient(stack, torch.empty_like(w), w)


@pytest.mark.parametrize("name", MANY)
def test_many_clients_are_each_as_alone(name: str) -> None:
    model, shape = model_of(name)
    n, b = 3, 5
    x, y = batch((n * b, *shape))
    x, y = x.view(n, b, *shape), y.view(n, b)
    y[1, 2:] = IGNORED  # as the filling of a short batch
    torch.manual_seed(3)
    points = model.w + torch.randn(n, len(model.w), dtype=torch.float64) / 10
    g = torch.full_like(points, torch.nan)
    layers = layers_of(model.module)
    assert layers.takes(x, y, many=True)
    losses = layers.gradient(x, y, model.views(points), model.views(g))
    for i in range(n):
        loss, alone = by_autograd(model, x[i], y[i], points[i])
        torch.testing.assert_close(losses[i], loss, rtol=1e-13, atol=0)
        torch.testing.assert_close(g[i], alone, rtol=0, atol=1e-14)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


HOOKS = "before", "after", "way back", "into the way back", "stack", "gradient", "method", "class"


def hooked(kind: str) -> nn.Sequential:
    """A stack in which a hook or a layer doubles a value on the way."""
    net = dense()
    layer = net[2]
    assert isinstance(layer, nn.Linear)
    if kind == "before":
        layer.register_forward_pre_hook(lambda _, inputs: 2 * inputs[0])
    elif kind == "after":
        layer.register_forward_hook(lambda _, __, y: 2 * y)
    elif kind == "way back":
        layer.register_full_backward_hook(lambda _, d, __: (2 * d[0],))
    elif kind == "into the way back":
        layer.register_full_backward_pre_hook(lambda _, d: (2 * d[0],))
    elif kind == "stack":
        net.register_forward_hook(lambda _, __, y: 2 * y)
    elif kind == "gradient":
        cast(Any, layer.weight).register_hook(lambda g: 2 * g)  # which is not annotated
    elif kind == "method":
        vars(layer)["forward"] = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
    else:
        net[2] = Doubled(7, 6)
    return net


@pytest.mark.parametrize("kind", HOOKS)
def test_what_is_hooked_in_happens(kind: str) -> None:
    model = FlatModel(hooked(kind), dtype=torch.float64)
    x, y = batch((6, 5))
    _, g = by_autograd(model, x, y, model.w)
    model.g.zero_()
    SequentialSolver(model, [], F.cross_entropy)._backward(x, y)
    torch.testing.assert_close(model.g, g, rtol=0, atol=1e-14)
    plain = FlatModel(dense(), dtype=torch.float64)
    plain.w.copy_(model.w)
    assert not by_autograd(plain, x, y, plain.w)[1].allclose(g)  # it does make a difference


def test_a_hook_of_all_modules_is_called() -> None:
    modules: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, *_: modules.append(module))
    try:
        model = FlatModel(dense())
        SequentialSolver(model, [], F.cross_entropy)._backward(*batch((6, 5), torch.float32))
    finally:
        handle.remove()
    assert len(modules) == 6  # the layers, and the stack


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(5, 4),
        nn.Sequential(nn.Linear(5, 4), nn.Dropout()),
        nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.Flatten(), nn.Linear(4, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Flatten()),
        nn.Sequential(nn.Conv2d(3, 4, 3)),  # predicts a class for each pixel
        nn.Sequential(nn.Linear(5, 4), nn.Flatten(), nn.Conv2d(3, 4, 3)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 4), nn.Flatten()),  # of each row of pixels
        nn.Sequential(nn.Flatten(0), nn.Linear(5, 4)),
        nn.Sequential(nn.MaxPool2d(2), nn.Flatten()),  # nothing to learn
        nn.Sequential(nn.Sequential(nn.Linear(5, 4)), nn.ReLU()),
    ],
)
def test_of_other_modules_nothing_is_claimed(module: nn.Module) -> None:
    assert layers_of(module) is None


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        ((6, 5), torch.rand(6, 4)),  # a mixture of classes
        ((6, 2, 5), torch.randint(4, (6, 2))),  # several predictions for a sample
        ((2, 6, 5), torch.randint(4, (6,))),
    ],
)
def test_of_other_batches_neither(inputs: tuple[int, ...], targets: Tensor) -> None:
    layers = layers_of(dense())
    assert not layers.takes(torch.zeros(inputs), targets, many=False)
    assert layers.takes(torch.zeros(6, 5), torch.zeros(6, dtype=torch.int64), many=False)
    assert layers.takes(torch.zeros(2, 6, 5), torch.zeros(2, 6, dtype=torch.int64), many=True)
    images = layers_of(model_of("lenet")[0].module)
    assert not images.takes(torch.zeros(2, 6, *IMAGES), torch.zeros(2, 6).long(), many=True)


def halves(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(predictions, targets) / 2


def test_another_loss_and_another_precision_are_autograds() -> None:
    model, shape = model_of("dense", torch.float32)
    x, y = batch((6, *shape), torch.float32)
    _, g = by_autograd(model, x, y, model.w)
    SequentialSolver(model, [], halves)._backward(x, y)
    torch.testing.assert_close(model.g, g / 2)
    SequentialSolver(model, [], F.cross_entropy, "bfloat16")._backward(x, y)
    assert not model.g.equal(g)  # rounded
    torch.testing.assert_close(model.g, g, rtol=0.1, atol=0.01)


def test_the_mistakes_of_a_batch_are_told_as_before() -> None:
    model, shape = model_of("dense")
    x, y = batch((6, *shape))
    solver = SequentialSolver(model, [], F.cross_entropy)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        solver._backward(x[:, :4], y)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        solver._backward(x, y.fill_(7))


def test_local_steps_are_those_with_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> Tensor:
        model, shape = model_of("lenet5", torch.float32)
        data = [batch((6, *shape), torch.float32)] * 3
        config = LocalConfig(0, 1, 0.1, 0.0, 1.0, 0, 0, model.shapes)
        hook = GradientHook(ClientHalf(LocalRule()), Model(model.w), Stateless(), config)
        return SequentialSolver(model, data, F.cross_entropy)(
            model.w.clone(), Direction(), hook
        ).w_K

    ours = steps()
    monkeypatch.setattr("fedaccord.task.solver.layers_of", lambda _: None)
    assert steps().equal(ours)
