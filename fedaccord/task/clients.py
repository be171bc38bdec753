"""The samples of each client."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaccord.core.vectors import index_rows, to_device
from fedaccord.data.partition import has_classes
from fedaccord.data.parts import Parts

Samples = tuple[Tensor, Tensor]  # inputs (n, ...), targets (n, ...): classes are int64


@dataclass(eq=False)
class Clients:
    """The samples of each client: indices into one training set, or tensors of its own."""

    x: Sequence[Tensor] | Tensor
    y: Sequence[Tensor] | Tensor
    parts: Sequence[np.ndarray] | None = None

    def __repr__(self) -> str:
        return f"{len(self)} clients with {self.total} samples"

    def __len__(self) -> int:
        return len(self.y if self.parts is None else self.parts)

    @cached_property
    def total(self) -> int:
        """Samples of all clients."""
        if isinstance(self.parts, Parts):
            return self.parts.total
        return sum(map(len, self.y if self.parts is None else self.parts))

    def size(self, client: int) -> int:
        if isinstance(self.parts, Parts):
            return self.parts.size(client)
        return len(self.y[client] if self.parts is None else self.parts[client])

    def samples(self, client: int) -> Samples:
        if self.parts is None:
            return self.x[client], self.y[client]
        assert isinstance(self.x, Tensor)
        assert isinstance(self.y, Tensor)
        rows = to_device(torch.from_numpy(self.parts[client]), self.x.device)
        return index_rows(self.x, rows), index_rows(self.y, rows)

    def labels(self, client: int) -> np.ndarray | None:
        """(n,) the classes of its samples; None: the targets are not classes."""
        rows: Any = client if self.parts is None else torch.from_numpy(self.parts[client])
        labels = self.y[rows].cpu().numpy()
        return labels if has_classes(labels) else None

    def together(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Inputs and targets that contain the samples of these clients, and each client's rows."""
        if self.parts is None:
            x, y = (torch.cat([part[i] for i in clients]) for part in (self.x, self.y))
            return x, y, [*torch.split(torch.arange(len(y)), [self.size(i) for i in clients])]
        assert isinstance(self.x, Tensor)
        assert isinstance(self.y, Tensor)
        return self.x, self.y, [torch.from_numpy(self.parts[i]) for i in clients]

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        parts = (self.x, self.y)
        return sum(p.nbytes if isinstance(p, Tensor) else sum(v.nbytes for v in p) for p in parts)

    def to(self, device: torch.device) -> "Clients":
        """The same with their samples on ``device``."""

        def there(part: Sequence[Tensor] | Tensor) -> Sequence[Tensor] | Tensor:
            return part.to(device) if isinstance(part, Tensor) else [v.to(device) for v in part]

        return Clients(there(self.x), there(self.y), self.parts)
