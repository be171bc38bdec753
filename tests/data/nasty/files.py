"""Partition files, caches of decoded data, and the files of torchvision's data sets."""

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from fedaccord.data import cache, datasets
from fedaccord.data.kind import ARRAYS
from tests.data.nasty import Case, Cases, Maker, Settings, alike
from tests.data.nasty.images import pets
from tests.data.nasty.npz import GREY, SIX, at, npz

# --- partition-file -------------------------------------------------------------------------------


def parts(content: str | bytes) -> Maker:
    """A partition file of six samples on two clients."""

    def make(folder: Path) -> Settings:
        file = folder / "parts.json"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return npz()(folder) | {"partition": "file", "partition-file": str(file)}

    return make


def partition_at(path: str) -> Maker:
    return lambda folder: npz()(folder) | {"partition": "file", "partition-file": path}


def partition_pipe(folder: Path) -> Settings:
    os.mkfifo(folder / "parts.json")
    return partition_at(str(folder / "parts.json"))(folder)


PARTITIONS: Cases = {
    "no path of a partition file": (partition_at(""), "got no path"),
    "a partition file with a mark": (parts(b"\xef\xbb\xbf[[0], [1]]"), "", SIX),
    "a number for a partition": (parts("3"), "list of lists in"),
    "one client of two": (parts("[[0]]"), "partition-file: expected 2 clients in"),
    "three clients of two": (parts("[[0], [1], [2]]"), "got 3"),
    "a client of another name": (parts('{"0": [0], "2": [1]}'), "named '0' to '1', got '2'"),
    "a client twice": (parts('{"0": [0], "1": [1], "0": [2]}'), "the client '0' occurs twice"),
    "an empty client": (parts("[[0], []]"), "got an empty one"),
    "a client of names": (parts('[[0], {"1": 1}]'), "got dict"),
    "a sample too much": (parts("[[0], [6]]"), "integers from 0 to 5 for client 1 in"),
    "a sample of -1": (parts("[[0], [-1]]"), "got -1"),
    "a sample of 10^30": Case(
        parts("[[0], [" + "1" + "0" * 30 + "]]"), "got 1000000000000000000000000000000"
    ),
    "a sample of 1.0": (parts("[[0], [1.0]]"), "got 1.0"),
    "a sample of true": (parts("[[0], [true]]"), "got True"),
    "a sample of a long text": Case(
        parts('[[0], ["' + "x" * 10**6 + '"]]'), "got 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"
    ),
    "a sample of two clients": Case(
        parts("[[0, 1, 2], [2, 1]]"),
        "gives 2 of the samples more than once, e.g. sample 1 to clients 0",
        SIX,
    ),
    "a sample twice in a client": (parts("[[0, 0], [1]]"), "e.g. sample 0 to client 0", SIX),
    "no partition file": (partition_at("/no/such.json"), "(No such file or directory); check the"),
    "a NUL in a partition file's path": (partition_at("/x\0y"), "expected a path without the ch"),
    "samples of no client": (parts("[[0], [5]]"), "", SIX),
}
PARTITIONS |= alike(
    "as JSON",
    "",
    {
        "a pipe for a partition file": partition_pipe,
        "an empty partition file": parts(""),
        "brackets 100,000 deep": parts("[" * 100_000),
        "a sample of 10^5000": parts("[[0], [" + "1" + "0" * 5000 + "]]"),
    },
)

# --- caches ---------------------------------------------------------------------------------------


def cached(change: Callable[[Path], Any]) -> Maker:
    """Valid data that was decoded before, whose cache file is then changed."""

    def make(folder: Path) -> Settings:
        settings = npz(x_train=GREY, x_test=GREY[:2])(folder)
        datasets.load("npz", settings["data-dir"])
        (file,) = cache.cache_folder().iterdir()
        change(file)
        return settings

    return make


def foreign(tensors: dict[str, torch.Tensor], facts: str | None = None) -> Callable[[Path], Any]:
    return lambda file: save_file(tensors, file, facts and {"facts": facts, "checksum": "0"})


def ours(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(2, dtype=dtype) for key in ARRAYS}


