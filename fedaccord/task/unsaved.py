"""What a module has beside its state dict: buffers with ``persistent=False``, tensors and numbers.

They are part of how the module is built: no message and no file has them. A visit of a client and
an evaluation begin with their initial values, so that nothing passes from one client to the next.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

FIXED = ("torch.nn.", "torchvision.")  # modules of which no number changes


class _Tensor(NamedTuple):
    of: nn.Module
    name: str
    tensor: Tensor
    value: Tensor  # a copy
    version: int  # in-place changes of the tensor when it had this value


class Unsaved:
    """The initial values of one module; attributes of other types, such as lists, stay."""

    def __init__(self, module: nn.Module) -> None:
        saved = module.state_dict().keys()
        self._tensors: list[_Tensor] = []
        self._others: list[tuple[nn.Module, str, float | None]] = []  # numbers, and None
        for path, part in module.named_modules():
            prefix = f"{path}." if path else ""
            buffers = {n: b for n, b in part._buffers.items() if prefix + n not in saved}
            has_numbers = not type(part).__module__.startswith(FIXED)
            for name, value in (*buffers.items(), *vars(part).items()):
                if isinstance(value, Tensor) and not value.is_inference():
                    self._hold(part, name, value, value.detach().clone())
                elif has_numbers and (value is None or type(value) in (int, float)):
                    self._others.append((part, name, value))

    def _hold(self, part: nn.Module, name: str, tensor: Tensor, value: Tensor) -> None:
        self._tensors.append(_Tensor(part, name, tensor, value, tensor._version))

    @torch.no_grad()
    def reset(self) -> None:
        """Set what has changed since the last time to its initial value."""
        before, self._tensors = self._tensors, []
        for part, name, tensor, value, version in before:
            if tensor._version != version:
                tensor.copy_(value)
            if getattr(part, name) is not tensor:
                setattr(part, name, tensor)
            self._hold(part, name, tensor, value)
        for part, name, other in self._others:
            now = vars(part).get(name)
            if isinstance(now, Tensor) or (other is not None and now != other):
                setattr(part, name, other)
