"""What a module has beside its state dict: buffers with ``persistent=False``, and attributes.

They are part of how the module is built: no message and no file has them. A visit of a client and
an evaluation begin with their initial values, all of them, so that nothing passes from one client
to the next and a cache agrees with its key. Attributes of PyTorch's own modules do not change; an
object in an attribute that is no tensor, array, list, dict, set or deque keeps its own insides.
"""

import logging
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger("flwr")

FIXED = ("torch.", "torchvision.")  # modules whose attributes do not change
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that PyTorch manages


class _Place(NamedTuple):
    """A part's attributes, or its buffers."""

    path: str
    values: dict[str, Any]  # now
    buffers: Collection[str] | None  # the names that count; None: it has attributes
    before: dict[str, Any]

    def names(self) -> list[str]:
        if self.buffers is None:
            return [name for name in self.values if name not in OF_MODULES]
        return [name for name in self.values if name in self.buffers]


class Unsaved:
    """The initial values of one module."""

    def __init__(self, module: nn.Module) -> None:
        saved = module.state_dict(keep_vars=True).values()
        self._saved = {_storage(tensor) for tensor in saved if isinstance(tensor, Tensor)}
        self._places: list[_Place] = []
        self._insides: list[tuple[Any, Any]] = []  # of tensors and containers, with a copy
        self._warned = False
        for path, part in module.named_modules():
            is_fixed = type(part).__module__.startswith(FIXED)
            scratch = part._non_persistent_buffers_set
            places = [] if is_fixed else [_Place(path, vars(part), None, {})]
            if scratch or not is_fixed:
                places.append(_Place(path, part._buffers, scratch, {}))
            for place in places:
                place.before.update({name: place.values[name] for name in place.names()})
                for value in place.before.values():
                    self._copy(value)
            self._places += places

    def _copy(self, value: Any, nested: bool = True) -> None:
        if isinstance(value, Tensor):
            if not value.is_inference() and _storage(value) not in self._saved and _is_full(value):
                self._insides.append((value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._insides.append((value, value.copy()))
        elif nested and isinstance(value, list | dict | set | deque):
            self._insides.append((value, value.copy()))
            for inner in value.values() if isinstance(value, dict) else value:
                self._copy(inner, nested=False)

    @torch.no_grad()
    def reset(self) -> None:
        """Set what has changed to its initial value."""
        for place in self._places:
            names, values, before = place.names(), place.values, place.before
            if len(names) == len(before) and all(values[n] is before.get(n) for n in names):
                continue
            self._warn(place)
            for name in names:
                if name not in before:
                    del values[name]
            values.update(before)
        for value, copy in self._insides:
            if isinstance(value, Tensor):
                value.copy_(copy)
            elif isinstance(value, np.ndarray):
                value[...] = copy
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(copy)
            else:
                value.clear()
                value.update(copy)

    def _warn(self, place: _Place) -> None:
        """Once, of a number that training changes."""
        for name, before in place.before.items():
            now = place.values.get(name)
            numbers = type(before) in (int, float) and type(now) in (int, float, Tensor)
            if numbers and not self._warned and (isinstance(now, Tensor) or now != before):
                self._warned = True
                log.warning(
                    "model: the number %s changes in training, and begins at %s in each visit of a "
                    "client and each evaluation; make it a buffer, which is kept as `buffers` says",
                    *(f"{place.path}.{name}".lstrip("."), before),
                )


def _storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common, also those of a fake device."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _is_full(tensor: Tensor) -> bool:
    """Whether each element has a place of its own."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size < 2 for size, stride in sizes)
