"""Data sets of image files: train/<class>/* and test/<class>/*."""

from __future__ import annotations

import logging
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedaccord.data.kind import Arrays, Kind, ReadOptions, Source, check_fits
from fedaccord.data.seeding import ALONE
from fedaccord.data.transforms import augment

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger("flwr")  # what a run prints

IMAGE_SUFFIXES = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def find(root: Path, reading: ReadOptions) -> Source:
    """Raises ValueError without Pillow."""
    if find_spec("PIL") is None:
        raise ValueError(
            "image-folder: expected Pillow, which reads images, found none: uv pip install pillow"
        )
    for folder in (root / "train", root / "test"):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"image-folder: expected train/<class>/* and test/<class>/* in {root}, found no "
                f"{folder.name}: point data-dir to the folder that has both"
            )
    return Source((root / "train", root / "test"), partial(decode, root, reading))


def decode(root: Path, reading: ReadOptions) -> Arrays:
    """Class k is the k-th of ``labels``, any of which may lack a folder, or without labels the k-th
    class folder by name, which may be empty if a client lacks the class.

    Names that begin with a dot are ignored; other entries that are not images are left out with a
    warning. Raises ValueError, in one line.
    """
    names = [
        sorted(entry.name for entry in _shown(root / split) if entry.is_dir())
        for split in ("train", "test")
    ]
    classes = reading.class_names or tuple(names[0])
    if unknown := sorted({*names[0], *names[1]} - {*classes}) if reading.labels else []:
        raise ValueError(
            f"labels: expected every class folder of {root} among {', '.join(classes)}, got "
            f"{unknown[0]}: add it"
        )
    if len(classes) < 2:
        raise ValueError(
            f"image-folder: expected a folder for each of two or more classes in {root / 'train'}, "
            f"got {len(names[0])}: put the images into train/<class>/*"
        )
    if names[0] != names[1] and not reading.labels:
        missing = ", ".join(sorted(set(names[0]) ^ set(names[1]))[:5])
        raise ValueError(
            f"image-folder: expected the same class folders in train and test of {root}, got only "
            f"one of the two for: {missing}: add the other, empty if need be, or name all classes "
            "in labels="
        )
    files: list[Path] = []
    others: list[Path] = []
    labels: list[int] = []
    for split in ("train", "test"):
        before = len(files)
        for label, name in enumerate(classes):
            folder = root / split / name
            entries = _shown(folder) if folder.is_dir() else []
            named = [entry for entry in entries if entry.suffix.lower() in IMAGE_SUFFIXES]
            images = [entry for entry in named if entry.is_file()]
            others += sorted({*entries} - {*images})
            files += images
            labels += [label] * len(images)
        if len(files) == before:
            raise ValueError(
                f"image-folder: expected images in {root / split}/<class>/*, got none: add some "
                f"({', '.join(sorted(IMAGE_SUFFIXES))})"
            )
    if others:
        log.warning(
            f"image-folder: {len(others)} entries of the class folders are left out, e.g. "
            f"{others[0]}: they are not files called {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    with ALONE, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's warnings about an image
        x, y = _decode_images(files, reading.image_size), np.array(labels)
    return Arrays(x[:before], y[:before], x[before:], y[before:], len(classes), classes)


def _shown(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _decode_images(files: list[Path], image_size: int) -> NDArray[np.uint8]:
    """(n, h, w, 3), or (n, h, w) if every image is grey; all have the size of the first image."""
    height, width = _decode_image(files[0], image_size).shape[:2]
    check_fits(f"image-folder: {len(files)} images", len(files) * height * width * 3)
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

    chunk = 256  # images per task: sending a small one costs more than reading it
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        all_grey = all(list(pool.map(decode, range(0, len(files), chunk))))
    return images[..., 0] if all_grey else images


def _decode_image(file: Path, image_size: int) -> NDArray[np.uint8]:
    """(h, w) of a grey image of 8 or 16 bits, (h, w, 3) of any other, not rotated by EXIF."""
    from PIL import Image, ImageOps  # which a device with other data may lack

    try:
        with Image.open(file) as opened:
            image: Image.Image = opened
            if image.mode in ("I", "F") or image.mode.startswith("I;16"):
                image = _eight_bits(image)
            elif image.mode not in ("L", "RGB"):
                image = image.convert("RGB")
            if image_size:
                image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
            return np.asarray(image)
    except Exception as error:  # Pillow raises a dozen kinds on a damaged file
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"image-folder: cannot read {file} as an image ({reason}): remove or replace it"
        ) from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits in 8, which Pillow's own conversion would clip to white."""
    # Pillow reads 16-bit PNG and PGM files as 32-bit integers, by its version
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise OSError(f"{kind} pixels: convert it to 8 or 16 bits")
    from PIL import Image

    return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))


IMAGE_FOLDER = Kind(find=find, origin="user", reads=("image_size", "labels"), augment=augment)
