"""The gradient of a plain stack of layers under cross-entropy, without PyTorch's autograd.

Autograd's bookkeeping costs more than the passes of a small layer, and its results must be copied
to g. Here PyTorch's own passes are called one after another and write to g: for one client the
results equal autograd's bit for bit.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from fedaccord.data.samples import IGNORED
from fedaccord.task.models import ChannelsLast, Dropout

Parameters = Sequence[Tensor]  # of a layer: none, a weight, or a weight and a bias
MEAN, NONE = 1, 0  # PyTorch's numbers of a loss's reductions
aten = torch.ops.aten


class Layer:
    """Forward and backward pass of a layer, for one client, x (b, ...), or for ``many``, x (n, b,
    ...)."""

    dims: ClassVar[int] = 0  # dimensions of one client's x; 0: any
    takes_many: ClassVar[bool] = False

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def is_known(self) -> bool:
        """Whether this module supports the layer's settings."""
        return True

    @property
    def count(self) -> int:
        """Its number of parameters."""
        return sum(p is not None for p in self.layer._parameters.values())

    def forward(self, x: Tensor, p: Parameters, many: bool) -> tuple[Tensor, Any]:
        """The output, and the values that the backward pass needs; x is not changed."""
        raise NotImplementedError

    def backward(self, dy: Tensor, saved: Any, p: Parameters, g: Parameters, on: bool) -> Any:
        """Write the gradients of ``p`` to ``g``; returns that of x if the pass goes ``on``."""
        raise NotImplementedError


class Linear(Layer):
    dims = 2
    takes_many = True

    def forward(self, x: Tensor, p: Parameters, many: bool) -> tuple[Tensor, Any]:
        weight, *bias = p
        if not many:
            return F.linear(x, weight, *bias), x
        return torch.baddbmm(bias[0].unsqueeze(1), x, weight.mT) if bias else x @ weight.mT, x

    def backward(self, dy: Tensor, saved: Any, p: Parameters, g: Parameters, on: bool) -> Any:
        if dy.dim() == 2:
            torch.mm(dy.t(), saved, out=g[0])
        else:  # whose gradients would be copied to the rows of g client by client
            g[0].copy_(dy.mT @ saved)
        for g_bias in g[1:]:
            torch.sum(dy, -2, out=g_bias)
        return dy @ p[0] if on else None


class ReLU(Layer):
    takes_many = True

    def forward(self, x: Tensor, p: Parameters, many: bool) -> tuple[Tensor, Any]:
        y = torch.relu(x)
        return y, y

    def backward(self, dy: Tensor, saved: Any, p: Parameters, g: Parameters, on: bool) -> Any:
        return aten.threshold_backward.default(dy, saved, 0)


class Flatten(Layer):
    takes_many = True

    @property
    def is_known(self) -> bool:
        return (self.layer.start_dim, self.layer.end_dim) == (1, -1)

    def forward(self, x: Tensor, p: Parameters, many: bool) -> tuple[Tensor, Any]:
        return x.flatten(1 + many), x.shape

    def backward(self, dy: Tensor, saved: Any, p: Parameters, g: Parameters, on: bool) -> Any:
        return dy.view(saved)


class Convolution(Layer):
    dims = 4

    @property
    def is_known(self) -> bool:
        return self.layer.padding_mode == "zeros" and not isinstance(self.layer.padding, str)

    def forward(self, x: Tensor, p: Parameters, many: bool) -> tuple[Tensor, Any]:
        conv, bias = self.layer, p[1] if len(p) == 2 else None
        return F.conv2d(x, p[0], bias, conv.stride, conv.padding, conv.dilation, conv.groups), x

    def backward(self, dy: Tensor, saved: Any, p: Parameters, g: Parameters, on: bool) -> Any:
        conv, has_bias = self.layer, len(p) == 2
        dx, *gradients = aten.convolution_backward.default(
            dy,
            saved,
            p[0],
            [conv.out_channels] if has_bias else None,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,  # not transposed
            [0, 0],  # output padding
            conv.groups,
            [on, True, has_bias],  # the gradients to compute: of x, weight and bias
        )
        for ours, its in zip(g, gradients, strict=False):
            ours.copy_(its)
        return dx


class MaxPool(Layer):
    dims = 4

    def __init__(self, layer: nn.MaxPool2d) -> None:
        super().__init__(layer)
        size, stride, padding, dilation = (
            [side, side] if isinstance(side, int) else [*side]
            for side in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        )
        self.how = size, stride, padding, dilation, layer.ceil_mode

    @property
    def is_known(self) -> bool:
        return not self.layer.return_indices

    def forward(self, x: Tensor, p: Parameters, many: bool) -> tuple[Tensor, Any]:
        y, indices = aten.max_pool2d_with_indices.default(x, *self.how)
        return y, (x, indices)

    def backward(self, dy: Tensor, saved: Any, p: Parameters, g: Parameters, on: bool) -> Any:
        x, indices = saved
        return aten.max_pool2d_with_indices_backward.default(dy, x, *self.how, indices)


