"""Bounds on one client's influence: the norms of its uploaded vectors, and their limits."""

import math
from collections.abc import Iterable, Mapping
from statistics import median_low
from typing import Any

from fedaccord.core.cohort import Decoded, Reply
from fedaccord.core.vectors import Number, Vector, distances, leaves, length


def vectors(sent: Decoded | Reply) -> dict[str, Vector]:
    """All vectors that a client sent, by name."""
    return dict([*leaves(sent.up), *leaves(sent.w_i0, "w_i0")])


def sizes(decoded: Decoded, models: Iterable[str], base: Vector) -> dict[str, Number]:
    """The L2 norm of each uploaded vector; of a model, of its difference from ``base``.

    models: the fields of the upload that are updates of ``base`` (d,), the model that the client
    received; a field w is always a model.
    """
    kinds = {*models, "w", "w_i0"}
    return {
        name: distances([vector], base)[0] if name in kinds else length(vector)
        for name, vector in vectors(decoded).items()
    }


def too_large(sizes: Mapping[str, Any], most: float) -> str:
    """The vector with a norm above ``most``, in one line; empty: none. most: 0: no limit."""
    if not most:
        return ""
    for name, size in sizes.items():
        if size > most:
            what = "an update" if name == "w" else repr(name)
            return f"max-client-norm: expected {what} of norm at most {most:g}, got {size:.4g}"
    return ""


def largest_first(sizes: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The clients, sorted by how far their vectors exceed the round's median, largest first."""
    names = {name for own in sizes.values() for name in own}
    usual = {name: median_low(own[name] for own in sizes.values()) for name in names}

    def excess(i: int) -> float:
        return max((_ratio(size, usual[name]) for name, size in sizes[i].items()), default=0.0)

    return sorted(sizes, key=excess, reverse=True)


def _ratio(size: float, usual: float) -> float:
    if math.isinf(size) or not usual:
        return math.inf if size else 0.0
    return size / usual
