"""Values of a module outside its state dict: buffers with ``persistent=False``, and attributes.

They are part of the module's construction; messages and files do not contain them. Each visit of a
client and each evaluation begin with their initial values: nothing passes from one client to the
next, and a cache agrees with its key. PyTorch's own modules change no attributes, unless they have
hooks. Attributes of classes, and the contents of objects other than tensors, arrays, lists, dicts,
sets, deques and tuples, are not reset.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedaccord.task.tensors import storage_of

log = logging.getLogger("flwr")

FIXED = ("torch.", "torchvision.")  # modules whose attributes do not change
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that PyTorch manages
COPIED = (Tensor, np.ndarray, list, dict, set, deque, tuple)  # their contents may change


class _Place(NamedTuple):
    """A part's attributes, or its buffers."""

    path: str
    part: nn.Module
    buffers: Collection[str] | None  # the names that count; None: it has attributes
    before: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """As they are now."""
        return vars(self.part) if self.buffers is None else self.part._buffers

    def names(self) -> list[str]:
        if self.buffers is None:
            return [name for name in self.values if name not in OF_MODULES]
        return [name for name in self.values if name in self.buffers]

    def is_as_before(self) -> bool:
        names, values, before = self.names(), self.values, self.before
        return len(names) == len(before) and all(values[n] is before.get(n) for n in names)


class Unsaved:
    """The initial values of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._saved = _storages(module.state_dict(keep_vars=True).values())
        self._places: list[_Place] = []
        self._insides: list[tuple[Any, Any]] = []  # of tensors and containers, with a copy
        self._warned = False
        seen: set[int] = set()
        for path, part in module.named_modules():
            scratch = part._non_persistent_buffers_set
            is_fixed = _is_fixed(part)
            places = [] if is_fixed else [_Place(path, part, None, {})]
            if scratch or not is_fixed:
                places.append(_Place(path, part, scratch, {}))
            for place in places:
                place.before.update({name: place.values[name] for name in place.names()})
                self._copy(place.before.values(), seen)
            self._places += places

    def _copy(self, values: Iterable[Any], seen: set[int]) -> None:
        """Copy these values and the contents of containers, except the ``seen`` ones."""
        pending = [value for value in values if isinstance(value, COPIED)]
        while pending:
            value = pending.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if _is_full(value) and storage_of(value) not in self._saved:
                    self._insides.append((value, value.detach().clone()))
            elif isinstance(value, np.ndarray):
                if value.flags.writeable:
                    self._insides.append((value, value.copy()))
            else:
                if not isinstance(value, tuple):
                    self._insides.append((value, value.copy()))
                inside = value.values() if isinstance(value, dict) else value
                pending += [inner for inner in inside if isinstance(inner, COPIED)]

    def has_changed(self) -> bool:
        """Whether `reset` would change something."""
        return any(not place.is_as_before() for place in self._places) or any(
            not _is_same(value, copy) for value, copy in self._insides
        )

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the initial values of everything that has changed."""
        for place in self._places:
            if place.is_as_before():
                continue
            self._warn(place)
            values, before = place.values, place.before
            for name in place.names():
                if name not in before:
                    del values[name]
            values.update(before)
        for value, copy in self._insides:
            if isinstance(value, Tensor):
                if value.shape != copy.shape:
                    value.data = copy.clone()
                value.copy_(copy)
            elif isinstance(value, np.ndarray):
                if value.shape != copy.shape:
                    value.resize(copy.shape, refcheck=False)
                value[...] = copy
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(copy)
            else:
                value.clear()
                value.update(copy)

    def _warn(self, place: _Place) -> None:
        """Warn, once, about a number that training changes."""
        for name, before in place.before.items():
            now = place.values.get(name)
            numbers = type(before) in (int, float) and type(now) in (int, float, Tensor)
            if numbers and not self._warned and (isinstance(now, Tensor) or now != before):
                self._warned = True
                log.warning(
                    "model: the number %s changes in training, and restarts at %s in each visit of "
                    "a client and each evaluation; make it a buffer, which `buffers` controls",
                    f"{place.path}.{name}".lstrip("."),
                    before,
                )


def _is_same(value: Any, copy: Any) -> bool:
    """Whether a tensor or array equals its copy, or a container has the same objects."""
    if isinstance(value, Tensor):
        return torch.equal(value, copy)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, copy)
    if len(value) != len(copy):
        return False
    if isinstance(value, dict):
        return all(key in copy and inner is copy[key] for key, inner in value.items())
    if isinstance(value, set):
        return bool(value == copy)
    return all(a is b for a, b in zip(value, copy, strict=True))


def warn_of_views(module: nn.Module, weights: Iterable[Tensor]) -> None:
    """A warning if an attribute is a view of a weight and not computed again before a forward pass.

    A copy of the module has no such view, and the attribute does not follow the training either.
    """
    storages = _storages(weights)
    views = [
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for name, value in (vars(part) | part._buffers).items()
        if not part._forward_pre_hooks and _storages([value]) & storages
    ]
    if views:
        log.warning(
            "model: %s is a view of a weight and does not follow its training; compute it in the "
            "forward pass",
            views[0],
        )


def _is_fixed(part: nn.Module) -> bool:
    """Whether its attributes do not change: its class is PyTorch's own, not a subclass, such as
    one with parametrizations."""
    classes = [each for each in type(part).__mro__ if issubclass(each, nn.Module)]
    hooks = part._forward_hooks or part._forward_pre_hooks
    return not hooks and all(each.__module__.startswith(FIXED) for each in classes)


def _storages(values: Iterable[Any]) -> set[int]:
    """The storages of the tensors among the values."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return {storage_of(tensor) for tensor in tensors if tensor.layout is torch.strided}


def _is_full(tensor: Tensor) -> bool:
    """Whether no two elements share memory, and values may change."""
    if tensor.layout is not torch.strided or tensor.is_inference():
        return False
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size < 2 for size, stride in sizes)
