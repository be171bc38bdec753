"""The models of the papers, by name; the parameters are their whole state, without statistics.

linear, mlp, lenet, lenet5 and cnn start from PyTorch's default initialisation, resnet18 and vgg11
from torchvision's for convolutions, He's normal with fan-out.
"""

import inspect
from collections.abc import Callable
from functools import partial
from math import prod
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord.core import named
from fedaccord.core.options import did_you_mean
from fedaccord.data.seeding import seeded
from fedaccord.task.transformer import Transformer

Shape = tuple[int, ...]  # of one sample: (channels, height, width) or (features,)

FUNCTIONS = named.Functions("fedaccord.models")
_BUILT: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # by id, of functions
STEMS = {"imagenet": (7, 2, 3), "cifar": (3, 1, 1)}  # kernel, stride, padding of ResNet's conv1


def build(
    name: str,
    shape: Shape,
    classes: int,
    *,
    stem: str = "imagenet",
    vocabulary: int = 0,
    seed: int = 0,
) -> nn.Module:
    """A freshly initialised model, a pure function of the arguments.

    name: of `MODELS`, an entry point of the group ``fedaccord.models``, or
        ``package.module:function``, a function of some of shape, classes, vocabulary, or of none.
    shape: of one sample, (channels, height, width) or, for linear and mlp, also (features,).
    classes: number of classes, or of predicted numbers: the model's outputs.
    vocabulary: number of token ids, if samples are tokens; 0: they are not.
    stem: of resnet18: ``imagenet`` (7x7 stride 2, max-pool; the papers' code) or ``cifar``
        (3x3 stride 1, no pool).

    Raises ValueError, in one line, for an unknown name or stem, for a shape that the model does not
    support, and if the function cannot be imported, fails, or returns anything but a module.
    """
    path = "" if name in NAMES else FUNCTIONS.path(name)
    choices = TEXT_MODELS if vocabulary else MODELS
    if name not in choices and not path:
        hint = did_you_mean(name, choices)
        what = "tokens" if vocabulary else "images or features"
        floats = "; integers are tokens, make features floats" if vocabulary else ""
        raise ValueError(
            f"model: expected one of {', '.join(choices)}, or {named.FORM}, for {what}, got "
            f"{name!r}{hint}{floats}"
        )
    if stem not in STEMS:
        raise ValueError(f"stem: expected one of {', '.join(STEMS)}, got {stem!r}")
    if classes < 1:
        raise ValueError(f"model: expected at least one output, got {classes}")
    if not shape or min(shape) < 1:
        raise ValueError(f"model: expected samples of positive sizes, got {tuple(shape)}")
    with seeded(seed):
        if name in TEXT_MODELS:
            return TEXT_MODELS[name](vocabulary, shape[0], classes)
        if name in MODELS:
            return MODELS[name](shape, classes, stem)
        offered = {"shape": tuple(shape), "classes": classes, "vocabulary": vocabulary}
        module = named.call("model", path, offered)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"model: expected {path} to return a torch.nn.Module, got a {type(module).__name__}"
        )
    for part, parameter in module.named_parameters():
        if _BUILT.get(id(parameter)) is parameter:
            raise ValueError(
                f"model: expected {path} to build a new model at each call, got {part} of an "
                "earlier one, which is trained: return copy.deepcopy(...) of what calls share"
            )
    _BUILT.update((id(p), p) for p in module.parameters() if p.requires_grad)
    return module


def vocabulary_of(name: str, *inputs: Tensor) -> int:
    """The number of token ids for a model of tokens: the largest of integer inputs plus one; 0:
    inputs are not integers.

    Raises ValueError for an id below 0, unless the model is a function that does not read it.
    """
    if name in MODELS or any(x.dtype not in (torch.int32, torch.int64) for x in inputs):
        return 0
    low = min((int(x.min()) for x in inputs if x.numel()), default=0)
    if low < 0 and (name in TEXT_MODELS or _reads_vocabulary(FUNCTIONS.path(name))):
        raise ValueError(f"model: expected token ids from 0 on as inputs of {name}, got {low}")
    return 1 + max((int(x.max()) for x in inputs if x.numel()), default=-1)


