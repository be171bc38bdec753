"""What a module has beside its state dict passes from no client to the next."""

from collections import deque
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import weight_norm

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
        mean = x.detach().abs().mean()
        if self.training:
            self.calls += 1
            if self.kind == "in place":
                self.buffer.mul_(1 + mean)
                self.plain += mean
            else:
                self.buffer = self.buffer * (1 + mean)
                self.plain = self.plain + mean
                self.number = self.number + mean
                self.lazy = mean if self.lazy is None else self.lazy + mean
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


class Rotary(nn.Module):
    """Caches with keys of several kinds, as of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.tmp = nn.Linear(3, 2), torch.ones(())
        self.length, self.table, self.built, self.rows = None, None, False, [0.0]
        self.count, self.mean, self.inputs = 0, 0.0, {}
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("moved", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.length != len(x):
            self.length, self.table = len(x), torch.ones(len(x), 1)
        if not self.built:
            self.built, self.extra = True, x.mean()
        while self.count < 4:
            self.count += 1
            self.rows.append(float(self.count))
        self.inputs[len(x)] = x
        self.mean = np.asarray(x.mean().detach())
        if self.late is None:
            self.late = x.detach().mean()
        self.moved.data.add_(1.0)
        del self.tmp
        assert len(self.rows) == 5
        return self.net(x * self.table + self.extra + self.late) * self.moved


def test_a_cache_and_its_key_are_reset_together() -> None:
    module = Rotary()
    model, x = FlatModel(module), torch.randn(4, 3)
    w, first = model.w.clone(), None
    for batch in (x, 2 * x, x):
        model.load(w)
        assert (module.length, module.table, module.built, module.rows) == (None, None, False, [0])
        assert (module.late, module.count, module.mean, module.inputs) == (None, 0, 0.0, {})
        assert module.moved == module.tmp - 1 == 0
        output = model(batch).detach()
        first = output if first is None else first
    assert first is not None
    assert torch.equal(output, first)


def test_a_view_of_a_saved_tensor_is_left_alone() -> None:
    class Views(nn.Sequential):
        pass

    module = Views(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module.mean = module[1].running_mean.view(-1)
    module.wide = torch.ones(1).expand(5)
    model = FlatModel(module, buffers="mean")
    model.write_buffers(model.initial_buffers + 1)
    model.load(model.w)
    assert module[1].running_mean.tolist() == [1.0] * 3


class Deep(nn.Module):
    """Changes what is stored deep in containers, and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.cache: dict[str, Any] = {"layer": {"keys": [], "order": deque([0]), "names": set()}}
        self.pair = (torch.zeros(1), [])
        self.cache["self"] = self.cache
        self.sized, self.array = torch.zeros(1), np.zeros(1)
        self.graph = torch.eye(3).to_sparse()
        self.fixed = np.zeros(1)
        self.fixed.flags.writeable = False
        with torch.inference_mode():
            self.constant = torch.ones(1)

    def state(self) -> list[Any]:
        layer = self.cache["layer"]
        sizes = [len(each) for each in (*layer.values(), self.sized, self.array, self.pair[1])]
        return [*sizes, self.pair[0].item(), hasattr(self, "late")]

    def forward(self, x: Tensor) -> Tensor:
        for each in (self.cache["layer"]["keys"], self.cache["layer"]["order"], self.pair[1]):
            each.append(1)
        self.cache["layer"]["names"].add("a")
        self.pair[0].add_(1)
        self.sized.data = torch.zeros(5)
        self.array.resize(5, refcheck=False)
        self.late = 1
        return self.net(x @ self.graph)


def test_containers_in_containers_and_sizes_are_reset() -> None:
    module = Deep()
    model, before = FlatModel(module), [0, 1, 0, 1, 1, 0, 0.0, False]
    for _ in range(3):
        model.load(model.w.clone())
        assert module.state() == before
        model(torch.ones(4, 3))
        assert module.state() == [1, 2, 1, 5, 5, 1, 1.0, True]


def test_a_copy_of_a_model_resets_its_own_module() -> None:
    model = deepcopy(FlatModel(Remembers("assigned")))
    for _ in range(2):
        model.unsaved.reset()
        assert (model.module.calls, model.module.lazy) == (0, None)
        model(torch.ones(4, 3))


class Counts(nn.Linear):
    calls = 0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.constant = 3

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_parts_with_parametrizations_and_hooks_are_reset() -> None:
    module = nn.Sequential(weight_norm(Counts(3, 3)), nn.Linear(3, 2), nn.Tanh())
    module[1].register_forward_hook(lambda part, x, y: setattr(part, "flag", True))
    module[2].register_buffer("scratch", torch.zeros(1), persistent=False)
    model = FlatModel(module)
    model.load(model.w.clone())
    model(torch.ones(4, 3))
    assert module[0].calls == module[1].flag == 1
    module[2].scratch += 1
    model.load(model.w.clone())
    assert module[0].calls == 0
    assert not hasattr(module[1], "flag")
    assert not module[2].scratch.any()
    del module[0].constant
    model.load(model.w.clone())
    assert module[0].constant == 3


def test_a_view_of_a_weight_has_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    module = Counts(3, 3)
    module.turned = module.weight.detach().t()
    FlatModel(nn.Sequential(module))
    assert "model: 0.turned is a view of a weight and does not follow its training" in caplog.text
    caplog.clear()
    FlatModel(spectral_norm(nn.Linear(3, 2)), buffers="freeze")  # computed before each pass
    FlatModel(nn.LSTM(3, 2), forward=lambda model, x: model(x)[0])
    assert not caplog.text


def test_a_counter_has_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = FlatModel(Remembers("in place"))
    for _ in range(3):
        model.load(model.w.clone())
        model(torch.ones(4, 3))
    assert caplog.text.count("model: the number calls changes in training, and restarts at 0") == 1


@KINDS
def test_clients_do_not_see_each_other(kind: str) -> None:
    module = Remembers(kind)
    data = [(torch.full((8, 3), float(i)), torch.arange(8) % 2) for i in (1, 5)]

    def after_a_round(*clients: tuple[Tensor, Tensor]) -> Tensor:
        keys = {"participation": 1.0, "batch-size": 0, "local-epochs": 3, "lr": 1e-4}
        keys |= {"clip-norm": 0.0, "rounds": 1}
        history = simulate("fedavg", model=deepcopy(module), clients=clients, **keys)
        return torch.cat([part.reshape(-1) for part in history.model.values()])

    one, other, both = after_a_round(data[0]), after_a_round(data[1]), after_a_round(*data)
    assert torch.allclose(both, (one + other) / 2, rtol=0, atol=1e-6)
    assert not torch.allclose(one, other, atol=1e-3)
