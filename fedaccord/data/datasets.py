"""Data sets by name, decoded once to uint8 and mapped into memory by every process.

`load` looks for the data, decodes it into one cache file and maps that file; later calls, in this
process or another, only map it (see cache.py). A file's name carries a hash of the source's path
and of the names, sizes and times of its files: changed data is decoded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedaccord.core.options import did_you_mean
from fedaccord.data import image_folder, npz
from fedaccord.data.cache import (
    CONSTANTS,
    MAX_IMAGE_SIZE,
    Dataset,
    Decoded,
    Source,
    cache_folder,
    fingerprint,
    read,
    remove_abandoned,
    write,
)
from fedaccord.data.transforms import augment, normalise

__all__ = [
    "CONSTANTS",
    "DATASETS",
    "Dataset",
    "augment",
    "cache_folder",
    "cached",
    "load",
    "normalise",
]


def load(
    name: str,
    data_dir: str = "",
    *,
    download: bool = False,
    image_size: int = 0,
    cache_dir: Path | None = None,
) -> Dataset:
    """Map the data set `name` into memory; decode it first if no cache file holds it.

    data_dir: the folder that holds the data (for npz: the file); empty: where downloads go, the
        folder `downloads` of the cache folder.
    download: fetch a missing torchvision data set into data_dir.
    image_size: image-folder only; resize the shorter side to it and crop the centre; 0: as it is.
    cache_dir: instead of the documented cache folder.
    Raises FileNotFoundError where the data is missing and ValueError where it is not as expected.
    """
    source, path = _locate(name, data_dir, download, image_size, cache_dir)
    remove_abandoned(path.parent)
    if data := read(path, name):
        return data
    write(path, name, source.decode())
    if data := read(path, name):
        return data
    raise ValueError(
        f"the cache file {path} is not what was just written to it: check the disk, or set "
        "FEDACCORD_CACHE to a folder on another"
    )


def cached(
    name: str, data_dir: str = "", *, image_size: int = 0, cache_dir: Path | None = None
) -> Dataset | None:
    """The data set as an earlier `load` decoded it; None: it is not decoded yet.

    Raises FileNotFoundError where the data is missing.
    """
    _, path = _locate(name, data_dir, False, image_size, cache_dir)
    return read(path, name)


def _locate(
    name: str, data_dir: str, download: bool, image_size: int, cache_dir: Path | None
) -> tuple[Source, Path]:
    """Where the data is, and the cache file that is its own."""
    if name not in DATASETS:
        near = did_you_mean(name, DATASETS)
        raise ValueError(f"dataset: expected one of {', '.join(DATASETS)}, got {name!r}{near}")
    if not 0 <= image_size <= MAX_IMAGE_SIZE or (image_size and name != "image-folder"):
        raise ValueError(
            f"image-size: expected 0, or a size up to {MAX_IMAGE_SIZE} with image-folder; got "
            f"{image_size} with {name}: set it to 0"
        )
    folder = cache_dir or cache_folder()
    root = _absolute(data_dir) if data_dir else folder / "downloads"
    source = DATASETS[name](root, download, image_size)
    return source, folder / f"{name}-{fingerprint(source.paths, image_size)}.safetensors"


class Facts(NamedTuple):
    """What is known of a data set before it is decoded."""

    shape: tuple[int, ...]  # of a sample
    classes: int
    samples: int  # for training
    size: int  # bytes once decoded, of training and test samples


def _images(shape: tuple[int, int, int], classes: int, train: int, test: int) -> Facts:
    a_sample = shape[0] * shape[1] * shape[2] + 8  # uint8 pixels, int64 label
    return Facts(shape, classes, train, (train + test) * a_sample)


KNOWN = {
    "digits": _images((1, 8, 8), 10, 1438, 359),
    "fashion-mnist": _images((1, 28, 28), 10, 60_000, 10_000),
    "cifar10": _images((3, 32, 32), 10, 50_000, 10_000),
    "cifar100": _images((3, 32, 32), 100, 50_000, 10_000),
}


def _absolute(data_dir: str) -> Path:
    try:
        path = Path(data_dir).expanduser().resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        raise ValueError(
            f"data-dir: expected a path, got {data_dir!r} ({error}): name the folder of the data"
        ) from error
    return path


# The sources. Each takes (root, download, image_size) and finds its data or says what is missing.


def _digits(root: Path, download: bool, image_size: int) -> Source:
    return Source((), _decode_digits)


def _decode_digits() -> Decoded:
    """scikit-learn's 1,797 digits of 8x8 pixels; one in five of each class is for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = np.rint(digits.images * 255 / 16).astype(np.uint8)  # 0..16 as they come
    y = digits.target
    test = np.zeros(len(y), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(y == label)[2::5]] = True
    names = tuple(map(str, range(10)))
    return Decoded(x[~test], y[~test], x[test], y[test], 10, names)


