"""The forms of a batch: tensors, or tuples and dicts with tensors; and the model's inputs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fedaccord.core.vectors import to_device

Batch = Any  # (inputs, targets), or another form for `BatchFormat.split`
Forward = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> predictions (n, ...)

IMAGES = ("img", "image")  # the inputs' keys in the image data sets of Flower Datasets
GIVE = "give forward=lambda model, batch: ..."


@dataclass(frozen=True)
class BatchFormat:
    """How predictions and targets are obtained from a batch.

    forward: (model, batch) -> predictions, with the whole batch; None: the model is called with the
        inputs of (inputs, targets), or of a dict with only an image and the targets.
    targets: the key of the targets in a dict; in a tuple they are the last element.
    """

    forward: Forward | None = None
    targets: str = "label"

    def split(self, batch: Batch) -> tuple[Any, Tensor]:
        """The argument of the model, or of ``forward``, and the targets (n, ...).

        Raises ValueError, in one line, for a batch of another form.
        """
        if isinstance(batch, tuple | list) and len(batch) >= 2:  # first: the usual case
            targets = batch[-1]
        elif isinstance(batch, Mapping):
            if self.targets not in batch:
                raise ValueError(
                    f"batch: expected the targets under {self.targets!r}, got {describe(batch)}; "
                    "give targets=KEY"
                )
            targets = batch[self.targets]
        else:
            raise ValueError(f"batch: expected (inputs, targets) or a dict, got {describe(batch)}")
        if not isinstance(targets, Tensor) or not targets.dim():
            raise ValueError(
                f"batch: expected targets (n, ...) in a tensor, got {describe(targets)} from "
                f"{describe(batch)}"
            )
        if targets.is_complex():
            raise ValueError(
                f"batch: expected classes or real numbers as targets, got {targets.dtype}"
            )
        return batch if self.forward else self._inputs(batch), targets

    def _inputs(self, batch: Batch) -> Any:
        """The model's argument."""
        if isinstance(batch, tuple | list):
            if len(batch) == 2:
                return batch[0]
            raise ValueError(f"batch: expected (inputs, targets), got {describe(batch)}; {GIVE}")
        for name in IMAGES:
            if {*batch} == {name, self.targets}:
                return batch[name]
        raise ValueError(
            f"batch: expected (inputs, targets) or a dict of {IMAGES[0]!r} and {self.targets!r}, "
            f"got {describe(batch)}; {GIVE} and targets=KEY"
        )

    def size(self, batches: Iterable[Batch]) -> int:
        """The number of samples in a list of batches or a DataLoader; 0: unknown."""
        if isinstance(batches, list | tuple):
            return sum(len(self.split(batch)[1]) for batch in batches)
        each, sampler = getattr(batches, "batch_size", None), getattr(batches, "sampler", None)
        if not each or not isinstance(sampler, Sized):
            return 0
        return len(sampler) - (len(sampler) % each if getattr(batches, "drop_last", False) else 0)

    def read(
        self, batch: Batch, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[Any, Tensor]:
        """As `split`, with every tensor on the device; floating ones in ``dtype``; token ids,
        classes and masks are unchanged."""
        inputs, targets = self.split(batch)

        def change(part: Tensor) -> Tensor:
            return to_device(as_floats(part, dtype), device)

        return map_tensors(change, inputs), change(as_targets(targets))


class PreparedFormat(BatchFormat):
    """Pairs of tensors that `read` would not change."""

    def read(
        self, batch: Batch, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[Any, Tensor]:
        return (batch, batch[1]) if self.forward else batch


PAIRS = BatchFormat()


def as_floats(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating numbers in ``dtype``; classes, tokens and masks are unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def as_targets(tensor: Tensor) -> Tensor:
    """Classes as int64, which the losses expect; floating numbers are unchanged."""
    return tensor if tensor.is_floating_point() else tensor.long()


def map_tensors(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with ``change`` applied to each of its tensors; other parts are unchanged.

    Named tuples keep their type; lists become tuples, and other mappings dicts.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(change, part) for key, part in batch.items()}
    if isinstance(batch, PackedSequence):
        own = {"data": change(batch.data)}  # the sizes of its steps stay on the CPU
        for name in ("sorted_indices", "unsorted_indices"):
            own[name] = map_tensors(change, getattr(batch, name))
        return batch._replace(**own)
    if isinstance(batch, tuple | list):
        parts = [map_tensors(change, part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """The tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)


def numel(batch: Batch) -> int:
    return sum(tensor.numel() for tensor in tensors_of(batch))


def describe(batch: Batch) -> str:
    """The kind of a batch, in a few words."""
    if isinstance(batch, Tensor):
        return f"a tensor {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a dict of {', '.join(map(repr, batch)) or 'nothing'}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"
