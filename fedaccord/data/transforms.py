"""Transforms of images as whole tensors, on any device."""

from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F

from fedaccord.core.vectors import to_device

PAD = 4  # pixels of padding on each side for random crops


class Scaled(Protocol):
    """Mean and deviation of images, per channel, of pixels in [0, 1]; empty for features."""

    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def std(self) -> tuple[float, ...]: ...


def normalise(x: torch.Tensor, dataset: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """(x/255 - mean)/std per channel of a (..., c, h, w) uint8 batch; float features are cast,
    token ids become int64.

    Computed at float32 or better, on x's device, and only then rounded to `dtype`.
    """
    if x.dtype != torch.uint8:
        return x.to(dtype) if x.is_floating_point() else x.long()
    work = torch.promote_types(dtype, torch.float32)
    mean, std = _raw_constants(dataset.mean, dataset.std, x.device, work)
    return x.to(work).sub_(mean).div_(std).to(dtype)


@lru_cache(maxsize=32)
def _raw_constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """255 mean and 255 std as (c, 1, 1); cached, to avoid a synchronisation per batch."""
    raw = 255 * torch.tensor([mean, std], dtype=torch.float64)[:, :, None, None]
    mean_, std_ = raw.to(dtype=dtype).to(device)
    return mean_, std_


def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random crop of each image padded by 4 black pixels, mirrored with p = 1/2.

    x: (b, c, h, w) uint8. The pad is zero in raw pixels, before normalisation, as torchvision's
    RandomCrop(h, padding=4) on images has it. One number per image is drawn from the CPU
    `generator`: crops are the same on a GPU and a CPU, for several batches at once or one by one.
    """
    b, c, h, w = x.shape
    shifts = 2 * PAD + 1
    draw = to_device(torch.randint(shifts * shifts * 2, (b, 1), generator=generator), x.device)
    top, left, flip = draw // (shifts * 2), draw // 2 % shifts, draw % 2 == 1
    column = torch.arange(w, device=x.device)
    rows = top + torch.arange(h, device=x.device)  # (b, h)
    columns = left + torch.where(flip, column.flip(0), column)  # (b, w)
    pixels = rows[:, :, None] * (w + 2 * PAD) + columns[:, None, :]  # (b, h, w), of padded images
    padded = F.pad(x, (PAD, PAD, PAD, PAD)).flatten(2)
    return padded.gather(2, pixels.view(b, 1, h * w).expand(b, c, h * w)).view(b, c, h, w)
