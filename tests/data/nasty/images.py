"""Folders for dataset=image-folder."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.data.nasty import Case, Cases, Maker, Settings, alike


def folder_of(folder: Path) -> Settings:
    return {"dataset": "image-folder", "data-dir": str(folder / "pets")}


def pets(folder: Path) -> Path:
    """Two classes of two images for training and one for testing, 6x4 pixels."""
    for where in ("train/cat/1", "train/cat/2", "train/dog/1", "test/cat/1", "test/dog/1"):
        path = folder / "pets" / f"{where}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), (10, 20, 30)).save(path)
    return folder / "pets"


def with_file(name: str, content: bytes) -> Maker:
    """A valid folder and one more file."""

    def make(folder: Path) -> Settings:
        path = pets(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return folder_of(folder)

    return make


def with_image(image: Image.Image, kind: str = "png", change: Any = None, **options: Any) -> Maker:
    """A valid folder and one more image, whose bytes may be changed."""
    content = bytearray(of_image(image, kind, **options))
    return with_file(f"train/dog/9.{kind}", bytes((change and change(content)) or content))


def of_image(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "jpeg" if kind == "jpg" else kind, **options)
    return file.getvalue()


def changed(change: Callable[[Path], Any], **settings: Any) -> Maker:
    def make(folder: Path) -> Settings:
        change(pets(folder))
        return folder_of(folder) | settings

    return make


NOISE = np.random.default_rng(0).integers(256, size=(4, 6, 3), dtype=np.uint8)
COLOUR = Image.fromarray(NOISE)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(5 * 7)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + pixels + chunk(b"IEND", b"")


def ztxt(size: int) -> bytes:
    return chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(size)))


def rename(old: str, new: str) -> Callable[[Path], Any]:
    return lambda root: (root / old).rename(root / new)


def linked_to_parents(root: Path) -> None:
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            for link in ("a", "b", "c"):
                (root / split / name / link).symlink_to(root, target_is_directory=True)


def nested(root: Path) -> None:
    (root / "train/dog/more").mkdir()
    COLOUR.save(root / "train/dog/more/1.png")


def without(pattern: str) -> Callable[[Path], Any]:
    def change(root: Path) -> None:
        for file in root.glob(pattern):
            file.unlink()

    return change


def both(name: str) -> Callable[[Path], Any]:
    def change(root: Path) -> None:
        for split in ("train", "test"):
            (root / split / name).mkdir()

    return change


def wide(root: Path) -> None:
    Image.new("RGB", (3000, 1)).save(root / "train/dog/9.png")


PETS = "3 + 2 of (3, 4, 6) in 2"  # the sound images
SHORT = np.array([[0, 257, 128 * 257, 65535]] * 4, dtype=np.uint16)
IMAGES: Cases = {
    "no folder": (folder_of, "found no train: point data-dir"),
    "a file for train": Case(
        changed(lambda root: (rename("train", "old")(root), (root / "train").touch())),
        "found no train",
    ),
    "no test folder": (changed(rename("test", "validation")), "found no test: point data-dir"),
    "no images for testing": (changed(without("test/*/*")), "test/<class>/*, got none: add some"),
    "no images for training": (changed(without("train/*/*")), "train/<class>/*, got none"),
    "one class of images": Case(
        changed(lambda root: (rename("train/dog", "x")(root), rename("test/dog", "y")(root))),
        "two or more classes in",
    ),
    "a class of the test alone": (changed(lambda root: (root / "test/emu").mkdir()), "for: emu"),
    "a class without images": (changed(both("emu")), "", "3 + 2 of (3, 4, 6) in 3"),
    "a class with a line break": (changed(both("e\nmu")), "", "3 + 2 of (3, 4, 6) in 3"),
    "a hidden folder": (changed(both(".ipynb_checkpoints")), "", PETS),
    "a hidden file": (with_file("train/cat/._1.png", b"\0\5\x16\7" + bytes(100)), "", PETS),
    "links to parents": Case(
        changed(linked_to_parents), "12 entries of the class folders are left out", PETS
    ),
    "an image of another size": (with_image(Image.new("RGB", (7, 4))), "9.png): set image-size"),
    "a line of 3000 pixels to resize": Case(
        changed(wide, **{"image-size": 8}), "", "4 + 2 of (3, 8, 8) in 2"
    ),
    "an image size of 10^9": Case(
        changed(lambda root: None, **{"image-size": 10**9}), "got 1000000000"
    ),
    "a 32-bit tiff": Case(
        with_image(Image.fromarray(np.full((4, 6), 70_000, np.int32)), "tiff"),
        "(32-bit pixels: convert it to 8 or 16 bits",
    ),
    "a float tiff": Case(
        with_image(Image.fromarray(np.ones((4, 6), np.float32)), "tiff"),
        "(floating-point pixels: convert it to 8 or 16 bits",
    ),
}
IMAGES |= alike(
    "1 entries of the class folders are left out",
    PETS,
    {
        "a text beside": with_file("train/cat/notes.txt", b"cats"),
        "an image of a kind that is not read": with_file("train/cat/1.heic", b"ftypheic"),
        "images in a folder of a class": changed(nested),
        "a folder for an image": changed(lambda root: (root / "train/dog/9.png").mkdir()),
        "a pipe for an image": changed(lambda root: os.mkfifo(root / "train/dog/9.png")),
        "a link to nothing": changed(
            lambda root: (root / "train/dog/9.png").symlink_to(root / "gone.png")
        ),
    },
)
IMAGES |= alike(
    "as an image (",
    "",
    {
        "an empty image": with_file("train/dog/9.png", b""),
        "a text for an image": with_file("train/dog/9.jpg", b"no picture"),
        "half a png": with_image(COLOUR, "png", lambda content: content[: len(content) // 2]),
        "a png of 3.6 gigapixels": with_file("train/dog/9.png", png(60_000, 60_000)),
        "a png of 100 megapixels": with_file("train/dog/9.png", png(10_000, 10_000)),
        "a png with a text of 100 MB": with_file("train/dog/9.png", png(6, 4, ztxt(10**8))),
    },
)
IMAGES |= alike(
    "",
    "4 + 2 of (3, 4, 6) in 2",
    {
        "a 16-bit png": with_image(Image.fromarray(SHORT).resize((6, 4))),
        "a black-and-white png": with_image(Image.new("1", (6, 4))),
        "a png with a palette": with_image(COLOUR.convert("P")),
        "a transparent png": with_image(COLOUR.convert("RGBA")),
        "a grey transparent png": with_image(COLOUR.convert("LA")),
        "a jpg for printing": with_image(COLOUR.convert("CMYK"), "jpg"),
        "a gif called png": with_file("train/dog/9.png", of_image(COLOUR, "gif")),
        "a film": with_image(COLOUR, "tiff", save_all=True, append_images=[COLOUR] * 3),
    },
)
