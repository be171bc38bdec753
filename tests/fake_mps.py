"""Fake tensors on Apple's GPU, which has no float64: one that is made raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeMPS(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == "mps" and x.dtype == torch.float64:
                raise TypeError(f"MPS has no float64: {func}")
        return result


@contextmanager
def fake_mps() -> Iterator[None]:
    """A block in which tensors with device="mps" can be used; they have no values."""
    with FakeTensorMode(allow_non_fake_inputs=True), FakeMPS():
        yield
