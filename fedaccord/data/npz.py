"""Data sets in a .npz file: the arrays x_train, y_train, x_test, y_test, as from numpy.savez.

A client may have no samples to test on: without x_test and y_test there are none.
Integer targets are labels of classes, float targets numbers to predict.
"""

from __future__ import annotations

import logging
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedaccord.data.kind import (
    ARRAYS,
    Arrays,
    Kind,
    ReadOptions,
    Source,
    check_fits,
    number_owners,
    warn_if_whole,
)
from fedaccord.data.samples import CHANNELS

log = logging.getLogger("flwr")  # what a run prints

TEST = ARRAYS[2:]
MAX_CLASSES = 1_000_000  # a larger number is a mistake: the model would not fit into memory

Array = NDArray[Any]


def find(path: Path, reading: ReadOptions) -> Source:
    if not path.is_file():
        raise FileNotFoundError(
            f"npz: expected a .npz file, found no file {path}: point data-dir to one with the "
            f"arrays {', '.join(ARRAYS)}"
        )
    return Source((path,), partial(decode, path))


def decode(path: Path) -> Arrays:
    """uint8 images (n, h, w[, c]) or float features (n, ...), with labels (n,), or with numbers to
    predict, (n,) or (n, outputs) floats.

    An array ``client`` (n,) of integers or names has the client of each training sample, for
    ``partition=natural``.

    Labels are integers, or names of classes as strings. An array ``classes`` has the number of
    classes, as one integer, or their names in the order of the labels: devices that lack some
    class then have the same labels. Without it each of 0..k-1 must be in y_train, and names are
    numbered in sorted order. Raises ValueError, in one line.
    """
    arrays = _arrays(path)
    if not arrays["y_train"].size:
        raise ValueError(f"npz: expected samples in x_train, y_train of {path}, got none")
    owners = _owners(path, arrays)
    if arrays["y_train"].dtype.kind == arrays["y_test"].dtype.kind == "f":
        return _of_numbers(path, arrays, owners)
    names = _class_names(path, arrays)
    if arrays["y_train"].dtype.kind in "US" and arrays["y_test"].dtype.kind in "US":
        arrays |= {key: _numbered(path, key, arrays[key], names) for key in ("y_train", "y_test")}
    x_train, y_train, x_test, y_test = (arrays[key] for key in ARRAYS)
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        _check_labels(path, split, y)
        _check_inputs(path, split, x, y)
    x_train, x_test = _alike(path, x_train, x_test)
    present = np.unique(y_train)
    top = int(max(present[-1], y_test.max(initial=0)))
    classes = len(names) or _num_classes(path, arrays) or len(present)
    if classes < 2 or top >= classes:
        raise ValueError(
            f"npz: expected two or more classes, labelled 0..k-1, in {path}, got {len(present)} "
            f"in y_train and labels up to {top}: renumber them, or add an array `classes` = k "
            "if some have no examples"
        )
    return Arrays(x_train, y_train, x_test, y_test, classes, names, owners=owners)


def _of_numbers(path: Path, arrays: dict[str, Array], owners: Array | None) -> Arrays:
    """Float targets, as (n, outputs) float32."""
    x_train, y_train, x_test, y_test = (arrays[key] for key in ARRAYS)
    if "classes" in arrays or y_train.shape[1:] != y_test.shape[1:] or y_train.ndim not in (1, 2):
        raise ValueError(
            f"npz: expected labels of {path} as integers, or numbers to predict as floats, (n,) or "
            f"(n, outputs), without an array `classes`; got y_train {y_train.shape} "
            f"{y_train.dtype} and y_test {y_test.shape} {y_test.dtype}: convert them"
        )
    outputs = y_train.shape[1] if y_train.ndim == 2 else 1
    with np.errstate(over="ignore"):  # it becomes inf, and is reported as that
        y_train, y_test = (y.reshape(len(y), outputs).astype(np.float32) for y in (y_train, y_test))
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if (not y.size and split == "train") or not np.isfinite(y).all():
            raise ValueError(
                f"npz: expected one or more finite float32 numbers in y_{split} of {path}, got "
                f"{y.shape} with nan or inf, or none: clean them"
            )
        _check_inputs(path, split, x, y)
    warn_if_whole(f"npz: y_train and y_test of {path}", y_train, y_test)
    x_train, x_test = _alike(path, x_train, x_test)
    return Arrays(x_train, y_train, x_test, y_test, 0, owners=owners)


def _owners(path: Path, arrays: dict[str, Array]) -> Array | None:
    owners = arrays.get("client")
    if owners is None:
        return None
    if owners.dtype.kind not in "iuUS" or owners.shape != arrays["y_train"].shape[:1]:
        raise ValueError(
            f"npz: expected the array `client` of {path} as an integer or a name for each of "
            f"y_train {arrays['y_train'].shape}, got {owners.shape} {owners.dtype}"
        )
    return number_owners("npz", _texts(owners) if owners.dtype.kind in "US" else owners)


