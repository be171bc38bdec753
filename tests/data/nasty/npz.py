"""Files for dataset=npz."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.nasty import Case, Cases, Maker, Settings, alike

Y, Y_TEST = np.array([0, 1, 2, 1, 0, 2]), np.array([2, 0])
SIX = "6 + 2 of (3,) in 3"  # the sound arrays
GREY = np.arange(6 * 8 * 8).reshape(6, 8, 8).astype(np.uint8)


def arrays(**changes: Any) -> dict[str, Any]:
    """Valid features, with changes; None: without the array."""
    sound = {
        "x_train": np.linspace(-1, 1, 18).reshape(6, 3),
        "y_train": Y,
        "x_test": np.ones((2, 3)),
        "y_test": Y_TEST,
    }
    return {key: value for key, value in (sound | changes).items() if value is not None}


def file_in(folder: Path) -> Settings:
    return {"dataset": "npz", "data-dir": str(folder / "data.npz")}


def npz(**changes: Any) -> Maker:
    def make(folder: Path) -> Settings:
        np.savez(folder / "data.npz", **arrays(**changes))
        return file_in(folder)

    return make


def of_images(x: np.ndarray) -> Maker:
    return npz(x_train=x, x_test=x[:2])


def of_bytes(content: bytes) -> Maker:
    def make(folder: Path) -> Settings:
        (folder / "data.npz").write_bytes(content)
        return file_in(folder)

    return make


def sound_npz(compress: bool = False) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(file, **arrays())
    return file.getvalue()


def of_damage(change: Callable[[bytearray], Any], compress: bool = False) -> Maker:
    """change: changes the bytes of a valid file in place, or returns others."""
    content = bytearray(sound_npz(compress))
    return of_bytes(bytes(change(content) or content))


def of_member(name: str, content: bytes, **zip_options: Any) -> Maker:
    """A valid file except for one member."""

    def make(folder: Path) -> Settings:
        np.savez(folder / "data.npz", **arrays(x_train=None))
        with zipfile.ZipFile(folder / "data.npz", "a", **zip_options) as file:
            file.writestr(name, content)
        return file_in(folder)

    return make


def header(shape: str, descr: str = "<f8") -> bytes:
    """A .npy file that declares an array and has no data."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def bomb(folder: Path) -> Settings:
    """A small file whose directory declares a size of 4 GB."""
    x = np.zeros((6, 3))
    of_member("x_train.npy", npy(x))(folder)
    content = bytearray((folder / "data.npz").read_bytes())
    at = content.rindex(b"PK\x01\x02")  # the last entry of the directory
    content[at + 24 : at + 28] = b"\xf0\xff\xff\xff"  # its size, unpacked
    (folder / "data.npz").write_bytes(content)
    return file_in(folder)


def twice(folder: Path) -> Settings:
    np.savez(folder / "data.npz", **arrays())
    with zipfile.ZipFile(folder / "data.npz", "a") as file:
        file.writestr("y_train.npy", npy(Y[::-1]))
    return file_in(folder)


def a_pipe(folder: Path) -> Settings:
    os.mkfifo(folder / "data.npz")
    return file_in(folder)


def a_loop(folder: Path) -> Settings:
    (folder / "data.npz").symlink_to(folder / "data.npz")
    return file_in(folder)


def at(path: str, dataset: str = "npz") -> Maker:
    return lambda folder: {"dataset": dataset, "data-dir": path}


def labels(classes: int, most: int) -> str:
    return f"got {classes} in y_train and labels up to {most}"


def names(*of: str) -> np.ndarray:
    return np.array(of)


