"""Data sets by name, decoded once to uint8 and mapped into memory by every process.

`load` looks for the data, decodes it into one cache file and maps that file; later calls, in this
process or another, only map it, so that all of them share one copy in memory. The cache folder is
$FEDACCORD_CACHE, else $XDG_CACHE_HOME/fedaccord, else ~/.cache/fedaccord. A file's name carries a
hash of the source's path and of the names, sizes and times of its files: changed data is decoded
anew. The folder may be deleted at any time.

Images are batched, augmented and normalised as whole tensors, on whichever device they lie.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import uuid
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
# Mean and standard deviation per channel; where none are given they are those of the images.
CONSTANTS = {
    "cifar10": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
AUGMENTED = {"cifar10", "cifar100", "image-folder"}  # natural images: a mirrored one is as good
IMAGE_SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
PAD = 4  # pixels on each side, of which a random crop takes some
CACHE_FORMAT = 1  # raise it when the decoding changes: older cache files are then left aside


class Dataset(NamedTuple):
    """Training and test data in memory, mapped from the cache file: writes stay in the process."""

    name: str
    x_train: torch.Tensor  # (n, channels, height, width) uint8, or (n, ...) float32 features
    y_train: torch.Tensor  # (n,) int64, 0 <= y < classes
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    mean: tuple[float, ...]  # per channel, of training pixels in [0, 1]; empty for features
    std: tuple[float, ...]
    augment: bool  # whether `augment` suits these images


class Decoded(NamedTuple):
    """What a source gives: channel-last uint8 images or float32 features, and their labels."""

    x_train: NDArray[Any]  # (n, height, width[, channels]) uint8, or (n, ...) float32
    y_train: NDArray[Any]  # (n,) integers
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    classes: int


class Source(NamedTuple):
    """Where data was found, and how to decode it."""

    paths: tuple[Path, ...]  # files and folders whose change makes the cache stale
    decode: Callable[[], Decoded]


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
    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        known = ", ".join(DATASETS)
        raise ValueError(f"dataset: expected one of {known}; got {name!r}: did you mean {nearest}?")
    if image_size < 0 or (image_size and name != "image-folder"):
        raise ValueError(
            f"image-size: expected 0, or a positive size with image-folder; got {image_size} "
            f"with {name}: set it to 0"
        )
    folder = cache_dir or cache_folder()
    root = Path(data_dir).expanduser().resolve() if data_dir else folder / "downloads"
    source = DATASETS[name](root, download, image_size)
    path = folder / f"{name}-{_fingerprint(source.paths, image_size)}.safetensors"
    try:
        return _read(path, name)
    except (OSError, SafetensorError):  # not there yet, or cut short
        _write(path, name, source.decode())
        return _read(path, name)


def normalise(x: torch.Tensor, dataset: Dataset, dtype: torch.dtype) -> torch.Tensor:
    """(x/255 - mean)/std per channel of a (..., c, h, w) uint8 batch; float features are cast.

    Computed at float32 or better, on x's device, and only then rounded to `dtype`.
    """
    if x.dtype != torch.uint8:
        return x.to(dtype)
    work = torch.promote_types(dtype, torch.float32)
    mean, std = _raw_constants(dataset.mean, dataset.std, x.device, work)
    return x.to(work).sub_(mean).div_(std).to(dtype)


@lru_cache(maxsize=32)
def _raw_constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """255 mean and 255 std as (c, 1, 1); kept, so that a GPU does not wait for them each batch."""
    raw = 255 * torch.tensor([mean, std], dtype=torch.float64)[:, :, None, None]
    mean_, std_ = raw.to(dtype=dtype).to(device)
    return mean_, std_


def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random crop of each image padded by 4 black pixels, mirrored with p = 1/2.

    x: (b, c, h, w) uint8. The pad is zero in raw pixels, before normalisation, as torchvision's
    RandomCrop(h, padding=4) on images has it. One number per image is drawn from the CPU
    `generator`, so that a batch on a GPU is cut as it would be on the CPU.
    """
    b, c, h, w = x.shape
    shifts = 2 * PAD + 1
    draw = torch.randint(shifts * shifts * 2, (b, 1), generator=generator).to(x.device)
    top, left, flip = draw // (shifts * 2), draw // 2 % shifts, draw % 2 == 1
    column = torch.arange(w, device=x.device)
    rows = top + torch.arange(h, device=x.device)  # (b, h)
    columns = left + torch.where(flip, column.flip(0), column)  # (b, w)
    pixels = rows[:, :, None] * (w + 2 * PAD) + columns[:, None, :]  # (b, h, w), of padded images
    padded = F.pad(x, (PAD, PAD, PAD, PAD)).flatten(2)
    return padded.gather(2, pixels.view(b, 1, h * w).expand(b, c, h * w)).view(b, c, h, w)


