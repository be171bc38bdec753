"""What every plug-in does without saying so."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedaccord import simulate
from fedaccord.core import Model, PlugIn
from fedaccord.engine import History
from fedaccord.plugins import Compress
from fedaccord.strategies import FedAvg

CLIENTS = [(torch.ones(2, 3), torch.ones(2, 1))] * 3


@dataclass(frozen=True)
class Quantise(PlugIn):
    """Of another package."""


def test_a_method_may_refuse_any_plugin_also_of_another_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert FedAvg(plugins=(Quantise(),)).client_half().plugins == (Quantise(),)
    monkeypatch.setattr(FedAvg, "refuses", {Quantise: "its mean needs every digit"})
    with pytest.raises(ValueError, match=r"^FedAvg does not support Quantise: its mean needs ev"):
        FedAvg(plugins=(Quantise(),))


class Packed(NamedTuple):
    update: Tensor


class Memory(NamedTuple):
    error: Tensor | None
    base: Any


@dataclass(frozen=True)
class Ternary(PlugIn):
    """Of another package: its encoding has a type and a memory of its own."""

    place = 2

    def init(self, w: Tensor, w_init: Tensor, base: Any) -> Any:
        return Memory(torch.zeros_like(w), base)

    def base(self, state: Any) -> Any:
        return state.base

    def encode(self, up: Any, down: Any, state: Any, result: Any) -> Any:
        return Packed(up.w - down.w), Memory(state.error, None)

    def sends(self, kind: Any) -> Any:
        return Packed

    def decode(self, decoded: Any, kind: Any, down: Any, like: Tensor) -> Any:
        return decoded._replace(up=kind(down.w + decoded.up.update))


def train(*plugins: PlugIn) -> History:
    strategy = FedAvg(plugins=plugins, fraction_train=1 / 3)
    torch.manual_seed(0)
    return simulate(strategy, clients=CLIENTS, model=nn.Linear(3, 1), rounds=3)


def test_a_plugin_with_a_type_and_a_memory_of_its_own() -> None:
    """What it encodes is read again: the path is FedAvg's."""
    history, bare = train(Ternary()), train()
    for name, value in bare.model.items():
        torch.testing.assert_close(history.model[name], value)
    assert {type(state) for state in history.clients if state is not None} == {Memory}


@pytest.mark.parametrize("plugins", [(Ternary(), Compress()), (Compress(method="topk"), Ternary())])
def test_one_plugin_compresses_uploads(plugins: tuple[PlugIn, PlugIn]) -> None:
    """Each reads the update of a model, and none reads the other's encoding."""
    names = " and ".join(type(plugin).__name__ for plugin in plugins)
    line = f"^plugins: expected one that compresses uploads, got {names}$"
    with pytest.raises(ValueError, match=line):
        FedAvg(plugins=plugins)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"sends": lambda self, kind: Model}, "Ternary.encode: expected a Model, got a Packed$"),
        (
            {"init": lambda self, w, w_init, base: w},
            "Ternary.init: expected .* NamedTuple .*Tensor$",
        ),
        (
            {"base": PlugIn.base},
            "Ternary.base: expected the state that `init` was given, .* Memory ",
        ),
    ],
)
def test_a_plugin_that_returns_another_type_is_one_line(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], line: str
) -> None:
    for name, hook in change.items():
        monkeypatch.setattr(Ternary, name, hook)
    with pytest.raises((TypeError, RuntimeError), match=line):
        train(Ternary())


@pytest.mark.parametrize("asks", [True, False])
def test_a_plugin_has_the_first_model_only_if_it_asks(
    monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """Else it would have the model of its client's first round, under the name of the first one."""
    first = []

    def init(self: PlugIn, w: Tensor, w_init: Tensor | None, base: Any) -> Any:
        first.append(w_init is not None)
        return Memory(w, base)

    monkeypatch.setattr(Ternary, "init", init)
    monkeypatch.setattr(Ternary, "needs_w_init", asks)
    train(Ternary())
    assert set(first) == {asks}