def _arrays(path: Path) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
        names = [member.filename for member in members]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} occurs twice")
        check_fits("unpacked", sum(member.file_size for member in members))
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in (*ARRAYS, "classes", "client") if key in file}
    except Exception as error:  # NumPy and zipfile raise a dozen kinds on a damaged file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"npz: cannot read {path} as numbers written by numpy.savez ({reason}): rewrite it"
        ) from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):  # NumPy gives the bytes of any other member
            raise ValueError(
                f"npz: expected {key} of {path} as an array written by numpy.savez, got another "
                "kind of file: rewrite it"
            )
    if "x_train" in arrays and "y_train" in arrays and not any(key in arrays for key in TEST):
        arrays |= {key: np.atleast_1d(arrays[key.replace("test", "train")])[:0] for key in TEST}
    if missing := [key for key in ARRAYS if key not in arrays]:
        raise ValueError(
            f"npz: expected the arrays {', '.join(ARRAYS)} in {path}, got none called "
            f"{', '.join(missing)}: add it"
        )
    return arrays


def _class_names(path: Path, arrays: dict[str, Array]) -> tuple[str, ...]:
    """The names in the array ``classes``, or in labels that are strings; may be empty."""
    labels = [arrays[key].ravel() for key in ("y_train", "y_test")]
    classes = arrays.get("classes")
    if classes is not None and classes.dtype.kind in "US":
        names = _texts(classes.ravel())
        if classes.ndim != 1 or len(set(names)) < max(len(names), 2):
            raise ValueError(
                f"npz: expected the array `classes` of {path} as (k,) different names, got shape "
                f"{classes.shape} with {len(set(names))} of them: write each name once"
            )
        return names
    if any(y.dtype.kind not in "US" for y in labels):
        return ()
    if classes is not None:
        raise ValueError(
            f"npz: expected the array `classes` of {path} as the names of the classes, as the "
            f"labels are strings; got {classes.dtype}: write the names"
        )
    names = tuple(sorted({*_texts(labels[0]), *_texts(labels[1])}))
    log.warning(
        f"npz: the {len(names)} classes of {path} are numbered by their names, {names[0]!r} is 0; "
        "devices with data of their own need the array `classes` with all names in each file"
    )
    return names


def _numbered(path: Path, key: str, labels: Array, names: tuple[str, ...]) -> Array:
    """Names of classes as their numbers, in the same shape."""
    numbers = {name: number for number, name in enumerate(names)}
    texts = _texts(labels.ravel())
    if unknown := sorted({*texts} - {*names}):
        raise ValueError(
            f"npz: expected names of {key} in {path} that are in the array `classes`, got "
            f"{unknown[0]!r}: add it there"
        )
    return np.array([numbers[text] for text in texts], np.int64).reshape(labels.shape)


def _texts(array: Array) -> tuple[str, ...]:
    text = array if array.dtype.kind == "U" else np.char.decode(array, "utf-8", "backslashreplace")
    return tuple(text.tolist())


def _check_labels(path: Path, split: str, y: Array) -> None:
    if y.ndim != 1 or y.dtype.kind not in "iu" or y.min(initial=0) < 0:
        from_ = f" from {y.min()} on" if y.size and y.dtype.kind in "iuf" else ""
        raise ValueError(
            f"npz: expected y_{split} of {path} as (n,) integers from 0 on, or names of classes as "
            f"strings in both y_train and y_test; got {y.shape} {y.dtype}{from_}: number the "
            "classes 0..k-1"
        )


def _check_inputs(path: Path, split: str, x: Array, y: Array) -> None:
    is_images = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] <= CHANNELS))
    channels_last = x.ndim == 4 and x.shape[3] <= CHANNELS < min(x.shape[1:3])
    is_features = x.dtype.kind == "f" and x.ndim >= 2 and not channels_last
    if (is_images or is_features) and len(x) == len(y) and min(x.shape[1:]):
        return
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] <= CHANNELS < x.shape[3]:
        advice = f"the channels come first: write x_{split}.transpose(0, 2, 3, 1)"
    elif x.dtype.kind == "f" and channels_last:
        advice = f"of floats, they come first: write x_{split}.transpose(0, 3, 1, 2)"
    else:
        advice = "convert it"
    raise ValueError(
        f"npz: expected x_{split} of {path} as {len(y)} uint8 images (n, h, w) or "
        f"(n, h, w, channels), or float features (n, ...), one for each of y_{split}; got "
        f"{x.shape} {x.dtype}: {advice}"
    )


def _alike(path: Path, x_train: Array, x_test: Array) -> tuple[Array, Array]:
    """Training and test inputs of one shape and type, features as finite float32."""
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
    return x_train, x_test


def _num_classes(path: Path, arrays: dict[str, Array]) -> int:
    """The number in the array ``classes``; 0: there is none."""
    if "classes" not in arrays:
        return 0
    array = arrays["classes"]
    value = array.item() if array.size == 1 else None
    if array.dtype.kind not in "iu" or value is None or not 2 <= value <= MAX_CLASSES:
        got = f"{array.shape} {array.dtype}" if value is None else repr(value)
        raise ValueError(
            f"npz: expected the array `classes` of {path} as one integer from 2 to "
            f"{MAX_CLASSES:,} or as names, got {got}: write the number of classes"
        )
    return int(value)


NPZ = Kind(find=find, origin="user")
