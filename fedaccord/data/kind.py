"""The functions of one data set: to find, decode, prepare and augment it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedaccord.data.transforms import normalise
from fedaccord.process.memory_groups import groups

log = logging.getLogger("flwr")  # what a run prints

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
PerChannel = tuple[float, ...]  # of pixels in [0, 1]
Augmentation = Callable[[torch.Tensor, torch.Generator], torch.Tensor]  # of raw inputs (b, ...)


class Dataset(NamedTuple):
    """Training and test data in memory, mapped from the cache file: writes stay in the process."""

    name: str
    x_train: torch.Tensor  # (n, channels, height, width) uint8 images, (n, ...) float32 features,
    # (n, length) integer token ids
    y_train: torch.Tensor  # (n,) int64, 0 <= y < classes; (n, outputs) float32 numbers to predict
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int  # 0: the targets are numbers
    mean: PerChannel = ()  # of the training images; empty for features
    std: PerChannel = ()
    class_names: tuple[str, ...] = ()  # of label 0, 1, ...; empty: unknown
    vocabulary: int = 0  # number of token ids; 0: the inputs are no tokens, or unknown
    owners: torch.Tensor | None = None  # (n,) int64 the client of each training sample, from 0 on
    checksum: str = ""  # of all tensors, with their types and shapes
    augment: Augmentation | None = None  # of its own, see `Kind`

    @property
    def outputs(self) -> int:
        """Number of a model's outputs: scores of classes, or predicted numbers."""
        return self.classes or self.y_train.shape[1]


class Arrays(NamedTuple):
    """A decoded source: a `Dataset` of NumPy arrays, with channel-last images."""

    x_train: NDArray[Any]  # (n, height, width[, channels]) uint8, (n, ...) float32, (n, length) int
    y_train: NDArray[Any]  # (n,) integers, or (n, outputs) float32
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    classes: int
    class_names: tuple[str, ...] = ()
    vocabulary: int = 0
    owners: NDArray[Any] | None = None


class ReadOptions(NamedTuple):
    """The settings of reading files; most data sets ignore them."""

    download: bool = False  # fetch missing files
    image_size: int = 0  # resize the shorter side to it and crop the centre; 0: unchanged
    tokenizer: str = "bytes"  # or package.module:function
    max_length: int = 256  # tokens of a text
    labels: str = ""  # the names of the classes, with commas; empty: those in the files

    @property
    def class_names(self) -> tuple[str, ...]:
        """The labels in their order; empty: none are named.

        Raises ValueError for fewer than two, and for a repeated one.
        """
        names = tuple(part.strip() for part in self.labels.split(",") if part.strip())
        if self.labels and len({*names}) < max(len(names), 2):
            raise ValueError(
                "labels: expected two or more different names, separated by commas, got "
                f"{self.labels!r}"
            )
        return names


class Source(NamedTuple):
    """The files of a data set, and how to decode them."""

    paths: tuple[Path, ...]  # files and folders whose change makes the cache file stale
    decode: Callable[[], Arrays]
    code: tuple[Path, ...] = ()  # files of functions that decode them, whose change does so too


class Facts(NamedTuple):
    """Facts of a data set before it is decoded."""

    shape: tuple[int, ...]  # of a sample
    outputs: int  # classes, or numbers to predict
    samples: int  # for training
    size: int  # bytes once decoded, of training and test samples
    vocabulary: int = 0  # token ids; 0: samples are no tokens


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An entry of `datasets.DATASETS`: the interface of a data set.

    find: (root, reading) -> its files. Raises FileNotFoundError if they are missing.
    origin: "package" (part of an installed package, needs no data-dir), "download" (torchvision can
        fetch it), "user" (whatever is stored in data-dir), or "function" (which finds its own).
    reads: the settings of `ReadOptions` that change what is decoded.
    scale: mean and std by which images are normalised; None: those of the training images.
    prepare: (inputs, data set, dtype) -> the model's inputs.
    augment: (raw inputs, generator) -> inputs of a training step; None: not augmented.
    """

    find: Callable[[Path, ReadOptions], Source]
    origin: Literal["package", "download", "user", "function"]
    reads: tuple[str, ...] = ()
    facts: Facts | None = None
    scale: tuple[PerChannel, PerChannel] | None = None
    prepare: Callable[[torch.Tensor, Dataset, torch.dtype], torch.Tensor] = normalise
    augment: Augmentation | None = None


def image_facts(shape: tuple[int, int, int], classes: int, train: int, test: int) -> Facts:
    """Facts of uint8 images (channels, height, width) with int64 labels."""
    sample = shape[0] * shape[1] * shape[2] + 8
    return Facts(shape, classes, train, (train + test) * sample)


def check_fits(what: str, size: int) -> None:
    """Raises ValueError for more bytes than the memory of this machine, or of a control group: the
    system would allocate them, and kill the process when they are written."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = min([machine, *(group.limit for group in groups())])
    if size > memory:
        raise ValueError(
            f"{what}: expected at most the {memory / 1e9:,.1f} GB of memory here, got "
            f"{size / 1e9:,.1f} GB: use fewer samples or smaller images"
        )


def warn_if_whole(what: str, *targets: Any) -> None:
    """Numbers to predict that may be labels: warn if all are whole."""
    if all((y == y.round()).all() for y in targets):
        log.warning(
            f"{what} are whole numbers stored as floats: they are predicted as numbers; store "
            "integers if they are labels of classes"
        )


def number_owners(what: str, owners: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    """(n,) names or numbers of clients as numbers from 0: first names, in alphabetical order, then
    numbers, in rising order.

    Raises ValueError for a sample without one.
    """
    texts = [str(owner) for owner in owners]
    if "" in texts:
        raise ValueError(f"{what}: expected a client for every training sample, got one without")
    order = sorted({*texts}, key=lambda text: (int(text) if text.isdecimal() else -1, text))
    number = {text: k for k, text in enumerate(order)}
    return np.array([number[text] for text in texts], np.int64)
