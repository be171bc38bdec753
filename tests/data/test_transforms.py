"""Normalisation and augmentation against their formulas, image by image."""

import pytest
import torch

from fedaccord.data.kind import Dataset, Kind
from fedaccord.data.npz import NPZ
from fedaccord.data.transforms import augment, normalise
from fedaccord.data.vision import CIFAR10, CIFAR100


def images(b: int, c: int, h: int, w: int) -> torch.Tensor:
    x = torch.randint(1, 256, (b, c, h, w), generator=torch.Generator().manual_seed(5))
    return x.to(torch.uint8)  # never 0, so that the pad differs from the image


def dataset(kind: Kind) -> Dataset:
    return Dataset("test", *[torch.empty(0)] * 4, 2, *(kind.scale or ((), ())))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_normalise_is_the_formula(dtype: torch.dtype) -> None:
    x = images(4, 3, 5, 6)
    before = x.clone()
    data = dataset(CIFAR10)
    ours = normalise(x, data, dtype)
    expected = torch.empty(x.shape, dtype=torch.float64)
    for channel in range(3):
        expected[:, channel] = (x[:, channel].double() / 255 - data.mean[channel]) / data.std[
            channel
        ]
    assert ours.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), expected, rtol=0.51 * eps, atol=8 * min(eps, 2**-23))
    assert torch.equal(x, before)


def test_normalise_accepts_more_leading_dimensions() -> None:
    x, data = images(6, 3, 5, 6), dataset(CIFAR100)
    stacked = normalise(x.view(2, 3, 3, 5, 6), data, torch.float32)
    assert torch.equal(stacked.flatten(0, 1), normalise(x, data, torch.float32))


def test_normalise_only_casts_features() -> None:
    x = torch.tensor([[0.1, -300.0]])
    assert torch.equal(normalise(x, dataset(NPZ), torch.float64), x.double())


def test_augment_is_a_shifted_possibly_mirrored_window_of_the_padded_image() -> None:
    x = images(500, 3, 7, 9)
    results = augment(x, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(9 * 9 * 2, (500, 1), generator=generator).flatten().tolist()
    cases = set()
    for image, number, result in zip(x, numbers, results, strict=True):
        top, left, flip = number // 18, number // 2 % 9, number % 2
        padded = torch.zeros(3, 7 + 8, 9 + 8, dtype=torch.uint8)
        padded[:, 4:-4, 4:-4] = image
        window = padded[:, top : top + 7, left : left + 9]
        assert torch.equal(result, window.flip(-1) if flip else window)
        cases |= {("top", top), ("left", left), ("flip", flip)}
    assert len(cases) == 9 + 9 + 2, "not every shift and flip occurs"


def test_augment_is_reproduced_by_its_generator() -> None:
    x = images(50, 1, 8, 8)
    generator = torch.Generator().manual_seed(3)
    first, second = augment(x, generator), augment(x, generator)
    assert torch.equal(first, augment(x, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, second)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_transforms_are_the_same_on_a_gpu() -> None:
    x, data = images(50, 3, 32, 32), dataset(CIFAR10)
    cpu = augment(x, torch.Generator().manual_seed(6))
    gpu = augment(x.cuda(), torch.Generator().manual_seed(6))
    assert torch.equal(gpu.cpu(), cpu)
    result = normalise(gpu, data, torch.float32).cpu()
    torch.testing.assert_close(result, normalise(cpu, data, torch.float32))
