"""The tensors that a model may have, their dtype, and where its modules use them."""

import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedaccord.core.request import BUFFER_POLICIES

log = logging.getLogger("flwr")  # what a run prints


def buffers_of(module: nn.Module, policy: str) -> list[str]:
    """The names of persistent buffers. Raises ValueError if there are some and they are refused."""
    if policy not in BUFFER_POLICIES:
        raise ValueError(f"buffers: expected one of {', '.join(BUFFER_POLICIES)}, got {policy!r}")
    persistent = module.state_dict().keys()
    names = [name for name, _ in module.named_buffers() if name in persistent]
    if names and policy == "refuse":
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            f"model: expected one without buffers, {type(module).__name__} has {names[0]!r}{more}: "
            "choose buffers=freeze (keep their values), mean (average them over the clients) or "
            "local (each client its own), or replace BatchNorm by GroupNorm"
        )
    return names


def check_values(
    module: nn.Module, policy: str, names: Iterable[str], dtype: torch.dtype | None
) -> None:
    """Raise ValueError for tensors that a vector of real numbers cannot hold.

    names: those of `buffers_of`; dtype: of the vector; None: of the module's tensors.
    """
    if any(is_lazy(p) for p in module.parameters()):
        raise ValueError(
            f"model: expected parameters with values, {type(module).__name__} has a lazy one: "
            "call it on a batch first, or give the sizes of its inputs"
        )
    if any(p.is_meta for p in module.parameters()):
        raise ValueError(
            f"model: expected parameters with values, {type(module).__name__} has one on the "
            "device meta: build it on the CPU"
        )
    buffers = dict(module.named_buffers())
    own = {name: buffers[name] for name in names} if policy in ("mean", "local") else {}
    for name, tensor in (*module.named_parameters(), *own.items()):
        if tensor.is_complex():
            raise ValueError(
                f"model: expected real numbers, {name} is {tensor.dtype}: store "
                "torch.view_as_real of it, or a complex buffer with persistent=False"
            )
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"model: expected no hook on accumulated gradients, {name} has one, which no step "
                "calls: use register_hook"
            )
    for name, b in own.items():
        if not b.is_floating_point() and not torch.equal(b.to(dtype or b.dtype).to(b.dtype), b):
            raise ValueError(
                f"model: expected integers that {dtype} holds with buffers={policy}, got larger "
                f"ones in {name}: register it with persistent=False"
            )


def cast(
    module: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Module:
    """The module itself, on the device, with its floating tensors in ``dtype`` and its complex
    buffers in the complex one."""
    complex_buffers = [
        (owner, name, b)
        for owner in module.modules()
        for name, b in owner._buffers.items()
        if b is not None and b.is_complex()
    ]
    for owner, name, _ in complex_buffers:  # Module.to would drop their imaginary parts
        owner._buffers[name] = None
    module.to(device=device, dtype=dtype)
    for owner, name, b in complex_buffers:
        owner._buffers[name] = b.to(device=device, dtype=dtype.to_complex() if dtype else None)
    return module


def check_dense(module: nn.Module) -> None:
    """Raise ValueError for a trained table whose gradients are sparse."""
    for name, part in module.named_modules():
        is_table = isinstance(part, nn.Embedding | nn.EmbeddingBag)
        if is_table and part.sparse and part.weight.requires_grad:
            raise ValueError(
                f"model: expected dense gradients, {name or type(module).__name__} has "
                "sparse=True: leave it out, or freeze the table"
            )


def storage_of(tensor: Tensor) -> int:
    """An id that tensors share if they share memory, also on a fake device."""
    address: int = tensor.untyped_storage()._cdata
    return address


def hidden_matrices(module: nn.Module) -> set[int]:
    """The ids of the parameters of two and more dimensions, without embeddings and the last one,
    which is the output layer and may be tied to an embedding."""
    matrices, tables = [], set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = module.get_submodule(name.rpartition(".")[0])
        if "embed" in name.lower() or isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            tables.add(id(parameter))
        elif parameter.dim() > 1:
            matrices.append(id(parameter))
    return {*matrices} - tables - {*matrices[-1:]}


def uses(module: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[str, int]]:
    """(name, index in ``parameters``) of each attribute of a module that is one of them; of a
    module with several names the first, as `torch.func.functional_call` needs it."""
    index = {id(p): i for i, p in enumerate(parameters)}
    seen: set[tuple[int, str]] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        use = id(module.get_submodule(path)), attribute
        if id(parameter) in index and use not in seen:
            seen.add(use)
            yield name, index[id(parameter)]


def begin_training(module: nn.Module, train: Callable[[], None]) -> None:
    """Switch to training mode by ``train``; warn if a part of a module in training mode had been
    put into evaluation mode, and does not stay there."""
    still = [(n, m) for n, m in module.named_modules() if module.training and not m.training]
    train()
    if changed := [name for name, part in still if part.training]:
        log.warning(
            "model: %s is in evaluation mode, but clients train in training mode: to keep it, "
            "override its method train by one that returns super().train(False), or set "
            "buffers=freeze if it has buffers",
            changed[0],
        )


def warn_of_training(module: nn.Module) -> None:
    """A warning if a part of a module is in training mode after its `eval()`."""
    parts = [name or type(part).__name__ for name, part in module.named_modules() if part.training]
    if parts:
        log.warning(
            "model: %s stays in training mode after eval(), in evaluations too: its method train, "
            "or that of a module around it, must call super().train(mode), or super().train(False) "
            "to stay in evaluation mode",
            parts[0],
        )
