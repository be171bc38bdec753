"""A module whose parameters live in one flat vector."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class FlatModel:
    """A module together with its flat parameter vector w and flat gradient g.

    The module's parameters are views into ``w`` and their ``.grad`` are views into ``g``, in the
    order of ``module.parameters()``: a step on ``w`` is a step of the model, and a backward pass
    adds into ``g``. Nothing is copied between the two.

    w, g: (d,) of one dtype on one device.

    Raises ValueError for a model that cannot be exchanged as its parameters alone: one with
    running statistics or other persistent buffers, or without trainable parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_exchangeable(module)
        self.by_sample: bool | None = None  # whether predictions go by sample, once that was tried
        self.module = module.to(device=device, dtype=dtype)
        self.parameters = list(self.module.parameters())
        self.names = [name for name, _ in self.module.named_parameters()]
        self.shapes = [p.shape for p in self.parameters]
        self.embeddings = [
            i
            for i, name in enumerate(self.names)
            if "embed" in name.lower() or self._is_table(name)
        ]
        self.w = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.g = torch.zeros_like(self.w)
        self._point(self.w)
        self.gradients = self.views(self.g)
        for p, g_p in zip(self.parameters, self.gradients, strict=True):
            p.grad = g_p

    def _is_table(self, name: str) -> bool:
        owner = self.module.get_submodule(name.rpartition(".")[0])
        return isinstance(owner, nn.Embedding | nn.EmbeddingBag)

    @contextmanager
    def at(self, point: Tensor) -> Iterator[None]:
        """The module at ``point`` (d,) instead of w, without copying; gradients still go to g."""
        if point is self.w:
            yield
            return
        self._point(point)
        try:
            yield
        finally:
            self._point(self.w)

    def _point(self, vector: Tensor) -> None:
        for p, view in zip(self.parameters, self.views(vector), strict=True):
            p.data = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector (..., d) as one tensor per parameter, without copying."""
        pieces = torch.split(vector, [shape.numel() for shape in self.shapes], dim=-1)
        stack = vector.shape[:-1]
        return [p.view(*stack, *shape) for p, shape in zip(pieces, self.shapes, strict=True)]

    def state_dict(self, vector: Tensor | None = None) -> dict[str, Tensor]:
        """``vector`` (default: the current w) under the names of the module's parameters."""
        views = self.views(self.w if vector is None else vector)
        return dict(zip(self.names, views, strict=True))


def check_exchangeable(module: nn.Module) -> None:
    """Refuse a module that is more than its trainable parameters."""
    persistent = sorted(module.state_dict().keys() - dict(module.named_parameters()).keys())
    if persistent:
        raise ValueError(
            f"Expected a model whose state is its parameters alone; {type(module).__name__} also "
            f"has {persistent[0]!r}. Replace BatchNorm by GroupNorm (running statistics differ on "
            "every client and cannot be averaged), untie shared weights, and register constants "
            "with persistent=False."
        )
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"Expected every parameter to be trainable; {frozen[0]!r} has requires_grad=False. "
            "Keep frozen parts outside the exchanged model."
        )
    if not any(True for _ in module.parameters()):
        raise ValueError(f"Expected a model with parameters; {type(module).__name__} has none.")
