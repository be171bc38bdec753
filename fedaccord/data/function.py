"""Data sets that the user's own function returns, ``dataset=package.module:function``."""

import inspect
import logging
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from fedaccord.core import named
from fedaccord.core.options import did_you_mean, key_of
from fedaccord.data.cache import channel_stats
from fedaccord.data.fingerprint import of_tensors
from fedaccord.data.kind import (
    Augmentation,
    Dataset,
    Kind,
    ReadOptions,
    Source,
    number_owners,
    warn_if_whole,
)
from fedaccord.data.samples import (
    IGNORED,
    Split,
    changes_when_read,
    negative,
    partitioned,
    split_of,
)
from fedaccord.data.seeding import seeded
from fedaccord.data.text import encode, tokenizer_of

FUNCTIONS = named.Functions("fedaccord.datasets")
ENTRIES = ("train", "test", "classes", "vocabulary", "augment", "client")  # of a function's mapping
log = logging.getLogger("flwr")
FORM = "(train, test), or a mapping of " + ", ".join(ENTRIES)


def _find(root: Any, reading: ReadOptions) -> Source:
    raise AssertionError("a function finds its own files")


FUNCTION = Kind(find=_find, origin="function")


def from_function(name: str, data_dir: str, reading: ReadOptions) -> Dataset:
    """The data set that a function returns, called with ``data_dir`` if it has this parameter.

    It returns (train, test), or a mapping with these keys; both in a form of `samples.split_of`,
    train also as a Flower partitioner (``load_partition``, ``num_partitions``), for
    ``partition=natural``, as is ``client``, a name or a number for each training sample; test also
    None, empty or left out, for clients without test samples.
    ``classes`` of a mapping is the number of classes, or their names in the order of the labels;
    without it the labels of both splits count, from 0 on. ``vocabulary``: the number of token ids.
    ``augment``: a function of (inputs (b, ...) as they are stored, generator) that returns such
    inputs for a local step. Texts are tokenized by the setting. Float targets are numbers to
    predict. The random numbers are the same in every process, see `seeded`.
    Raises ValueError, in one line, for anything else.
    """
    with seeded(0):
        return _from_function(name, data_dir, reading)


def _from_function(name: str, data_dir: str, reading: ReadOptions) -> Dataset:
    path = FUNCTIONS.path(name)
    takes = inspect.signature(named.function("dataset", path)).parameters.get("data_dir")
    own_default = takes and takes.default is not inspect.Parameter.empty and not data_dir
    content = named.call("dataset", path, {} if own_default else {"data_dir": data_dir})
    if data_dir and not takes:
        log.warning("data-dir=%s has no effect: %s has no parameter data_dir", data_dir, path)
    try:
        return _dataset(name, content, reading)
    except ValueError as error:
        raise ValueError(f"dataset: {path}: {error}") from error
    except Exception as error:  # reading a sample is the user's code
        raise ValueError(f"dataset: {path}: {named.one_line(error)}") from error


