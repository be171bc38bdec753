"""What every plug-in does without saying so."""

from dataclasses import dataclass

import pytest

from fedaccord.core import PlugIn
from fedaccord.strategies import FedAvg


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