# The cache: one safetensors file a data set, which safetensors maps rather than reads.


def cache_folder() -> Path:
    """$FEDACCORD_CACHE, else $XDG_CACHE_HOME/fedaccord, else ~/.cache/fedaccord."""
    if own := os.environ.get("FEDACCORD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedaccord"


def _fingerprint(paths: tuple[Path, ...], image_size: int) -> str:
    """Short hash of the paths and of the names, sizes and times of all that lies below them."""
    found = [str(path) for path in paths]
    for path in paths:
        for folder, folders, files in os.walk(path, followlinks=True):
            found += [f"{folder}/{entry}" for entry in folders + files]
    found.sort()
    stats = map(os.stat, found)  # one at a time: a list of 60,000 would wake the garbage collector
    facts = [
        (entry, stat.st_size, stat.st_mtime_ns) for entry, stat in zip(found, stats, strict=True)
    ]
    return hashlib.sha256(repr((CACHE_FORMAT, image_size, facts)).encode()).hexdigest()[:12]


def _read(path: Path, name: str) -> Dataset:
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        x_train, y_train, x_test, y_test = (file.get_tensor(key) for key in ARRAYS)
    return Dataset(
        name,
        x_train,
        y_train,
        x_test,
        y_test,
        classes=facts["classes"],
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        augment=name in AUGMENTED,
    )


def _write(path: Path, name: str, data: Decoded) -> None:
    """Write a cache file under another name, then rename it: readers see all of it or nothing."""
    tensors = {
        "x_train": _channel_first(data.x_train),
        "y_train": torch.from_numpy(data.y_train.astype(np.int64)),
        "x_test": _channel_first(data.x_test),
        "y_test": torch.from_numpy(data.y_test.astype(np.int64)),
    }
    mean, std = CONSTANTS.get(name) or _channel_stats(tensors["x_train"])
    facts = json.dumps({"classes": data.classes, "mean": mean, "std": std})
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata={"facts": facts})
        part.replace(path)
    except (OSError, SafetensorError) as error:
        if path.parent.is_dir():
            part.unlink(missing_ok=True)
        raise ValueError(
            f"the cache folder {path.parent} cannot be written ({error}): set FEDACCORD_CACHE to "
            "a writable folder with enough space"
        ) from error


def _channel_first(x: NDArray[Any]) -> torch.Tensor:
    """(n, h, w[, c]) images as (n, c, h, w); features as they are."""
    if x.dtype == np.uint8:
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x))