class Masked(Layer):
    """Dropout with a random mask."""

    def forward(self, x: Tensor, p: Parameters, many: bool) -> tuple[Tensor, Any]:
        mask = self.layer.mask(x)
        return x * mask, mask

    def backward(self, dy: Tensor, saved: Any, p: Parameters, g: Parameters, on: bool) -> Any:
        return dy * saved


PASSES = "forward_pre", "forward", "backward_pre", "backward"  # in the names of PyTorch's hooks
STACKS = nn.Sequential, ChannelsLast
KNOWN: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: Linear,
    nn.ReLU: ReLU,
    nn.Flatten: Flatten,
    nn.Conv2d: Convolution,
    nn.MaxPool2d: MaxPool,
    Dropout: Masked,
}


class Layers:
    """The layers of a module, one after another."""

    def __init__(self, layers: Iterable[Layer], dims: int, channels_last: bool) -> None:
        self.dims = dims  # of one client's inputs; 0: any
        self.channels_last = channels_last
        self.layers: list[tuple[Layer, slice]] = []  # each with its index among the parameters
        end = 0
        for layer in layers:
            self.layers.append((layer, slice(end, end := end + layer.count)))
        # the backward pass ends at the first layer with parameters
        self._end = next(i for i, (_, own) in enumerate(self.layers) if own.stop)
        self._takes_many = all(layer.takes_many for layer, _ in self.layers)

    def takes(self, inputs: Tensor, targets: Tensor, *, many: bool) -> bool:
        """Whether these are a batch and its classes, or ``many`` such batches of equal form."""
        fits = targets.dim() == 1 + many and self.dims in (0, inputs.dim() - many)
        return fits and (self._takes_many or not many)

    @torch.no_grad()
    def gradient(self, inputs: Tensor, targets: Tensor, p: Parameters, g: Parameters) -> Tensor:
        """The loss () of a batch or those (n,) of a stack; writes the gradients to ``g``."""
        many = targets.dim() == 2
        x = inputs.contiguous(memory_format=torch.channels_last) if self.channels_last else inputs
        left: list[Any] = []
        for layer, own in self.layers:
            x, saved = layer.forward(x, p[own], many)
            left.append(saved)
        loss, dy = cross_entropies(x, targets) if many else cross_entropy(x, targets)
        for i in range(len(left) - 1, self._end - 1, -1):
            layer, own = self.layers[i]
            dy = layer.backward(dy, left[i], p[own], g[own], i > self._end)
        return loss


def layers_of(module: nn.Module) -> Layers | None:
    """The layers of a module; None: not a plain stack of known layers."""
    if not isinstance(module, nn.Sequential) or type(module) not in STACKS or not is_plain(module):
        return None
    first = dims = 0  # of a batch: of the first layer's input, and of the current one
    layers = []
    for child in module:
        kind = KNOWN.get(type(child))
        layer = kind(child) if kind and is_plain(child) else None
        if layer is None or not layer.is_known or (dims and layer.dims not in (0, dims)):
            return None
        if layer.dims and not dims:
            first = dims = layer.dims
        if isinstance(layer, Flatten):
            dims = 2
        layers.append(layer)
    if dims != 2 or not any(layer.count for layer in layers):
        return None
    return Layers(layers, first, isinstance(module, ChannelsLast))


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module executes only its own passes, without hooks or overrides."""
    if any(getattr(modules, f"_global_{when}_hooks") for when in PASSES):
        return False
    hooks = (
        *(getattr(module, f"_{when}_hooks") for when in PASSES),
        *(p._backward_hooks for p in module._parameters.values() if p is not None),
    )
    return not any(hooks) and "forward" not in vars(module)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a part of the module, or one of its parameters, has a hook of the backward pass."""
    return any(p._backward_hooks for p in module.parameters()) or any(
        part._backward_hooks or part._backward_pre_hooks for part in module.modules()
    )


def cross_entropy(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean () over the targets (b,) that count, and its gradient, as predictions (b, c)."""
    logs = torch.log_softmax(predictions, -1)
    loss, count = aten.nll_loss_forward.default(logs, targets, None, MEAN, IGNORED)
    one = torch.ones_like(loss)
    d_logs = aten.nll_loss_backward.default(one, logs, targets, None, MEAN, IGNORED, count)
    return loss, aten._log_softmax_backward_data.default(d_logs, logs, -1, logs.dtype)


def cross_entropies(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same of n clients: (n,), and as predictions (n, b, c); targets: (n, b)."""
    logs = torch.log_softmax(predictions, -1)
    rows, classes = logs.flatten(0, 1), targets.flatten()
    values, count = aten.nll_loss_forward.default(rows, classes, None, NONE, IGNORED)
    counted = (targets != IGNORED).sum(1)
    ones = torch.ones_like(targets, dtype=logs.dtype).div_(counted[:, None]).flatten()
    d_rows = aten.nll_loss_backward.default(ones, rows, classes, None, NONE, IGNORED, count)
    d_logs = d_rows.view_as(logs)
    losses = values.view_as(targets).sum(1) / counted
    return losses, aten._log_softmax_backward_data.default(d_logs, logs, -1, logs.dtype)
