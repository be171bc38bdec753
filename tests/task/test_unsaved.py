"""What a module has beside its state dict passes from no client to the next."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fedaccord import simulate
from fedaccord.task.flat_model import FlatModel


class Remembers(nn.Module):
    """Scales by what it has seen in training."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(3, 2), kind
        self.calls, self.lazy = 0, None
        self.number = 1.0
        self.plain = torch.ones(())
        self.register_buffer("buffer", torch.ones(()), persistent=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().abs().mean()
        if self.training:
            self.calls += 1
            if self.kind == "in place":
                self.buffer.mul_(1 + seen)
                self.plain += seen
            else:
                self.buffer = self.buffer * (1 + seen)
                self.plain = self.plain + seen
                self.number = self.number + seen
                self.lazy = seen if self.lazy is None else self.lazy + seen
        scale = self.buffer * self.plain * self.number * (1 + self.calls)
        return self.net(x + self.table) * scale * (1 if self.lazy is None else 1 + self.lazy)


KINDS = pytest.mark.parametrize("kind", ["in place", "assigned"])


@KINDS
def test_a_visit_begins_with_what_the_module_was_built_with(kind: str) -> None:
    model = FlatModel(Remembers(kind))
    w, x = model.w.clone(), torch.ones(4, 3)
    first = model(x).detach()
    model.load(w)
    second = model(x).detach()  # it has seen one batch, but not those before `load`
    again = model(x).detach()
    assert torch.equal(first, second)
    assert not torch.equal(second, again)
    table = model.module.table  # type: ignore[union-attr]
    model.load(w)
    assert model.module.table is table


@KINDS
def test_clients_do_not_see_each_other(kind: str) -> None:
    module = Remembers(kind)
    data = [(torch.full((8, 3), float(i)), torch.arange(8) % 2) for i in (1, 5)]

    def after_a_round(*clients: tuple[Tensor, Tensor]) -> Tensor:
        keys = {"participation": 1.0, "batch-size": 0, "local-epochs": 3, "lr": 1e-4}
        keys |= {"clip-norm": 0.0, "rounds": 1}
        found = simulate("fedavg", model=deepcopy(module), clients=clients, **keys)
        return torch.cat([part.reshape(-1) for part in found.model.values()])

    one, other, both = after_a_round(data[0]), after_a_round(data[1]), after_a_round(*data)
    assert torch.allclose(both, (one + other) / 2, rtol=0, atol=1e-6)
    assert not torch.allclose(one, other, atol=1e-3)
