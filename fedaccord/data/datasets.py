"""Data sets by name, decoded once and mapped into memory by every process.

`load` finds the files, decodes them into one cache file and maps that file; later calls, in this
process or another, only map it (see cache.py). A cache file's name carries hashes of the source's
path, of the names, sizes and times of its files, and of the settings and the code that decode them:
changed data is decoded again.
"""

from __future__ import annotations

from pathlib import Path

from fedaccord.core.named import FORM
from fedaccord.core.options import did_you_mean
from fedaccord.data.cache import cache_folder, fingerprint, read, remove_abandoned, write
from fedaccord.data.digits import DIGITS
from fedaccord.data.function import FUNCTION, FUNCTIONS, from_function
from fedaccord.data.image_folder import IMAGE_FOLDER
from fedaccord.data.kind import Dataset, Kind, ReadOptions, Source
from fedaccord.data.npz import NPZ
from fedaccord.data.text import TEXT
from fedaccord.data.vision import CIFAR10, CIFAR100, FASHION_MNIST

DATASETS: dict[str, Kind] = {
    "digits": DIGITS,
    "fashion-mnist": FASHION_MNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "image-folder": IMAGE_FOLDER,
    "npz": NPZ,
    "text": TEXT,
}
USUAL = ReadOptions()
MAX_IMAGE_SIZE = 4096  # pixels of a side, of images that are resized


def kind_of(name: str) -> Kind:
    """The `Kind` of a data set by name, also of a function that makes one.

    Raises ValueError for an unknown name.
    """
    if name in DATASETS:
        return DATASETS[name]
    if name in FUNCTIONS:
        return FUNCTION
    near = did_you_mean(name, DATASETS)
    raise ValueError(
        f"dataset: expected one of {', '.join(DATASETS)}, or {FORM}, got {name!r}{near}"
    )


def load(name: str, data_dir: str = "", reading: ReadOptions = USUAL) -> Dataset:
    """Map the data set `name` into memory; decode it first if no cache file holds it.

    data_dir: the folder that holds the data (for npz: the file); empty: where downloads are stored,
        the folder `downloads` of the cache folder.
    The result of a function is not cached.
    Raises FileNotFoundError if the data is missing and ValueError if it is not as expected.
    """
    try:
        data = _load(name, data_dir, reading)
    except PermissionError as error:
        raise ValueError(
            f"data-dir: expected files and folders that can be read, got {error.filename} "
            f"({error.strerror}): change its permissions"
        ) from error
    if wrong := [each for each in data.class_names if not _is_text(each)]:
        raise ValueError(f"{name}: expected names of classes in UTF-8, got {wrong[0]!a}: rename it")
    return data


def _load(name: str, data_dir: str, reading: ReadOptions) -> Dataset:
    kind = kind_of(name)
    if (size := reading.image_size) and "image_size" not in kind.reads:
        resized = " or ".join(name for name, kind in DATASETS.items() if "image_size" in kind.reads)
        raise ValueError(
            f"image-size: expected 0, or a size with {resized}; got {size} with {name}: set it to 0"
        )
    if kind is FUNCTION:
        return from_function(name, data_dir, reading)
    source, path = _locate(name, data_dir, reading)
    remove_abandoned(path.parent)
    if data := read(path, name):
        return data
    write(path, source.decode(), kind.scale, private=kind.origin == "user")
    if data := read(path, name):
        return data
    raise ValueError(
        f"the cache file {path} differs from what was just written: check the disk, or set "
        "FEDACCORD_CACHE to a folder on another"
    )


def cached(name: str, data_dir: str = "", reading: ReadOptions = USUAL) -> Dataset | None:
    """The data set as an earlier `load` decoded it; None: it is not decoded yet.

    Raises FileNotFoundError if the data is missing.
    """
    if kind_of(name) is FUNCTION:
        return None
    _, path = _locate(name, data_dir, reading._replace(download=False))
    return read(path, name)


def _locate(name: str, data_dir: str, reading: ReadOptions) -> tuple[Source, Path]:
    """The data's files, and the path of its cache file."""
    kind, folder = DATASETS[name], cache_folder()
    if kind.origin == "user" and not data_dir:
        raise FileNotFoundError(
            f"data-dir: expected the path of the data of dataset={name}, got none"
        )
    root = _absolute(data_dir) if data_dir else folder / "downloads"
    if data_dir and reading.download and kind.origin == "download" and not root.parent.is_dir():
        raise FileNotFoundError(
            f"data-dir: expected a folder to download {name} to, got {root}, whose parent does not "
            "exist; check the path, or make the folder"
        )
    source = kind.find(root, reading)
    settings = {setting: getattr(reading, setting) for setting in kind.reads}
    names = fingerprint(source.paths, settings, source.code)
    return source, folder / f"{name}-{names}.safetensors"


def _is_text(name: str) -> bool:
    """Whether a file name is valid Unicode; it may have any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _absolute(data_dir: str) -> Path:
    try:
        path = Path(data_dir).expanduser().resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        raise ValueError(
            f"data-dir: expected a path, got {data_dir!r} ({error}): name the folder of the data"
        ) from error
    return path
