"""Where samples lie: on a GPU once, if they fit, and what a visit sends there."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.data.kind import Dataset
from fedaccord.data.transforms import augment, normalise
from fedaccord.task import Clients, Task, models
from tests.fake_gpu import GPU, FakeGPU, fake_gpu

PIXELS, N = 3 * 8 * 8, 20  # bytes of an image; images
PARTS = [np.arange(12), np.arange(12, N)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    with fake_gpu(monkeypatch) as mode:
        yield mode


def task(device: Any, parts: bool = True, augmented: bool = True) -> Task:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(256, (N, 3, 8, 8), generator=g, dtype=torch.uint8)
    y = torch.randint(3, (N,), generator=g)
    data = Dataset("random", x[:0], y[:0], x[:0], y[:0], 3, (0.5,) * 3, (0.2,) * 3)
    own = Clients(x, y, PARTS) if parts else Clients([x[:12], x[12:]], [y[:12], y[12:]])
    return Task(
        lambda: models.build("mlp", (3, 8, 8), 3),
        own,
        (x[:9], y[:9]),
        device=device,
        prepare=lambda x, dtype: normalise(x, data, dtype),
        augment=augment if augmented else None,
    )


def a_pass(of: Task) -> list[Any]:
    """Of client 0's batches, then of both clients' together."""
    together = of.cohort_batches([0, 1], 0, 4, 0, torch.float32, 1)
    return [*of.train_batches(0, 0, 4, 0, torch.float32), *((x, y) for x, y, _ in together)]


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("augmented", [True, False])
def test_a_visit_sends_indices_where_the_samples_lie_on_the_gpu(
    gpu: FakeGPU, parts: bool, augmented: bool
) -> None:
    """At most eight bytes each for the place of a sample, its order, how it is cut, and so on."""
    own = task(GPU, parts, augmented)
    a_pass(own)
    assert gpu.sent_bytes > (N + 9) * PIXELS  # all of them, once
    for _ in range(2):
        gpu.sent_bytes = 0
        assert {part.device for batch in a_pass(own) for part in batch} == {GPU}
        assert 0 < gpu.sent_bytes <= (12 + N) * 5 * 8 < 12 * PIXELS
    w = own.model().w
    gpu.sent_bytes = 0
    own.evaluate(w)
    assert gpu.sent_bytes == 0


def test_samples_that_take_too_much_of_the_gpu_go_there_by_the_visit(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.free = 4 * (N + 9) * (PIXELS + 8) - 1
    own = task(GPU)
    with caplog.at_level("INFO", "flwr"):
        for _ in range(2):
            gpu.sent_bytes = 0
            assert {part.device for batch in a_pass(own) for part in batch} == {GPU}
            assert gpu.sent_bytes > 12 * PIXELS
    assert [r.message for r in caplog.records] == [
        "samples stay on the host: 0.0 GB, and 0.0 GB of cuda:0 are free"
    ]
    gpu.free += 1
    assert task(GPU)._near[0].x.device == GPU  # type: ignore[union-attr]


def test_on_a_cpu_samples_stay_where_they_are() -> None:
    own = task("cpu")
    assert own._near == (own.clients, own.test)


def test_another_process_gets_the_samples_of_the_host(gpu: FakeGPU) -> None:
    own = task(GPU)
    a_pass(own)
    assert "_near" in vars(own)
    assert "_near" not in own.__getstate__()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("augmented", [True, False])
def test_batches_on_a_gpu_are_those_of_the_cpu(parts: bool, augmented: bool) -> None:
    """Bit for bit: a difference and a quotient are rounded alike."""
    on_gpu, on_cpu = (a_pass(task(torch.device(d), parts, augmented)) for d in ("cuda", "cpu"))
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(one, other, strict=True))