def _fashion_mnist(root: Path, download: bool, image_size: int) -> Source:
    return _torchvision("FashionMNIST", "FashionMNIST/raw", 10, (28, 28), root, download)


def _cifar100(root: Path, download: bool, image_size: int) -> Source:
    return _torchvision("CIFAR100", "cifar-100-python", 100, (32, 32, 3), root, download)


def _cifar10(root: Path, download: bool, image_size: int) -> Source:
    """CIFAR-10 as torchvision keeps it, or as image files in root or in root/cifar10.

    With image files it is what dataset image-folder gives, with the usual normalisation.
    """
    for folder in (root, root / "cifar10"):
        if not (root / "cifar-10-batches-py").is_dir() and (folder / "train").is_dir():
            source = image_folder.find(folder, image_size)
            return Source(source.paths, partial(_decode_cifar10_files, folder, source))
    return _torchvision("CIFAR10", "cifar-10-batches-py", 10, (32, 32, 3), root, download)


def _decode_cifar10_files(folder: Path, source: Source) -> Decoded:
    data = source.decode()
    if data.classes != 10 or data.x_train.shape[1:] != (32, 32, 3):
        raise ValueError(
            f"cifar10: expected 10 classes of (32, 32, 3) images in {folder}, got {data.classes} "
            f"of {data.x_train.shape[1:]}: use dataset image-folder for other images"
        )
    return data


def _torchvision(
    kind: str, subfolder: str, classes: int, size: tuple[int, ...], root: Path, download: bool
) -> Source:
    """The data set that torchvision calls `kind` and keeps in root/subfolder; images of `size`."""

    def split(train: bool) -> Any:
        from torchvision import datasets

        try:
            return getattr(datasets, kind)(root, train=train, download=download)
        except Exception as error:  # torchvision asserts where it does not check
            reason = str(error) or type(error).__name__
            again = f"delete {root / subfolder} and set" if (root / subfolder).exists() else "try"
            raise ValueError(
                f"{kind} cannot be had from {root} ({reason}): {again} download=true again, or "
                "point data-dir to a complete copy"
            ) from error

    def decode() -> Decoded:
        train, test = split(True), split(False)
        x_train, x_test = np.asarray(train.data), np.asarray(test.data)
        y_train, y_test = np.asarray(train.targets), np.asarray(test.targets)
        for x, y in ((x_train, y_train), (x_test, y_test)):
            top = y.max(initial=-1)
            if x.shape != (len(y), *size) or x.dtype != np.uint8 or not 0 <= top < classes:
                raise ValueError(
                    f"{kind}: expected uint8 images of {size} and a label below {classes} for each "
                    f"in {root / subfolder}, got {x.shape} {x.dtype} and {len(y)} labels up to "
                    f"{top}: delete it and set download=true, or point data-dir to a complete copy"
                )
        return Decoded(x_train, y_train, x_test, y_test, classes, tuple(train.classes))

    if not (root / subfolder).is_dir():
        if not download:
            raise FileNotFoundError(
                f"{root} has no {subfolder} (torchvision's {kind}): set download=true to fetch "
                "it, or point data-dir to the folder that has it; image files in train/<class>/* "
                "and test/<class>/* are dataset=image-folder"
            )
        split(train=True)
    return Source((root / subfolder,), decode)


def _image_folder(root: Path, download: bool, image_size: int) -> Source:
    return image_folder.find(root, image_size)


def _npz(root: Path, download: bool, image_size: int) -> Source:
    return npz.find(root)


DATASETS: dict[str, Callable[[Path, bool, int], Source]] = {
    "digits": _digits,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "image-folder": _image_folder,
    "npz": _npz,
}