def _dataset(name: str, content: Any, reading: ReadOptions) -> Dataset:
    content = _mapping(content)
    train, test, owners = _splits(content)
    vocabulary = _count("vocabulary", _plain(content.get("vocabulary", 0)))
    if isinstance(train.x, list) and isinstance(test.x, list):
        tokenizer = tokenizer_of(reading.tokenizer)
        vocabulary = tokenizer.size
        train, test = (
            part._replace(x=torch.from_numpy(encode([*part.x], tokenizer, reading)))
            for part in (train, test)
        )
    else:
        for key in ("tokenizer", "max_length"):
            if (value := getattr(reading, key)) != ReadOptions._field_defaults[key]:
                log.warning("%s=%s has no effect: %s returns no texts", key_of(key), value, name)
    _check(train, test)
    with seeded(0):  # after the samples were read: it draws numbers
        if changes_when_read(content["train"]):
            log.warning(
                "%s: its training samples change from one reading to the next, e.g. by random "
                "transforms, but are read once: also return augment, a function",
                name,
            )
    assert isinstance(train.x, Tensor)
    assert isinstance(test.x, Tensor)
    for split, ids in (("train", train.x), ("test", test.x)):
        if not vocabulary or not ids.numel() or ids.is_floating_point():
            continue
        low, top = map(int, ids.aminmax())
        if low < 0:
            raise ValueError(f"expected token ids of {split} from 0 on, got {low}")
        if top >= vocabulary:
            raise ValueError(
                f"expected token ids of {split} below vocabulary={vocabulary}, got {top}"
            )
    y_train, y_test = _targets(train.y), _targets(test.y)
    names, classes = _class_names(content.get("classes"), train, test)
    if y_train.is_floating_point():
        if classes:
            raise ValueError("expected integer labels with classes, got float targets: convert one")
        warn_if_whole(f"dataset: the targets of {name}", y_train, y_test)
    else:
        classes = _num_classes(name, classes, y_train, y_test)
    mean, std = channel_stats(train.x) if train.x.ndim == 4 else ((), ())
    tensors = {"x_train": train.x, "y_train": y_train, "x_test": test.x, "y_test": y_test}
    if owners is not None:
        tensors["owners"] = owners
    return Dataset(
        name=name,
        x_train=train.x,
        y_train=y_train,
        x_test=test.x,
        y_test=y_test,
        classes=classes or 0,
        mean=mean,
        std=std,
        class_names=names,
        vocabulary=vocabulary,
        owners=owners,
        checksum=of_tensors(tensors),
        augment=_augmentation(content.get("augment"), train.x[:2]),
    )


def _mapping(content: Any) -> Mapping[str, Any]:
    """The values that a function returned, by key of `ENTRIES`."""
    if isinstance(content, tuple | list) and len(content) == 2:
        return dict(zip(ENTRIES, content, strict=False))
    if not isinstance(content, Mapping) or "train" not in content:
        keys = f" with {', '.join(map(str, content))}" if isinstance(content, Mapping) else ""
        raise ValueError(f"expected {FORM}, got a {type(content).__name__}{keys}")
    if unknown := [key for key in content if key not in ENTRIES]:
        near = did_you_mean(str(unknown[0]), ENTRIES)
        raise ValueError(f"expected a mapping of {', '.join(ENTRIES)}, got {unknown[0]!r}{near}")
    return content


def _splits(content: Mapping[str, Any]) -> tuple[Split, Split, Tensor | None]:
    """Training samples, test samples, perhaps none, and the clients of the former (n,) if given."""
    train, clients, owners = content["train"], content.get("client"), None
    if hasattr(train, "load_partition"):
        if clients is not None:
            raise ValueError("expected client or a partitioner as train, got both")
        train, owners = partitioned(train)
    else:
        train = split_of(train)
        if clients is not None:
            owners = _owners(clients, len(train.y))
    test = content.get("test")
    targets = test[1] if isinstance(test, tuple | list) and len(test) == 2 else test
    if test is None or (isinstance(targets, Sized) and not len(targets)):
        return train, train._replace(x=train.x[:0], y=train.y[:0]), owners
    return train, split_of(test), owners


