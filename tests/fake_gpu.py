"""A fake GPU that counts synchronisations.

Its tensors are PyTorch's fake ones: they know their device and no values, and an operation that
mixes devices raises. What is copied from it is made of ones, and NaN until the host has waited.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fedaccord.data.transforms import _raw_constants
from fedaccord.task.cuda_graphs import run

GPU = torch.device("cuda", 0)
READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")


class FakeGPU(TorchDispatchMode):
    """Counts synchronisations with the GPU; operations on the host are unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.value = 1.0  # of all that is read
        self.sent_bytes = 0  # bytes that went to the GPU
        self.free = 2**30  # bytes that it has
        self._pinned: list[Tensor] = []
        self._pending: list[Tensor] = []

    def pin(self, x: Tensor) -> Tensor:
        pinned = x.clone()
        self._pinned.append(pinned)
        return pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = tree_leaves((args, kwargs))
        fakes = [x for x in parts if isinstance(x, FakeTensor)]
        host = [x for x in parts if isinstance(x, Tensor) and not isinstance(x, FakeTensor)]
        if not fakes and not any(isinstance(x, torch.device) and x.type == "cuda" for x in parts):
            with _disable_current_modes():
                return func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if name == "_to_copy" or name == "copy_":
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
            if host:  # on its way to the GPU
                self.sent_bytes += host[0].nbytes
                waits = waits or not any(_same(host[0], p) for p in self._pinned)
                if waits and host[0].numel():
                    self._wait(f"{name} of {tuple(host[0].shape)} to the GPU")
            elif torch.device(kwargs.get("device") or GPU).type == "cpu":
                return self._come(fakes[0], kwargs, waits)
        elif name in READS or (name == "index" and _by_mask(args[1])):
            self._wait(name)
            if name == "_local_scalar_dense":
                return self.value
        return func(*args, **kwargs)

    def _come(self, x: Tensor, kwargs: Any, waits: bool) -> Tensor:
        dtype = kwargs.get("dtype") or x.dtype
        with _disable_current_modes():
            copy = torch.full(x.shape, self.value, dtype=dtype)
            if dtype.is_floating_point:
                copy.fill_(torch.nan)
        self._pinned.append(copy)
        self._pending.append(copy)
        if waits:
            self._wait(f"copy of {tuple(x.shape)} from the GPU")
        return copy

    def _wait(self, what: str) -> None:
        self.waits.append(what)
        for copy in self._pending:
            with _disable_current_modes():
                copy.fill_(self.value)
        self._pending.clear()


def _same(x: Tensor, pinned: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == pinned.untyped_storage().data_ptr()


def _by_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """A block in which tensors on `GPU` can be used; backward passes return zeros."""
    mode = FakeGPU()

    def grad(_: Tensor, leaves: Any, **more: Any) -> list[Tensor]:
        return [torch.zeros_like(leaf) for leaf in leaves]

    monkeypatch.setattr(torch.autograd, "grad", grad)  # its threads need a driver
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (mode.free, mode.free))
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: mode.pin(x))
    for module in ("solver", "evaluation"):
        name = f"fedaccord.task.{module}.random_numbers"
        monkeypatch.setattr(name, lambda *_: nullcontext())
    for module in ("solver", "cuda_graphs"):  # as it has no driver
        monkeypatch.setattr(f"fedaccord.task.{module}.generators", lambda *_, **__: [])
    name = "fedaccord.task.cuda_graphs.GraphRecorder"
    monkeypatch.setattr(name, lambda _: lambda works: partial(run, works))
    _raw_constants.cache_clear()
    # the first backward pass of a process counts its devices; with one beside the CPU none of its
    # children that it forks may take such a pass
    torch.ones((), requires_grad=True).backward()
    with FakeTensorMode(allow_non_fake_inputs=True), mode:
        yield mode
    _raw_constants.cache_clear()
