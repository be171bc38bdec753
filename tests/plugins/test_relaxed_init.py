"""The start that relaxed initialisation sends beside a method's own upload."""

from __future__ import annotations  # types as strings, as in another author's method

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.wire.records import pack, unpack


class Up(NamedTuple):
    w: Tensor
    extra: Tensor | None


def test_an_upload_with_its_start_keeps_its_optional_fields() -> None:
    kind = RelaxedInit(sends_start=True).sends(Up)
    assert kind._fields == ("w", "extra", "w_i0")
    sent = kind(torch.ones(2), None, torch.zeros(2))
    received = unpack(kind, pack(sent))
    assert received.extra is None
    assert torch.equal(received.w_i0, sent.w_i0)
    with pytest.raises(ValueError, match=r"expected the vectors \['w', 'extra', 'w_i0'\]"):
        unpack(kind, pack(Up(torch.ones(2), None)))
