"""What is particular to one data set: how it is found, decoded, prepared and augmented."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from numpy.typing import NDArray

from fedaccord.data.transforms import normalise

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
PerChannel = tuple[float, ...]  # of pixels in [0, 1]


class Dataset(NamedTuple):
    """Training and test data in memory, mapped from the cache file: writes stay in the process."""

    name: str
    x_train: torch.Tensor  # (n, channels, height, width) uint8, or (n, ...) float32 features
    y_train: torch.Tensor  # (n,) int64, 0 <= y < classes
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    mean: PerChannel  # of the training images; empty for features
    std: PerChannel
    class_names: tuple[str, ...] = ()  # of label 0, 1, ...; empty: unknown


class Decoded(NamedTuple):
    """What a source gives: channel-last uint8 images or float32 features, and their labels."""

    x_train: NDArray[Any]  # (n, height, width[, channels]) uint8, or (n, ...) float32
    y_train: NDArray[Any]  # (n,) integers
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    classes: int
    class_names: tuple[str, ...] = ()  # of label 0, 1, ...; empty: unknown


class Source(NamedTuple):
    """The files of a data set, and how to decode them."""

    paths: tuple[Path, ...]  # files and folders whose change makes the cache file stale
    decode: Callable[[], Decoded]


class Facts(NamedTuple):
    """What is known of a data set before it is decoded."""

    shape: tuple[int, ...]  # of a sample
    classes: int
    samples: int  # for training
    size: int  # bytes once decoded, of training and test samples


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An entry of `datasets.DATASETS`: all that the rest of the package knows of a data set.

    find: (root, download, image_size) -> its files. Raises FileNotFoundError if they are missing.
    origin: "package" (part of an installed package, needs no data-dir), "download" (torchvision can
        fetch it), or "user" (whatever is stored in data-dir).
    scale: mean and std by which images are normalised; None: those of the training images.
    prepare: (inputs, data set, dtype) -> what the model sees.
    augment: (raw inputs, generator) -> inputs of a training step; None: as they are.
    """

    find: Callable[[Path, bool, int], Source]
    origin: Literal["package", "download", "user"]
    facts: Facts | None = None
    scale: tuple[PerChannel, PerChannel] | None = None
    resizes: bool = False  # whether `find` heeds image_size
    prepare: Callable[[torch.Tensor, Dataset, torch.dtype], torch.Tensor] = normalise
    augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None


def image_facts(shape: tuple[int, int, int], classes: int, train: int, test: int) -> Facts:
    """Of uint8 images (channels, height, width) with int64 labels."""
    sample = shape[0] * shape[1] * shape[2] + 8
    return Facts(shape, classes, train, (train + test) * sample)


def check_fits(what: str, size: int) -> None:
    """Raises ValueError for more bytes than this machine's memory: the system would not refuse
    them, and end the process when they are filled."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise ValueError(
            f"{what}: expected what fits into the {memory / 1e9:,.0f} GB of memory here, got "
            f"{size / 1e9:,.0f} GB: take less of it, or smaller images"
        )
