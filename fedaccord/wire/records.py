"""NamedTuples of vectors <-> Flower records, under their field names."""

import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedaccord.compat.flower import TensorArray
from fedaccord.core.options import listed
from fedaccord.core.vectors import Vector, fill, leaves
from fedaccord.wire.tensor_array import to_record, to_tensor

DOWN, CONFIG, INITIAL, BUFFERS = "down", "config", "initial", "buffers"
UP, METRICS = "up", "metrics"
SECURE = "secure-sum"  # a stage of secure sums, and a device's memory of it
ARRAYS = (DOWN, INITIAL, BUFFERS, UP)


def arrays_of(content: RecordDict, name: str) -> ArrayRecord | None:
    """The vectors under ``name``, or None. (Flower's own views copy all records.)"""
    record = content.get(name)
    return record if isinstance(record, ArrayRecord) else None


def config_of(content: RecordDict, name: str) -> Mapping[str, Any]:
    """The config under ``name``, empty if there is none."""
    record = content.get(name)
    return record if isinstance(record, ConfigRecord) else {}


def metrics_of(content: RecordDict, name: str) -> Mapping[str, Any]:
    """The metrics under ``name``, empty if there are none."""
    record = content.get(name)
    return record if isinstance(record, MetricRecord) else {}


def pack(vectors: Any, array: type[TensorArray] = TensorArray) -> ArrayRecord:
    """A NamedTuple of vectors under its field names; a nested one under dotted names.

    A field that is None is left out: it costs no traffic.
    """
    return to_record(dict(leaves(vectors)), array)


def unpack(kind: Any, record: ArrayRecord, *, like: Vector | None = None) -> Any:
    """A NamedTuple of type ``kind``, without nesting, from a record of `pack`.

    With ``like`` the fields must have its shape and dtype. Raises ValueError, naming the field, on
    missing or extra names, and on a wrong shape or dtype.
    """
    fields = _fields(kind)
    missing = [name for name, optional in fields.items() if name not in record and not optional]
    if missing or any(name not in fields for name in record):
        raise ValueError(f"expected the vectors {listed(fields)}, got {listed(record)}")
    values = {name: to_tensor(record[name]) if name in record else None for name in fields}
    if like is not None:
        check_like(values, like)
    return kind(**values)


def check_like(vectors: dict[str, Vector | None], like: Vector) -> None:
    """Raise ValueError, naming the field, unless every vector has the shape and dtype of like."""
    for name, value in vectors.items():
        if value is not None and (value.shape != like.shape or value.dtype != like.dtype):
            raise ValueError(
                f"expected {name!r} of shape {tuple(like.shape)} and {like.dtype}, "
                f"got {tuple(value.shape)} and {value.dtype}"
            )


@cache
def _fields(kind: Any) -> dict[str, bool]:
    """The fields of a NamedTuple, and whether each may be None."""
    hints = typing.get_type_hints(kind)
    return {name: _takes_none(hints[name]) for name in kind._fields}


def _takes_none(hint: Any) -> bool:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return union and type(None) in typing.get_args(hint)


def unpack_state(like: Any, record: ArrayRecord) -> Any:
    """A state with the structure of ``like``, from a record of `pack`.

    Raises ValueError if the record holds other vectors.
    """
    return fill(like, {name: to_tensor(array) for name, array in record.items()})
