"""Samples as tensors, from arrays and from the data sets of libraries, which are not imported."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

IGNORED = -100  # the target that cross-entropy ignores
CHANNELS = 4  # of an image, at most
LABELS = ("label", "labels", "target", "targets", "y")  # names of the target column


class Split(NamedTuple):
    """Samples for training, or for testing."""

    x: Tensor | list[str]  # (n, ...) inputs, or texts
    y: Tensor  # (n, ...) targets
    class_names: tuple[str, ...] = ()


def negative(labels: Any) -> Any:
    """The values below 0 in labels (...), a tensor or an array, except `IGNORED`."""
    return labels[(labels < 0) & (labels != IGNORED)]


def split_of(content: Any) -> Split:
    """(inputs, targets) of anything with them; a torch or Hugging Face data set of pairs or rows.

    Arrays of uint8, (n, h, w[, c]), become images (n, c, h, w), and other integers int64, unless
    they are int32.
    Raises ValueError, with the expected forms, for anything else.
    """
    if isinstance(content, tuple | list) and len(content) == 2:
        x, y = map(_plain, content)
        return Split(_inputs(x), _tensor(y))
    if hasattr(content, "columns") and hasattr(content, "iloc"):
        raise ValueError(
            "expected (inputs, targets), got one table: return (table[features], table[target])"
        )
    if hasattr(content, "column_names") and hasattr(content, "features"):
        return _of_columns(content)
    if hasattr(content, "__getitem__") and hasattr(content, "__len__") and not is_array(content):
        return _of_items([content[i] for i in range(len(content))])
    raise ValueError(
        "expected (inputs, targets) as arrays or tensors, a torch Dataset or a Hugging Face "
        f"dataset, got a {type(content).__name__}"
    )


def changes_when_read(content: Any) -> bool:
    """Whether the first inputs of a torch Dataset differ when they are read again."""
    if not isinstance(content, torch.utils.data.Dataset) or not hasattr(content, "__len__"):
        return False
    numbers = range(min(len(content), 8))
    once, again = (split_of(Subset(content, numbers)).x for _ in range(2))
    if isinstance(once, Tensor) and isinstance(again, Tensor):
        return not torch.equal(once, again)
    return once != again


def partitioned(content: Any) -> tuple[Split, Tensor]:
    """The samples of a Flower partitioner, and the client of each, (n,) from 0 on."""
    parts = [split_of(content.load_partition(i)) for i in range(content.num_partitions)]
    owners = torch.repeat_interleave(
        torch.arange(len(parts)), torch.tensor([len(part.y) for part in parts])
    )
    return together(parts), owners


def together(parts: Sequence[Split]) -> Split:
    x = (
        torch.cat([part.x for part in parts if isinstance(part.x, Tensor)])
        if isinstance(parts[0].x, Tensor)
        else [text for part in parts for text in part.x]
    )
    return Split(x, torch.cat([part.y for part in parts]), parts[0].class_names)


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _of_columns(table: Any) -> Split:
    """The split of a Hugging Face dataset: its label, and the one other column."""
    features = table.features
    classes = [name for name in table.column_names if hasattr(features[name], "names")]
    labels = [name for name in LABELS if name in table.column_names] or classes
    others = [name for name in table.column_names if name not in labels[:1]]
    if not labels or len(others) != 1:
        raise ValueError(
            f"expected a dataset with one column beside the label ({', '.join(LABELS)}), got "
            f"{', '.join(table.column_names)}; choose two by select_columns"
        )
    names = tuple(getattr(features[labels[0]], "names", None) or ())
    return Split(_inputs([*table[others[0]]]), _tensor([*table[labels[0]]]), names)


def _of_items(items: Sequence[Any]) -> Split:
    """The split of pairs (input, target), or of rows that are mappings with two entries."""
    if items and isinstance(items[0], dict):
        labels = [name for name in LABELS if name in items[0]]
        others = [name for name in items[0] if name not in labels[:1]]
        if not labels or len(others) != 1:
            raise ValueError(
                f"expected rows with one entry beside the label ({', '.join(LABELS)}), got "
                f"{', '.join(map(str, items[0]))}"
            )
        items = [(item[others[0]], item[labels[0]]) for item in items]
    if not items or any(not isinstance(item, tuple | list) or len(item) != 2 for item in items):
        raise ValueError("expected one or more items (input, target), got others or none")
    return Split(_inputs([x for x, _ in items]), _tensor([y for _, y in items]))


def _plain(values: Any) -> Any:
    """A column or table of pandas as an array, of texts as a list; other values unchanged."""
    if not hasattr(values, "to_numpy"):
        return values
    array = values.to_numpy()
    return array.tolist() if array.dtype == object else array


def _inputs(x: Any) -> Tensor | list[str]:
    if isinstance(x, Mapping):
        raise ValueError(f"expected inputs as one array or tensor, got {', '.join(map(str, x))}")
    x = x if is_array(x) else [*x]  # a lazy column is read once
    if _has_texts(x):
        if wrong := [value for value in x if not isinstance(value, str)]:
            raise ValueError(
                f"expected texts, got {wrong[0]!r:.40} among them: fill or drop such rows"
            )
        return [*map(str, x)]
    if isinstance(x, Tensor) or (not is_array(x) and len(x) and isinstance(x[0], Tensor)):
        tensor = _tensor(x)
        if tensor.dtype == torch.uint8 and _is_last(tensor.shape):
            raise ValueError(
                "expected images as uint8 tensors (n, channels, h, w), or arrays (n, h, w[, "
                f"channels]), got a tensor {tuple(tensor.shape)}: permute it"
            )
        return with_long_ids(tensor)
    array = _array(x)
    if array.ndim == 4:
        is_first = array.shape[1] <= CHANNELS < min(array.shape[2:])
        is_last = _is_last(array.shape)
        if (array.dtype == np.uint8 and is_first) or (array.dtype.kind == "f" and is_last):
            raise ValueError(
                "expected images as uint8 (n, h, w[, channels]), or as floats "
                f"(n, channels, h, w), got {array.dtype} {array.shape}: transpose them"
            )
    if array.dtype == np.uint8 and array.ndim in (3, 4):  # images, channels last
        array = array[:, None] if array.ndim == 3 else array.transpose(0, 3, 1, 2)
    return with_long_ids(_from_numpy(array))


def with_long_ids(x: Tensor) -> Tensor:
    """Inputs of integers other than int32 as int64, which models of tokens read; images, which are
    uint8, masks and floats are unchanged."""
    if x.dtype in (torch.uint8, torch.bool, torch.int32) or x.is_floating_point() or x.is_complex():
        return x
    return x.long()


def _has_texts(x: Any) -> bool:
    """Whether some of the inputs (n,) are texts."""
    if is_array(x) and (isinstance(x, Tensor) or x.ndim != 1 or x.dtype.kind not in "UOT"):
        return False
    return any(isinstance(value, str) for value in x)


def _is_last(shape: Sequence[int]) -> bool:
    """Whether the channels of images of this shape (n, ...) seem to be last."""
    return len(shape) == 4 and shape[3] <= CHANNELS < min(shape[1:3])


def _from_numpy(array: Any) -> Tensor:
    """A tensor; a copy if the array is read-only, as that of a table or a file."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _tensor(values: Any) -> Tensor:
    """A tensor (n, ...) of an array, or of a sequence of numbers, arrays or tensors."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if not is_array(values) and len(values) and isinstance(values[0], Tensor):
        stacked: Tensor = _stacked(torch.stack, values)
        return stacked
    return _from_numpy(_array(values))


def _array(values: Any) -> Any:
    """An array, also of PIL's images."""
    if not isinstance(values, np.ndarray):
        values = _stacked(np.stack, [np.asarray(_pixels(value)) for value in values])
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError("expected numbers, got a masked array: fill it, e.g. by filled()")
    if values.dtype.kind not in "biuf":
        raise ValueError(f"expected numbers, of labels integers from 0 on, got {values.dtype}")
    return values


def _pixels(value: Any) -> Any:
    """A PIL image with a palette or single bits as 8 bits per channel."""
    modes = {"P": "RGB", "1": "L"}
    mode = getattr(value, "mode", None)
    return value.convert(modes[mode]) if mode in modes else value


def _stacked(stack: Any, values: Sequence[Any]) -> Any:
    try:
        return stack([*values])
    except (ValueError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"expected samples of one shape, got several ({reason})") from error