def replaced_by(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return change


def without_cache(file: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.write_text("a file")


def flipped(place: int) -> Callable[[Path], Any]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place] ^= 4
        file.write_bytes(content)

    return change


def with_classes_4(file: Path) -> None:
    content, fact = file.read_bytes(), b'classes\\": 3'
    assert fact in content
    file.write_bytes(content.replace(fact, b'classes\\": 4'))


def parts_of_killed(file: Path) -> None:
    for name in ("a", "b"):
        part = file.with_name(f".{file.name}.{name}")
        part.write_bytes(b"half of it")
        os.utime(part, (0, 0))
    file.unlink()


CACHES: Cases = {
    "a folder for a cache file": Case(
        cached(replaced_by(Path.mkdir)), ".safetensors is a folder: remove it"
    ),
    "a file for the cache folder": Case(
        cached(without_cache), "set FEDACCORD_CACHE to a writable folder"
    ),
}
CACHES |= alike(
    "",
    "6 + 2 of (1, 8, 8) in 3",
    {
        "an empty cache file": cached(lambda file: file.write_bytes(b"")),
        "half a cache file": cached(lambda file: os.truncate(file, file.stat().st_size // 2)),
        "another number of classes": cached(with_classes_4),
        "a changed bit of a pixel": cached(flipped(-5)),
        "a changed bit of the header": cached(flipped(40)),
        "a cache file without facts": cached(foreign(ours(torch.uint8))),
        "a cache file with deep facts": cached(foreign(ours(torch.uint8), "[" * 100_000)),
        "a cache file of bfloat16": cached(foreign(ours(torch.bfloat16), "{}")),
        "a pipe for a cache file": cached(replaced_by(os.mkfifo)),
        "a link to nothing for a cache file": cached(
            replaced_by(lambda file: file.symlink_to(file.parent / "gone"))
        ),
        "parts of killed decodes": cached(parts_of_killed),
        "data that changed since": cached(
            lambda file: npz(x_train=GREY + 1, x_test=GREY[:2])(file.parents[1] / "data")
        ),
    },
)

# --- torchvision's files --------------------------------------------------------------------------


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    sizes = b"".join(struct.pack(">I", size) for size in array.shape)
    return bytes([0, 0, kind, array.ndim]) + sizes + array.tobytes()


CLOTHES = np.arange(4 * 28 * 28).reshape(4, 28, 28).astype(np.uint8)


def clothes(**files: bytes | None) -> Maker:
    """Fashion-MNIST with some files replaced; None: removed."""
    labels = idx(np.array([0, 1, 2, 9], np.uint8))
    sound = {
        **{"train-images-idx3-ubyte": idx(CLOTHES), "train-labels-idx1-ubyte": labels},
        **{"t10k-images-idx3-ubyte": idx(CLOTHES), "t10k-labels-idx1-ubyte": labels},
    }
    changes = {name.replace("_", "-"): content for name, content in files.items()}

    def make(folder: Path) -> Settings:
        raw = folder / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for name, content in (sound | changes).items():
            if content is not None:
                (raw / name).write_bytes(content)
        return {"dataset": "fashion-mnist", "data-dir": str(folder)}

    return make


def small_cifar(folder: Path) -> Settings:
    pets(folder).rename(folder / "cifar10")
    return {"dataset": "cifar10", "data-dir": str(folder)}


def cifar_files(folder: Path) -> Settings:
    (folder / "cifar-10-batches-py").mkdir()
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps({"data": [1]}))
    return {"dataset": "cifar10", "data-dir": str(folder)}


OTHERS: Cases = {
    "no such data": Case(
        at("/no/such", "cifar100"), "/no/such has no cifar-100-python (torchvision's CIFAR100)"
    ),
    "four pieces of clothing": (clothes(), "", "4 + 4 of (1, 28, 28) in 10"),
    "clothes of another size": Case(
        clothes(train_images_idx3_ubyte=idx(CLOTHES[:, :9])),
        "got (4, 9, 28) uint8 and 4 labels up to 9",
    ),
    "too few labels of clothes": Case(
        clothes(train_labels_idx1_ubyte=idx(np.zeros(3, np.uint8))),
        "got (4, 28, 28) uint8 and 3 labels up to 0",
    ),
    "a label 77 of clothes": Case(
        clothes(train_labels_idx1_ubyte=idx(np.full(4, 77, np.uint8))),
        "got (4, 28, 28) uint8 and 4 labels up to 77",
    ),
    "pets for cifar10": (small_cifar, "got 2 of (4, 6, 3)"),
    "other files for cifar10": (cifar_files, "CIFAR10 cannot be loaded from"),
}
OTHERS |= alike(
    "FashionMNIST cannot be loaded from",
    "",
    {
        "no labels of clothes": clothes(train_labels_idx1_ubyte=None),
        "no bytes of clothes": clothes(train_images_idx3_ubyte=b""),
    },
)
