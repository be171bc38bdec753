from copy import deepcopy
from functools import cache
from importlib.metadata import EntryPoint

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from fedaccord.config import RunConfig
from fedaccord.core import named
from fedaccord.task.models import MODELS, STEMS, build
from tests import own

CIFAR = (3, 32, 32)


@cache
def on_cifar(name):
    """A model that nobody changes."""
    return build(name, CIFAR, 10)


def num_parameters(model):
    return sum(p.numel() for p in model.parameters())


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", 3072 * 10 + 10),
        ("mlp", (3072 * 200 + 200) + (200 * 200 + 200) + (200 * 10 + 10)),
        # conv 4,864 + conv 102,464 + fc 614,784 + fc 73,920 + fc 1,930
        ("lenet", 797_962),
        # conv 456 + conv 2,416 + fc 48,120 + fc 10,164 + fc 850
        ("lenet5", 62_006),
        # conv 896 + conv 18,496 + fc 12,544 * 128 + 128 + fc 1,290
        ("cnn", 1_626_442),
        # ImageNet's 11,689,512 - (512 * 1000 + 1000) + (512 * 10 + 10); GroupNorm has as many
        # parameters as BatchNorm
        ("resnet18", 11_181_642),
        # convolutions of configuration A 9,220,480 + 2 * (512 * 512 + 512) + 512 * 10 + 10
        ("vgg11", 9_750_922),
    ],
)
def test_number_of_parameters_on_cifar10(name, expected):
    assert num_parameters(on_cifar(name)) == expected


# convolutions of each block before its pool, and their padding, as published
BLOCKS = {
    **{"linear": ([], 0), "mlp": ([], 0), "lenet": ([1, 1], 0), "lenet5": ([1, 1], 0)},
    **{"cnn": ([2], 0), "vgg11": ([1, 1, 2, 2, 2], 1)},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_plain_network_is_its_description(name):
    """Each convolution has a ReLU, each block ends in a max-pool; then dense layers with ReLUs."""
    x = torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = deepcopy(on_cifar(name)).double().eval()
    parameters, (blocks, padding), z = iter(model.parameters()), BLOCKS[name], x
    for convolutions in blocks:
        for _ in range(convolutions):
            z = F.relu(F.conv2d(z, next(parameters), next(parameters), padding=padding))
        z = F.max_pool2d(z, 2)
    z, (*hidden, weight, bias) = z.flatten(1), parameters
    for pair in zip(hidden[::2], hidden[1::2], strict=True):
        z = F.relu(F.linear(z, *pair))
    torch.testing.assert_close(model(x), F.linear(z, weight, bias), rtol=1e-10, atol=1e-10)


def test_resnet18_is_torchvisions_with_norms_of_two_groups():
    ours = deepcopy(on_cifar("resnet18"))
    theirs = torchvision.models.resnet18(num_classes=10, norm_layer=lambda n: nn.GroupNorm(2, n))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(ours.double()(x), theirs.double()(x), rtol=1e-10, atol=1e-10)


def test_convolutions_begin_with_hes_variance_of_their_outputs():
    for conv, fan_out in ((on_cifar("vgg11")[0], 64 * 3**2), (on_cifar("resnet18").conv1, 64 * 49)):
        assert float(conv.weight.std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def test_cifar_stem_differs_in_the_first_kernel_only():
    stems = [num_parameters(build("resnet18", CIFAR, 10, stem=stem)) for stem in STEMS]
    assert stems[0] - stems[1] == 3 * 64 * (7 * 7 - 3 * 3)


def test_cifar_stem_keeps_the_resolution():
    sizes = {}
    for stem in STEMS:
        net = build("resnet18", CIFAR, 10, stem=stem)
        net.layer4.register_forward_hook(
            lambda module, x, y, stem=stem: sizes.update({stem: tuple(y.shape[2:])})
        )
        net(torch.zeros(1, *CIFAR))
    assert sizes == {"imagenet": (1, 1), "cifar": (4, 4)}


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("linear", (1, 8, 8), 10),
        ("linear", (20,), 2),
        ("mlp", (1, 8, 8), 10),
        ("mlp", (20,), 3),
        ("lenet", (1, 28, 28), 10),
        ("lenet", (3, 16, 16), 10),
        ("lenet", (3, 32, 40), 100),
        ("lenet5", (1, 28, 28), 10),
        ("lenet5", (3, 16, 16), 10),
        ("cnn", (1, 28, 28), 10),
        ("cnn", (3, 6, 8), 2),
        ("resnet18", (1, 28, 28), 10),
        ("resnet18", (1, 8, 8), 10),
        ("vgg11", (1, 32, 32), 100),
        ("vgg11", (3, 64, 64), 200),
    ],
)
def test_output_shape_and_finite_gradients(name, shape, classes):
    model = build(name, shape, classes)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    logits = model(x)
    assert logits.shape == (2, classes)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


