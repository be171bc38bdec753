"""Bounds on one client's influence: the norms of its uploaded vectors, and their limits."""

import math
from collections.abc import Iterable, Mapping
from statistics import median_low

from fedaccord.core.cohort import Reply
from fedaccord.core.vectors import Number, Vector, distances, leaves, length


def sizes(reply: Reply, models: Iterable[str], w: Vector) -> dict[str, Number]:
    """The L2 norm of each uploaded vector; for a model of its difference from the model that the
    client received, before damping.

    models: the fields of the upload that are models; w: (d,), to which they were moved.
    """
    vectors, kinds = dict(leaves(reply.up)), {*models}
    if reply.w_i0 is not None:
        vectors["w_i0"] = reply.w_i0
        kinds.add("w_i0")
    return {
        name: distances([vector], w)[0] / reply.damping if name in kinds else length(vector)
        for name, vector in vectors.items()
    }


def too_large(sizes: Mapping[str, float], most: float) -> str:
    """The vector that is longer than ``most``, in one line; empty: none is."""
    for name, size in sizes.items():
        if size > most:
            what = "an update" if name == "w" else repr(name)
            return f"max-client-norm: expected {what} of norm at most {most:g}, got {size:.4g}"
    return ""


def largest_first(sizes: Mapping[int, Mapping[str, float]]) -> list[int]:
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