def _channel_stats(x: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 images, exactly, from their histograms."""
    if x.dtype != torch.uint8:
        return (), ()
    level = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in x.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean.append(float(share @ level))
        std.append(float((share @ (level - mean[-1]) ** 2).sqrt()) or 1.0)  # constant: only centre
    return tuple(mean), tuple(std)


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
    return Decoded(x[~test], y[~test], x[test], y[test], classes=10)


def _fashion_mnist(root: Path, download: bool, image_size: int) -> Source:
    return _torchvision("FashionMNIST", "FashionMNIST/raw", 10, root, download)


def _cifar100(root: Path, download: bool, image_size: int) -> Source:
    return _torchvision("CIFAR100", "cifar-100-python", 100, root, download)


def _cifar10(root: Path, download: bool, image_size: int) -> Source:
    """CIFAR-10 as torchvision keeps it, or as image files in root or in root/cifar10."""
    for folder in (root, root / "cifar10"):
        if not (root / "cifar-10-batches-py").is_dir() and (folder / "train").is_dir():
            source = _image_folder(folder, download, image_size)
            return Source(source.paths, partial(_decode_cifar10_files, folder, source))
    return _torchvision("CIFAR10", "cifar-10-batches-py", 10, root, download)


def _decode_cifar10_files(folder: Path, source: Source) -> Decoded:
    data = source.decode()
    if data.classes != 10 or data.x_train.shape[1:] != (32, 32, 3):
        raise ValueError(
            f"cifar10: expected 10 classes of (32, 32, 3) images in {folder}, got {data.classes} "
            f"of {data.x_train.shape[1:]}: use dataset image-folder for other images"
        )
    return data


def _torchvision(kind: str, subfolder: str, classes: int, root: Path, download: bool) -> Source:
    """The data set that torchvision calls `kind` and keeps in root/subfolder."""

    def split(train: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        from torchvision import datasets

        try:
            data = getattr(datasets, kind)(root, train=train, download=download)
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"{kind} cannot be had from {root} ({error}): delete {root / subfolder} and set "
                "download=true, or point data-dir to a complete copy"
            ) from error
        return np.asarray(data.data), np.asarray(data.targets)

    if not (root / subfolder).is_dir():
        if not download:
            raise FileNotFoundError(
                f"{root} has no {subfolder} (torchvision's {kind}): set download=true to fetch "
                "it, or point data-dir to the folder that has it"
            )
        split(train=True)
    return Source((root / subfolder,), lambda: Decoded(*split(True), *split(False), classes))


def _image_folder(root: Path, download: bool, image_size: int) -> Source:
    for folder in (root / "train", root / "test"):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"image-folder: expected train/<class>/* and test/<class>/* in {root}, found no "
                f"{folder.name}: point data-dir to the folder that has both"
            )
    return Source((root / "train", root / "test"), partial(_decode_image_folder, root, image_size))


def _decode_image_folder(root: Path, image_size: int) -> Decoded:
    """Class k is the k-th class folder by name; one may be empty, if a client lacks the class."""
    names = [
        sorted(entry.name for entry in (root / split).iterdir() if entry.is_dir())
        for split in ("train", "test")
    ]
    if len(names[0]) < 2:
        raise ValueError(
            f"image-folder: expected a folder for each of two or more classes in {root / 'train'}, "
            f"got {len(names[0])}: put the images into train/<class>/*"
        )
    if names[0] != names[1]:
        missing = ", ".join(sorted(set(names[0]) ^ set(names[1]))[:5])
        raise ValueError(
            f"image-folder: expected the same class folders in train and test of {root}, got only "
            f"one of the two for: {missing}: add the other, empty if need be"
        )
    files: list[Path] = []
    labels: list[int] = []
    for split in ("train", "test"):
        before = len(files)
        for label, name in enumerate(names[0]):
            entries = sorted((root / split / name).iterdir())
            images = [entry for entry in entries if entry.suffix.lower() in IMAGE_SUFFIXES]
            files += images
            labels += [label] * len(images)
        if len(files) == before:
            raise ValueError(
                f"image-folder: expected images in {root / split}/<class>/*, got none: add some "
                f"({', '.join(sorted(IMAGE_SUFFIXES))})"
            )
    x, y = _decode_images(files, image_size), np.array(labels)
    return Decoded(x[:before], y[:before], x[before:], y[before:], classes=len(names[0]))


def _decode_images(files: list[Path], image_size: int) -> NDArray[np.uint8]:
    """(n, h, w, 3), or (n, h, w) where every image is grey; all of the first one's size."""
    height, width = _decode_image(files[0], image_size).shape[:2]
    images = np.empty((len(files), height, width, 3), dtype=np.uint8)

    def decode(start: int) -> bool:
        grey = True
        for i in range(start, min(start + chunk, len(files))):
            pixels = _decode_image(files[i], image_size)
            if pixels.shape[:2] != (height, width):
                raise ValueError(
                    f"image-folder: expected images of one size, got {width}x{height} "
                    f"({files[0]}) and {pixels.shape[1]}x{pixels.shape[0]} ({files[i]}): set "
                    "image-size to resize them"
                )
            grey = grey and pixels.ndim == 2
            images[i] = pixels if pixels.ndim == 3 else pixels[..., None]
        return grey

    chunk = 256  # images a task: a small one takes less time than to hand it over
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        all_grey = all(list(pool.map(decode, range(0, len(files), chunk))))
    return images[..., 0] if all_grey else images


def _decode_image(file: Path, image_size: int) -> NDArray[np.uint8]:
    """(h, w) of a grey image, (h, w, 3) of any other."""
    try:
        with Image.open(file) as opened:
            image: Image.Image = opened if opened.mode == "L" else opened.convert("RGB")
            if image_size:
                image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
            return np.asarray(image)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow raises them
        raise ValueError(
            f"image-folder: expected an image in {file}, got what cannot be read as one "
            f"({error}): remove or replace it"
        ) from error


def _npz(root: Path, download: bool, image_size: int) -> Source:
    if not root.is_file():
        raise FileNotFoundError(
            f"npz: expected a .npz file, found no file {root}: point data-dir to one with the "
            f"arrays {', '.join(ARRAYS)}"
        )
    return Source((root,), partial(_decode_npz, root))


def _decode_npz(path: Path) -> Decoded:
    """uint8 images (n, h, w[, c]) or float features (n, ...), with integer labels (n,).

    An array `classes` may tell how many classes there are, if a client lacks some; without it,
    each of 0..k-1 must be among y_train.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("not a zip archive")
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in (*ARRAYS, "classes") if key in file}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"npz: expected numbers written by numpy.savez in {path}, got what cannot be read as "
            f"such ({error}): write it anew"
        ) from error
    if missing := [key for key in ARRAYS if key not in arrays]:
        raise ValueError(
            f"npz: expected the arrays {', '.join(ARRAYS)} in {path}, got none called "
            f"{', '.join(missing)}: add it"
        )
    x_train, y_train, x_test, y_test = (arrays[key] for key in ARRAYS)
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if y.ndim != 1 or y.dtype.kind not in "iu" or y.size == 0 or y.min() < 0:
            raise ValueError(
                f"npz: expected y_{split} of {path} as (n,) integers from 0 on, got {y.shape} "
                f"{y.dtype}{f' from {y.min()} on' if y.size else ''}: number the classes 0..k-1"
            )
        is_images = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] <= 4))
        is_features = x.dtype.kind == "f" and x.ndim >= 2
        if not (is_images or is_features) or len(x) != len(y):
            raise ValueError(
                f"npz: expected x_{split} of {path} as {len(y)} uint8 images (n, h, w) or "
                f"(n, h, w, channels), or float features (n, ...), one for each of y_{split}; got "
                f"{x.shape} {x.dtype}: convert it"
            )
    if x_train.dtype.kind != x_test.dtype.kind or x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            f"npz: expected x_train and x_test of {path} alike, got {x_train.shape[1:]} "
            f"{x_train.dtype} and {x_test.shape[1:]} {x_test.dtype}: convert one"
        )
    if x_train.dtype != np.uint8:
        with np.errstate(over="ignore"):  # it becomes inf, and is reported as that
            x_train, x_test = x_train.astype(np.float32), x_test.astype(np.float32)
        if not (np.isfinite(x_train).all() and np.isfinite(x_test).all()):
            raise ValueError(
                f"npz: expected finite float32 features in {path}, got nan or inf: clean them"
            )
    present = np.unique(y_train)
    top = int(max(present[-1], y_test.max()))
    classes = int(arrays["classes"]) if "classes" in arrays else len(present)
    if classes < 2 or top >= classes:
        raise ValueError(
            f"npz: expected two or more classes, labelled 0..k-1, in {path}, got {len(present)} "
            f"in y_train and labels up to {top}: renumber them, or add an array `classes` = k "
            "if some have no examples"
        )
    return Decoded(x_train, y_train, x_test, y_test, classes)


DATASETS: dict[str, Callable[[Path, bool, int], Source]] = {
    "digits": _digits,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "image-folder": _image_folder,
    "npz": _npz,
}
