"""Fashion-MNIST and CIFAR in torchvision's own files; CIFAR-10 as image files too."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedaccord.data import image_folder
from fedaccord.data.kind import Arrays, Kind, ReadOptions, Source, image_facts
from fedaccord.data.transforms import augment

log = logging.getLogger("flwr")  # what a run prints


def find(
    name: str,
    subfolder: str,
    classes: int,
    size: tuple[int, ...],
    root: Path,
    reading: ReadOptions,
) -> Source:
    """The data set torchvision.datasets.<name>, which it stores in root/subfolder.

    size: the shape of an image in torchvision's arrays.
    """

    def split(train: bool) -> Any:
        from torchvision import datasets

        try:
            return getattr(datasets, name)(root, train=train, download=reading.download)
        except Exception as error:  # torchvision asserts instead of checking
            reason = str(error) or type(error).__name__
            again = f"delete {root / subfolder} and set" if (root / subfolder).exists() else "try"
            raise ValueError(
                f"{name} cannot be loaded from {root} ({reason}): {again} download=true again, or "
                "point data-dir to a complete copy"
            ) from error

    def decode() -> Arrays:
        train, test = split(True), split(False)
        x_train, x_test = np.asarray(train.data), np.asarray(test.data)
        y_train, y_test = np.asarray(train.targets), np.asarray(test.targets)
        for x, y in ((x_train, y_train), (x_test, y_test)):
            top = y.max(initial=-1)
            if x.shape != (len(y), *size) or x.dtype != np.uint8 or not 0 <= top < classes:
                raise ValueError(
                    f"{name}: expected uint8 images of {size} and a label below {classes} for each "
                    f"in {root / subfolder}, got {x.shape} {x.dtype} and {len(y)} labels up to "
                    f"{top}: delete it and set download=true, or point data-dir to a complete copy"
                )
        return Arrays(x_train, y_train, x_test, y_test, classes, tuple(train.classes))

    if not (root / subfolder).is_dir():
        files = "read from it, too" if name == "CIFAR10" else "dataset=image-folder"
        if not reading.download:
            raise FileNotFoundError(
                f"{root} has no {subfolder} (torchvision's {name}): set download=true to fetch "
                "it, or point data-dir to the folder that has it; image files in train/<class>/* "
                f"and test/<class>/* are {files}"
            )
        log.warning("downloading %s to %s", name, root)
        split(train=True)
    return Source((root / subfolder,), decode)


def find_cifar10(root: Path, reading: ReadOptions) -> Source:
    """Torchvision's files, or image files in root or in root/cifar10."""
    for folder in (root, root / "cifar10"):
        if not (root / "cifar-10-batches-py").is_dir() and (folder / "train").is_dir():
            source = image_folder.find(folder, ReadOptions())
            return Source(source.paths, partial(_decode_cifar10_images, folder, source))
    return find("CIFAR10", "cifar-10-batches-py", 10, (32, 32, 3), root, reading)


def _decode_cifar10_images(folder: Path, source: Source) -> Arrays:
    data = source.decode()
    if data.classes != 10 or data.x_train.shape[1:] != (32, 32, 3):
        raise ValueError(
            f"cifar10: expected 10 classes of (32, 32, 3) images in {folder}, got {data.classes} "
            f"of {data.x_train.shape[1:]}: use dataset image-folder for other images"
        )
    return data


FASHION_MNIST = Kind(
    find=partial(find, "FashionMNIST", "FashionMNIST/raw", 10, (28, 28)),
    origin="download",
    facts=image_facts((1, 28, 28), 10, 60_000, 10_000),
)
CIFAR10 = Kind(
    find=find_cifar10,
    origin="download",
    facts=image_facts((3, 32, 32), 10, 50_000, 10_000),
    scale=((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    augment=augment,
)
CIFAR100 = Kind(
    find=partial(find, "CIFAR100", "cifar-100-python", 100, (32, 32, 3)),
    origin="download",
    facts=image_facts((3, 32, 32), 100, 50_000, 10_000),
    scale=((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    augment=augment,
)
