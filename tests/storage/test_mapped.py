"""Tensors in files: their values stay, their memory goes."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fedaccord.core.rule import Stateless
from fedaccord.core.vectors import Vector
from fedaccord.storage import mapped as module
from fedaccord.storage.mapped import SpillPast, in_file, mapped, release


class Past(NamedTuple):
    """A server state that holds vectors of past rounds."""

    now: Vector
    after: dict[int, Vector]


def resident() -> int:
    """Bytes of files that this process has in memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssFile"))
    return 1024 * int(line.split()[1])


def test_a_mapped_tensor_lies_in_a_file_without_a_name(tmp_path: Path) -> None:
    v = mapped(1000, torch.float64, tmp_path)
    assert v.shape == (1000,)
    assert v.dtype == torch.float64
    assert not v.any()
    v[7] = 3.0
    assert float(v.sum()) == 3.0
    assert list(tmp_path.iterdir()) == []


def test_released_pages_leave_memory_and_keep_their_values() -> None:
    n = 8_000_000
    v = mapped(n, torch.float32)
    v.copy_(torch.arange(n))
    before = resident()
    release(v[n // 2 :])
    assert before - resident() > 0.9 * 4 * n / 2
    release(v)
    assert before - resident() > 0.9 * 4 * n
    assert torch.equal(v, torch.arange(n, dtype=torch.float32))


def test_a_tensor_in_memory_is_left_alone() -> None:
    v = torch.arange(1_000_000, dtype=torch.float32)
    release(v)
    release(v[10:])
    release(torch.empty(0))
    assert torch.equal(v, torch.arange(1_000_000, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_spilled_vector_is_the_same_bits_and_is_spilled_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAST", 0)  # but the newest stays in memory
    spill, vectors = SpillPast(), {t: torch.randn(12_345, dtype=dtype) for t in range(41)}
    server = Past(now=vectors[40], after=vectors)
    copy = spill(server)  # more than a file holds
    assert server.after == vectors
    assert copy.now is copy.after[40] is vectors[40]
    places = [copy.after[t] for t in range(40)]
    for t, place in enumerate(places):
        assert place is not vectors[t]
        assert place.dtype == dtype
        assert torch.equal(place, vectors[t])
    assert all(a is b for a, b in zip(spill(copy).after.values(), copy.after.values(), strict=True))
    assert len({place.data_ptr() for place in places}) == 40
    spill.release(copy)
    assert all(torch.equal(place, vectors[t]) for t, place in enumerate(places))


def test_spilled_vectors_are_in_memory_only_from_a_read_to_a_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PAST", 0)
    n, spill = 2_000_000, SpillPast()
    vectors = {t: torch.full((n,), float(t)) for t in range(4)}
    before = resident()
    server = spill(Past(vectors[3], vectors))
    assert resident() - before < 0.5 * 3 * 4 * n  # and what is loaded of libraries
    assert [float(server.after[t].mean()) for t in range(3)] == [0, 1, 2]
    assert resident() - before > 0.9 * 3 * 4 * n
    spill.release(server)
    assert resident() - before < 0.5 * 3 * 4 * n
    assert torch.equal(server.after[1], vectors[1])


def test_a_full_disk_is_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left") as error:
        mapped(1000, torch.float32, tmp_path)
    assert error.value.filename == str(tmp_path)
    assert os.listdir(tmp_path) == []


def test_vectors_of_other_kinds_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAST", 0)
    spill = SpillPast()
    for v in (torch.ones(5), torch.ones(7), torch.full((7,), 0.1, dtype=torch.float64)):
        after = spill(Past(v, {0: v, 1: v})).after
        assert in_file(after[0])
        assert not in_file(after[1])
        assert torch.equal(after[0], v)


def test_what_holds_no_past_is_left_alone() -> None:
    server = Stateless()
    assert SpillPast()(server) is server
    assert SpillPast()(Past(torch.ones(2), {})).after == {}