def _plain(value: Any) -> Any:
    """A value of NumPy or PyTorch as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _class_names(classes: Any, train: Split, test: Split) -> tuple[tuple[str, ...], Any]:
    """The names of the classes, perhaps none, and their number, perhaps None.

    classes: what the function returned: their names, their number or None.
    """
    names = train.class_names
    if test.class_names not in ((), names):
        raise ValueError(
            f"expected the classes of test as those of train, {', '.join(names)}, got "
            f"{', '.join(test.class_names)}"
        )
    number = _plain(len(names) or None if classes is None else classes)
    if isinstance(number, list | tuple):
        names, number = tuple(map(str, number)), len(number)
    if names and number != len(names):
        raise ValueError(f"expected classes={len(names)}, the number of names, got {number}")
    return names, number


def _num_classes(name: str, classes: Any, y_train: Tensor, y_test: Tensor) -> int:
    """The number of classes, at least that of integer labels; classes: as returned, or None."""
    labels = torch.cat([y_train.flatten(), y_test.flatten()])
    top = int(labels.max())
    if top == IGNORED:
        raise ValueError(f"expected labels from 0 on, got {IGNORED} alone")
    wrong, ignored = labels[labels < 0], ""
    if y_train.ndim > 1:
        wrong, ignored = negative(labels), f", or {IGNORED} for ignored ones"
    if len(wrong):
        raise ValueError(f"expected labels from 0 on{ignored}, got {wrong.min()}")
    if classes is None:
        _warn_if_unseen(name, y_train, top)
    number = _count("classes", top + 1 if classes is None else classes)
    if number < 2 or top >= number:
        void = f"; mark labels that do not count by {IGNORED}" if y_train.ndim > 1 else ""
        raise ValueError(f"expected labels below classes={number}, two or more, got {top}{void}")
    return number


def _owners(clients: Any, samples: int) -> Tensor:
    """(n,) the client of each sample, from 0 on, of names or numbers."""
    names = [*map(_plain, _plain(clients))]
    if wrong := [name for name in names if type(name) not in (int, str)]:
        raise ValueError(f"expected client as integers or names, got {wrong[0]!r}")
    if len(names) != samples:
        raise ValueError(
            f"expected the client of each of {samples} training samples, got {len(names)}"
        )
    return torch.from_numpy(number_owners("client", names))


def _augmentation(function: Any, inputs: Tensor) -> Augmentation | None:
    """The function, whose default random numbers come from the generator too; tried on inputs."""
    if function is None:
        return None
    if not callable(function):
        raise ValueError(f"expected augment as a function, got a {type(function).__name__}")

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        with seeded(int(torch.randint(2**62, (), generator=generator))):
            result = function(x, generator)
        if not isinstance(result, Tensor) or (result.shape, result.dtype) != (x.shape, x.dtype):
            got = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else result
            raise ValueError(
                f"expected augment to return inputs as given, {tuple(x.shape)} {x.dtype}, got {got}"
            )
        return result

    augment(inputs.clone(), torch.Generator().manual_seed(0))  # it may work in place
    return augment


def _warn_if_unseen(name: str, y_train: Tensor, top: int) -> None:
    """Warn about labels that no training sample has, if the labels of both splits count."""
    first = top if int(y_train.max()) < top else None
    if y_train.ndim == 1:  # sequences may lack many
        labels = torch.unique(y_train)
        gaps = (labels != torch.arange(len(labels))).nonzero()
        first = int(gaps[0]) if len(gaps) else len(labels) if len(labels) <= top else None
    if first is not None:
        log.warning(
            "%s: no training sample has the label %d of 0 to %d: the model has %d outputs; return "
            "classes as well if that is right, or count labels from 0 without gaps",
            name,
            first,
            top,
            top + 1,
        )


def _targets(y: Tensor) -> Tensor:
    """Labels as int64; numbers to predict as (n, outputs) float32."""
    if y.is_complex():
        raise ValueError(f"expected classes or real numbers as targets, got {y.dtype}")
    return y.float().reshape(len(y), y.shape[1:].numel()) if y.is_floating_point() else y.long()


def _count(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected {what} as an integer from 0, got {value!r}")
    return value


def _check(train: Split, test: Split) -> None:
    """Raise ValueError unless both hold samples of one form."""
    for split, part in (("train", train), ("test", test)):
        if (split == "train" and not len(part.y)) or len(part.x) != len(part.y):
            raise ValueError(
                f"expected a target for each of one or more inputs of {split}, got {len(part.x)} "
                f"inputs and {len(part.y)} targets"
            )
        for what, values in (("inputs", part.x), ("targets", part.y)):
            floats = isinstance(values, Tensor) and values.is_floating_point()
            if floats and not values.float().isfinite().all():  # type: ignore[union-attr]
                raise ValueError(
                    f"expected finite {what} of {split}, got nan, inf or beyond float32"
                )
        if isinstance(part.x, Tensor) and part.x.dtype == torch.uint8 and part.x.ndim != 4:
            raise ValueError(
                "expected uint8 images (n, h, w[, channels]) or tensors (n, channels, h, w), or "
                f"float features, or int64 token ids, got uint8 of {tuple(part.x.shape)}"
            )
    for what, a, b in (("inputs", train.x, test.x), ("targets", train.y, test.y)):
        forms = [
            (tuple(t.shape[1:]), t.dtype) if isinstance(t, Tensor) else "texts" for t in (a, b)
        ]
        if forms[0] != forms[1]:
            raise ValueError(
                f"expected {what} of train and test alike, got {forms[0]} and {forms[1]}"
            )
