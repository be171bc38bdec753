"""What is done with each vector of a stack."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedaccord.core import vectors
from fedaccord.core.vectors import PIECE, clip_, distances, norm
from tests.fake_gpu import GPU, fake_gpu


def test_each_vector_is_clipped_by_its_own_norm() -> None:
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    clip_(g, 1.0)
    assert torch.equal(g[1:], torch.tensor([[0.3, 0.4], [0.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(g[0], torch.tensor([0.6, 0.8], dtype=torch.float64))


def test_short_vectors_stay_as_they_are_and_zero_is_no_bound() -> None:
    short = torch.tensor([[0.3, -0.0], [0.1, 0.2]])
    assert torch.equal(clip_(short.clone(), 0.5), short)
    long = torch.full((4,), 100.0)
    assert torch.equal(clip_(long.clone(), 0.0), long)
    assert float(norm(clip_(long, 2.0))) == 2.0


def test_what_is_no_number_stays_none() -> None:
    for wrong in (float("nan"), float("inf")):
        g = torch.tensor([wrong, 1.0])
        assert not clip_(g, 1.0).isfinite().all()


def test_a_norm_that_overflows_is_not_a_step_of_zero() -> None:
    g = torch.tensor([[3e38, 3e38], [3.0, 4.0]])
    clipped = clip_(g, 1.0)
    assert clipped[0].isnan().all()
    torch.testing.assert_close(clipped[1], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("d", [1, PIECE, 2 * PIECE + 3])
def test_distances_are_those_of_the_whole_vectors(d: int) -> None:
    xs, centre = [*torch.randn(3, d, dtype=torch.float64)], torch.randn(d, dtype=torch.float64)
    expected = [float((x - centre).pow(2).sum().sqrt()) for x in xs]
    assert distances(xs, centre).tolist() == pytest.approx(expected, rel=1e-12)
    assert distances([centre], centre).tolist() == [0.0]
    xs[1][-1] = torch.nan
    assert [*map(math.isfinite, distances(xs, centre).tolist())] == [True, False, True]


def test_a_large_copy_does_not_wait_for_the_work_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it does; and its memory is kept for that."""
    events: list[Any] = []
    streams = [SimpleNamespace(name="here")]

    def wait(other: Any) -> None:
        events.append(f"{streams[0].name} waits for {other.name}")

    def copy(device: Any, non_blocking: bool) -> Any:
        events.append(f"copy on {streams[-1].name}, {non_blocking=}")
        return SimpleNamespace(record_stream=lambda s: events.append(f"kept for {s.name}"))

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    streams[0].wait_stream = wait
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(vectors, "_lane", lambda _: SimpleNamespace(name="lane"))
    pinned: Any = SimpleNamespace(to=copy)
    vectors.beside(pinned, torch.device("cuda", 0))
    assert events == ["copy on lane, non_blocking=True", "here waits for lane", "kept for here"]


def test_large_vectors_go_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def count(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
        sizes.append(pinned.numel())
        return pinned.to(device, non_blocking=True)

    monkeypatch.setattr(vectors, "SIDE_STREAM_BYTES", 400)
    monkeypatch.setattr(vectors, "beside", count)
    with fake_gpu(monkeypatch) as gpu:
        assert {vectors.to_device(torch.zeros(n), GPU).device for n in (100, 101)} == {GPU}
        assert not gpu.waits
    assert sizes == [101]