def _reads_vocabulary(path: str) -> bool:
    """Whether a function has this parameter; False for an empty path."""
    called = named.function("model", path) if path else None
    return called is not None and "vocabulary" in inspect.signature(called).parameters


def linear(shape: Shape, classes: int, stem: str) -> nn.Module:
    """Softmax regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def mlp(shape: Shape, classes: int, stem: str) -> nn.Module:
    """The 2NN of arXiv:1602.05629: two hidden layers of 200."""
    return nn.Sequential(nn.Flatten(), *_dense(prod(shape), 200, 200, classes))


def lenet(shape: Shape, classes: int, stem: str) -> nn.Module:
    """The 64-64-384-192 LeNet of the papers' code; 797,962 parameters on CIFAR-10."""
    channels, height, width = _image("lenet", shape, smallest=16)
    left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]  # after conv, pool, conv, pool
    return ChannelsLast(
        nn.Conv2d(channels, 64, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),  # after the pool: the same values and gradients from a quarter of the work
        nn.Conv2d(64, 64, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        *_dense(64 * prod(left), 384, 192, classes),
    )


def lenet5(shape: Shape, classes: int, stem: str) -> nn.Module:
    """LeNet-5's 6-16-120-84 with ReLU and max-pools; 62,006 parameters on CIFAR-10.

    The network of PyTorch's and Flower's first examples, and of BlazeFL's benchmark
    (arXiv:2604.03606).
    """
    channels, height, width = _image("lenet5", shape, smallest=16)
    left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]  # after conv, pool, conv, pool
    return ChannelsLast(
        nn.Conv2d(channels, 6, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),  # after the pool, as in lenet
        nn.Conv2d(6, 16, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        *_dense(16 * prod(left), 120, 84, classes),
    )


def cnn(shape: Shape, classes: int, stem: str) -> nn.Module:
    """Two unpadded 3x3 convolutions, a pool, dropout; 1,626,442 parameters on CIFAR-10.

    The CIFAR-10 model of pfl-research's benchmarks (arXiv:2404.06430).
    """
    channels, height, width = _image("cnn", shape, smallest=6)
    left = [(side - 4) // 2 for side in (height, width)]  # after two convolutions and the pool
    return ChannelsLast(
        nn.Conv2d(channels, 32, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.MaxPool2d(2),
        nn.ReLU(),  # after the pool, as in lenet
        nn.Flatten(),
        Dropout(0.25),
        nn.Linear(64 * prod(left), 128),
        nn.ReLU(),
        Dropout(0.5),
        nn.Linear(128, classes),
    )


def resnet18(shape: Shape, classes: int, stem: str) -> nn.Module:
    """ResNet-18 with GroupNorm of 2 groups for BatchNorm; 11,181,642 parameters on CIFAR-10."""
    channels, _, _ = _image("resnet18", shape)
    import torchvision  # imports as slowly as torch, and few runs need it

    net: nn.Module = torchvision.models.resnet18(
        num_classes=classes, norm_layer=partial(nn.GroupNorm, 2)
    )
    kernel, stride, padding = STEMS[stem]
    net.conv1 = _he(nn.Conv2d(channels, 64, kernel, stride, padding, bias=False))
    if stem == "cifar":
        net.maxpool = nn.Identity()
    for name, module in [*net.named_modules()]:
        if isinstance(module, nn.Conv2d):
            net.set_submodule(name, _Conv2d.of(module))
    return net


def vgg11(shape: Shape, classes: int, stem: str) -> nn.Module:
    """VGG-11 without normalisation or dropout; 9,750,922 parameters on CIFAR-10.

    The form usual for CIFAR: the convolutions of configuration A (arXiv:1409.1556), five
    max-pools, then 512-512-512-classes instead of ImageNet's 25088-4096-4096-classes. Larger
    images are averaged to 1x1 before the classifier.
    """
    channels, _, _ = _image("vgg11", shape, smallest=32)
    # PyTorch's default initialisation would shrink the signal in each of the eight convolutions:
    # with no normalisation to restore it, the logits hardly depend on the image and SGD stays
    # at chance level.
    features: list[nn.Module] = []
    for block in ([64], [128], [256, 256], [512, 512], [512, 512]):
        for width in block:
            features += [_he(nn.Conv2d(channels, width, kernel_size=3, padding=1)), nn.ReLU()]
            channels = width
        features += [nn.MaxPool2d(2)]
    return nn.Sequential(
        *features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *_dense(512, 512, 512, classes)
    )


MODELS: dict[str, Callable[[Shape, int, str], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "lenet": lenet,
    "lenet5": lenet5,
    "cnn": cnn,
    "resnet18": resnet18,
    "vgg11": vgg11,
}
TEXT_MODELS = {"transformer": Transformer}  # of tokens
NAMES = (*MODELS, *TEXT_MODELS)


class ChannelsLast(nn.Sequential):
    """Layers that process images channels-last on a CPU, where pooling is vectorised in that
    layout.

    Shapes and parameters do not change. It saves a quarter of a LeNet step; GroupNorm becomes
    slower, so ResNet does not use it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            x = x.contiguous(memory_format=torch.channels_last)
        for layer in self:
            x = layer(x)
        return x


class Dropout(nn.Dropout):
    """Dropout with p in 256ths; on a CPU it draws a random byte for each value instead of a float,
    which took a tenth of the CNN's step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or x.device.type != "cpu":
            return super().forward(x)
        return x * self.mask(x)

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """The factors of x, on a CPU: 0, or 1 / (1 - p)."""
        words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 8),))  # int64
        keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= round(256 * self.p)
        return keep.to(x.dtype).mul_(1 / (1 - self.p))


class _Conv2d(nn.Conv2d):
    """A convolution with an output of one pixel per image, such as ResNet's last on 32x32 images,
    as a matrix product on a CPU: oneDNN's backward pass takes several times as long.

    Of square kernels and maps, without groups and dilation.
    """

    @classmethod
    def of(cls, conv: nn.Conv2d) -> "_Conv2d":
        """The same convolution, without a bias, with the same weight."""
        sizes = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
        own = cls(conv.in_channels, conv.out_channels, *sizes, bias=False, device="meta")
        own.weight = conv.weight
        return own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        k, stride, pad = self.kernel_size[0], self.stride[0], int(self.padding[0])
        if x.device.type != "cpu" or height != width or width + 2 * pad - k >= stride:
            return super().forward(x)
        if width == 1:  # a pixel meets one weight
            weight = self.weight.flatten(2)[..., pad * (k + 1)]
        else:
            weight = self.weight.flatten(1)
            x = F.pad(x, (pad, k - pad - width) * 2)  # to the size of the kernel
        return F.linear(x.flatten(1), weight, self.bias)[:, :, None, None]


def _dense(inputs: int, *outputs: int) -> list[nn.Module]:
    """Linear layers with a ReLU between each two."""
    layers: list[nn.Module] = []
    for size in outputs:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return layers[:-1]


def _he(conv: nn.Conv2d) -> nn.Conv2d:
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def _image(name: str, shape: Shape, smallest: int = 1) -> Shape:
    if len(shape) != 3:
        raise ValueError(
            f"model: expected samples of shape (channels, height, width) for {name}, got "
            f"{tuple(shape)}; use linear or mlp for flat features"
        )
    if min(shape[1:]) < smallest:
        raise ValueError(
            f"model: expected images of at least {smallest}x{smallest} for {name}, got "
            f"{shape[1]}x{shape[2]}; use linear or mlp"
        )
    return shape
