"""A low-rank adapter of a linear layer, for tests."""

import torch
from torch import Tensor, nn


class LoRA(nn.Module):
    """W x + B A x, with W (o, i) frozen, A (r, i) random, B (o, r) zero at the start."""

    def __init__(self, base: nn.Linear, rank: int, freeze_A: bool = False) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(rank, base.in_features, generator=generator, dtype=base.weight.dtype)
        self.A = nn.Parameter(A, requires_grad=not freeze_A)
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.A.mT @ self.B.mT
        return out