@pytest.mark.parametrize("name", MODELS)
def test_logits_take_both_signs(name):
    x = torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(0))
    logits = on_cifar(name)(x)
    assert logits.min() < 0 < logits.max()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_whole_state(name):
    model = on_cifar(name)
    assert not list(model.buffers())
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    assert all(p.requires_grad for p in model.parameters())


def test_resnet18_normalises_each_sample_alone():
    """GroupNorm: a sample's logits do not depend on the rest of its batch."""
    net = on_cifar("resnet18").train()
    x = torch.randn(4, *CIFAR, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(x)[:1], net(x[:1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("stem", "size", "plain"),
    [
        *(("imagenet", size, n) for size, n in [((32, 32), 15), ((33, 33), 20), ((8, 64), 20)]),
        *(("imagenet", (8, 8), 5), ("cifar", (8, 8), 15)),
    ],
)
def test_products_instead_of_convolutions_give_the_same(stem, size, plain, monkeypatch):
    """plain: how many of the 20 convolutions stay."""
    ours = build("resnet18", (3, *size), 10, stem=stem).double()
    theirs = deepcopy(ours)
    for module in theirs.modules():
        if isinstance(module, nn.Conv2d):
            module.__class__ = nn.Conv2d
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = theirs(x)
    calls, forward = [], nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda m, x: calls.append(m) or forward(m, x))
    result = ours(x)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for logits in (result, expected):
        nn.functional.cross_entropy(logits, torch.tensor([1, 2])).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
    assert len(calls) == plain


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_dropout_drops_a_share_and_scales_the_rest(p):
    dropout = next(m for m in build("cnn", CIFAR, 10) if getattr(m, "p", None) == p)
    assert isinstance(dropout, nn.Dropout)
    x = torch.rand(3, 101, 1001, dtype=torch.float64).add_(1).requires_grad_()
    y = dropout(x)
    y.sum().backward()
    mask = y != 0
    sigma = (p * (1 - p) * x.numel()) ** 0.5
    assert abs(float((~mask).sum()) - p * x.numel()) < 5 * sigma
    torch.testing.assert_close(y, x / (1 - p) * mask, rtol=1e-15, atol=0)
    torch.testing.assert_close(x.grad, mask.double() / (1 - p), rtol=1e-15, atol=0)
    together = (mask[..., 1:] & mask[..., :-1]).double().mean()  # neighbours are independent
    assert abs(float(together) - (1 - p) ** 2) < 5 / x.numel() ** 0.5
    assert torch.equal(dropout.eval()(x), x)


def test_vgg11_logits_depend_on_the_image():
    """Without normalisation the signal must survive the depth: PyTorch's default loses it."""
    net = build("vgg11", CIFAR, 10)
    x = torch.randn(8, *CIFAR, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = net(x).std(dim=0).mean()
        for module in net:
            if isinstance(module, nn.Conv2d):
                module.reset_parameters()
        default = net(x).std(dim=0).mean()
    assert ours > 20 * default


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_a_function_of_its_arguments(name):
    torch.manual_seed(99)
    w = vector(build(name, CIFAR, 10))
    assert torch.equal(w, vector(on_cifar(name)))
    assert not torch.equal(w, vector(build(name, CIFAR, 10, seed=4)))


@pytest.mark.parametrize("name", MODELS)
def test_the_callers_random_numbers_stay_as_they_were(name):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build(name, CIFAR, 10, seed=5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_callers_gpu_random_numbers_stay_as_they_were():
    torch.cuda.manual_seed(1)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(1)
    build("linear", CIFAR, 10, seed=5)
    assert torch.equal(torch.rand(3, device="cuda"), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("resnet", CIFAR, 10),
            "one of linear, mlp, lenet, lenet5, cnn, resnet18, vgg11.*got 'resnet'.*resnet18",
        ),
        (("lenet", (1, 15, 28), 10), "at least 16x16 for lenet, got 15x28"),
        (("lenet5", (1, 15, 16), 10), "at least 16x16 for lenet5, got 15x16"),
        (("cnn", (1, 5, 8), 10), "at least 6x6 for cnn, got 5x8"),
        (("vgg11", (3, 28, 28), 10), "at least 32x32 for vgg11, got 28x28"),
        (("lenet", (64,), 10), r"\(channels, height, width\) for lenet, got \(64,\)"),
        (("resnet18", (8, 8), 10), r"for resnet18, got \(8, 8\)"),
        (("linear", CIFAR, 0), "at least one output, got 0"),
        (("linear", (), 10), r"positive sizes, got \(\)"),
        (("mlp", (3, 0, 8), 10), r"positive sizes, got \(3, 0, 8\)"),
    ],
)
def test_errors_say_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        build(*arguments)
    assert "\n" not in str(error.value)


def test_unknown_stem():
    with pytest.raises(ValueError, match="stem: expected one of imagenet, cifar, got 'cifar10'"):
        build("resnet18", CIFAR, 10, stem="cifar10")


def test_a_function_of_the_users_own_builds_a_model():
    """By the draws of the seed, like ours."""
    model, again = (build("tests.own:tiny", (1, 8, 8), 10, seed=3) for _ in range(2))
    assert torch.equal(vector(model), vector(build("linear", (1, 8, 8), 10, seed=3)))
    assert torch.equal(vector(model), vector(again))
    assert not torch.equal(vector(model), vector(build("tests.own:tiny", (1, 8, 8), 10, seed=4)))


def test_a_function_builds_a_new_model_at_each_call(monkeypatch):
    """Else two models train one tensor. What is frozen may be shared."""
    layer = nn.Linear(3, 4)
    make = lambda: nn.Sequential(layer, nn.Linear(4, 2))  # noqa: E731
    monkeypatch.setattr(own, "shared", make, raising=False)
    first = build("tests.own:shared", (3,), 2)
    with pytest.raises(ValueError, match=r"a new model at each call, got 0.weight of an earlier"):
        build("tests.own:shared", (3,), 2)
    assert first[0] is layer
    frozen = nn.Linear(3, 4).requires_grad_(False)
    monkeypatch.setattr(own, "shared", lambda: nn.Sequential(frozen, nn.Linear(4, 2)))
    assert build("tests.own:shared", (3,), 2)[0] is build("tests.own:shared", (3,), 2)[0]


def test_a_function_that_returns_no_module_is_refused():
    with pytest.raises(ValueError, match=r"^model: expected tests.own:no_module to return a torch"):
        build("tests.own:no_module", (3,), 2)


def test_a_package_gives_its_model_a_name(monkeypatch):
    entry = EntryPoint("my-net", "tests.own:tiny", "fedaccord.models")
    monkeypatch.setattr(named, "entry_points", lambda group, name: [entry] * (name == "my-net"))
    config = RunConfig.make({"model": "my-net"})
    model = build(config.task.model, (1, 8, 8), 10)
    assert torch.equal(vector(model), vector(build("tests.own:tiny", (1, 8, 8), 10)))
    with pytest.raises(ValueError, match=r"^model: expected one of .*, got 'my-met'"):
        RunConfig.make({"model": "my-met"})