CATS = names("cat", "dog", "emu", "dog", "cat", "emu")
NPZ: Cases = {
    "no file": (file_in, "expected a .npz file, found no file"),
    "a member twice": (twice, "(y_train.npy occurs twice)"),
    "a pipe": (a_pipe, "expected a .npz file, found no file"),
    "a member of text": (of_member("x_train.npy", b"some text"), "got another kind of file"),
    "one number": (
        npz(x_train=np.array(3.0), x_test=None, y_test=None),
        "got () float64",
    ),
    "no test arrays": (npz(x_test=None, y_test=None), "", "6 + 0 of (3,) in 3"),
    "no arrays": Case(
        of_damage(lambda content: b"PK\x05\x06" + bytes(18)),
        "got none called x_train, y_train, x_test, y_test",
    ),
    "integer features": (npz(x_train=np.ones((6, 3), np.int64)), "got (6, 3) int64"),
    "16-bit images": (of_images(GREY.astype(np.uint16)), "got (6, 8, 8) uint16"),
    "images with channels first": Case(
        of_images(np.ones((6, 3, 32, 32), np.uint8)),
        "got (6, 3, 32, 32) uint8: the channels come first: write x_train.transpose(0, 2, 3, 1)",
    ),
    "images of 7 channels": (of_images(np.ones((6, 9, 9, 7), np.uint8)), "got (6, 9, 9, 7) uint8"),
    "videos": (of_images(np.ones((6, 4, 8, 8, 3), np.uint8)), "got (6, 4, 8, 8, 3) uint8"),
    "features of no column": Case(
        npz(x_train=np.ones((6, 0)), x_test=np.ones((2, 0))), "got (6, 0) float64"
    ),
    "one feature as (n,)": (npz(x_train=np.ones(6), x_test=np.ones(2)), "got (6,) float64"),
    "a number for y": (npz(y_train=np.int64(1)), "got () int64 from 1 on"),
    "no training samples": (
        npz(x_train=np.ones((0, 3)), y_train=Y[:0]),
        "expected samples in x_train",
    ),
    "no test samples": (npz(x_test=np.ones((0, 3)), y_test=Y_TEST[:0]), "", "6 + 0 of (3,) in 3"),
    "nan": (npz(x_train=np.full((6, 3), np.nan)), "got nan or inf"),
    "inf in the test": (npz(x_test=np.full((2, 3), np.inf)), "got nan or inf"),
    "beyond float32": (npz(x_train=np.full((6, 3), 1e300)), "got nan or inf"),
    "another width in the test": (npz(x_test=np.ones((2, 4))), "got (3,) float64 and (4,) float64"),
    "images for the test": (npz(x_test=GREY[:2]), "got (3,) float64 and (8, 8) uint8"),
    "fewer labels": (npz(y_train=Y[:5]), "got (6, 3) float64"),
    "labels as a column": (npz(y_train=Y[:, None]), "got (6, 1) int64 from 0 on"),
    "float labels": (npz(y_train=Y.astype(float)), "got (6,) float64 from 0.0 on"),
    "truth values": (npz(y_train=Y > 0, y_test=Y_TEST > 0), "got (6,) bool"),
    "labels from 1": (npz(y_train=Y + 1, y_test=Y_TEST + 1), labels(3, 3)),
    "labels of -1": (npz(y_train=Y - 1), "got (6,) int64 from -1 on"),
    "labels of 2^63": Case(
        npz(y_train=Y.astype(np.uint64) + 2**63), labels(3, 9223372036854775810)
    ),
    "a label of the test alone": (npz(y_test=np.array([0, 3])), labels(3, 3)),
    "one class": (npz(y_train=Y * 0, y_test=Y_TEST * 0), labels(1, 0)),
    "classes [4, 4]": (npz(classes=[4, 4]), "got (2,) int64"),
    "classes 3.0": (npz(classes=3.0), "got 3.0"),
    "classes 10^9": (npz(classes=10**9), "from 2 to 1,000,000 or as names, got 1000000000:"),
    "classes -3": (npz(classes=-3), "got -3"),
    "classes 2 of 3": (npz(classes=2), labels(3, 2)),
    "classes a text": (npz(classes="many"), "got shape () with 1 of them"),
    "classes twice": (npz(classes=names("a", "b", "a")), "got shape (3,) with 2 of them"),
    "names for y_train alone": (npz(y_train=CATS), "both y_train and y_test; got (6,) <U3"),
    "names for y_test alone": (npz(y_test=CATS[:2]), "both y_train and y_test; got (2,) <U3"),
    "names as a column": (npz(y_train=CATS, y_test=CATS[:2, None]), "got (2, 1) int64"),
    "no y_test": (npz(y_test=None), "got none called y_test"),
    "y_train alone": (npz(x_train=None, x_test=None, y_test=None), "x_train, x_test, y_test:"),
    "names of 2 classes of 3": (npz(classes=names("a", "b")), "labels up to 2"),
    "names and a number": (
        npz(y_train=CATS, y_test=CATS[:2], classes=3),
        "got int64: write the names",
    ),
    "names that classes lacks": Case(
        npz(y_train=CATS, y_test=CATS[:2], classes=names("cat", "x")), "got 'dog': add it there"
    ),
    "images of a pixel": (of_images(GREY[:, :1, :1]), "", "6 + 2 of (1, 1, 1) in 3"),
    "two names that are no UTF-8": Case(
        npz(y_train=np.array([b"\xff", b"\xfe", b"c"] * 2), y_test=np.array([b"\xff", b"c"])),
        "are numbered by their names",
        SIX,
    ),
    "float images with channels last": Case(
        of_images(np.ones((6, 9, 9, 3), np.float32)), "got (6, 9, 9, 3) float32"
    ),
}
NPZ |= alike(
    "as numbers written by numpy.savez (",
    "",
    {
        "an empty file": of_bytes(b""),
        "a text": of_bytes(b"x_train: 1, 2, 3"),
        "half of it": of_damage(lambda content: content[: len(content) // 2]),
        "a header of 64 GB": of_member("x_train.npy", header("(8000000000,)")),
        "a header with brackets": of_member("x_train.npy", header("(" * 3000)),
        "objects": npz(y_test=np.array([0, None])),
    },
)
NPZ |= alike(": expected a ", "", {"a link to itself": a_loop})  # Python 3.13 finds no file
NPZ |= alike(
    "data-dir: expected a path",
    "",
    {
        "a NUL in its path": at("/data/x\0.npz"),
        "a path too long": at("/" + "x" * 5000),
        "nobody's home": at("~nobody-of-this-name/data.npz"),
    },
)
NPZ |= alike(
    "",
    SIX,
    {
        "a size of 4 GB": bomb,
        "float16 features": npz(x_train=np.ones((6, 3), np.float16)),
        "big-endian features": npz(x_train=np.ones((6, 3), ">f8"), y_train=Y.astype(">i4")),
        "columns first": npz(x_train=np.asfortranarray(arrays()["x_train"])),
        "more arrays": npz(z=np.ones(9)),
        "packed": of_damage(lambda content: None, compress=True),
    },
)
