"""A sweep's space: the choices for each run-config key, and points of it."""

import math
import zlib
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedaccord import config
from fedaccord.strategies import METHODS

T = TypeVar("T")
DRAWS = 100  # hypercubes drawn before fewer distinct points are accepted


class Choices(NamedTuple):
    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """u: in [0, 1)."""
        return self.values[int(u * len(self.values))]

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that must be valid for the whole choice to be valid."""
        return self.values


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``; integers if both are."""

    low: float
    high: float
    log: bool = False

    @property
    def is_int(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, u: float) -> float:
        """u: in [0, 1)."""
        low, high = self.low, self.high
        if self.is_int:
            low, high = max(low - 0.5, 0.5) if self.log else low - 0.5, high + 0.5
        if self.log:
            value = math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
        else:
            value = low + u * (high - low)
        return int(min(max(round(value), self.low), self.high)) if self.is_int else value

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high


Values = Choices | Range
Space = Mapping[str, Values]


def read(table: Mapping[str, Any], prefix: str = "") -> dict[str, Values]:
    """The [space] of a sweep by dotted keys. Raises ValueError, in one line, for a value that is
    neither a list nor a range."""
    space: dict[str, Values] = {}
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, Mapping):
            is_range = "low" in value or "high" in value
            space |= {key: _range(key, value)} if is_range else read(value, f"{key}.")
        elif isinstance(value, list) and value:
            if nested := [each for each in value if isinstance(each, (list, Mapping))]:
                raise ValueError(
                    f"[space]: expected numbers and strings in a list, got {nested[0]!r}"
                )
            space[key] = Choices(tuple(dict.fromkeys(value)))
        else:
            raise ValueError(
                f"[space] {key}: expected a list of values, e.g. [0.05, 0.1], or a range, e.g. "
                f"{{ low = 0.01, high = 0.3, log = true }}, got {value!r}"
            )
    return space


def _range(key: str, table: Mapping[str, Any]) -> Range:
    low, high, log = table.get("low"), table.get("high"), table.get("log", False)
    numbers = all(type(end) in (int, float) for end in (low, high))
    if set(table) - {"low", "high", "log"} or not numbers or type(log) is not bool:
        raise ValueError(
            f"[space] {key}: expected low, high and optionally log = true, got {dict(table)!r}"
        )
    assert low is not None
    assert high is not None
    if not low < high or (log and low <= 0):
        positive = "0 < low < high" if log else "low < high"
        raise ValueError(f"[space] {key}: expected {positive}, got low = {low}, high = {high}")
    return Range(low, high, log)


def size(own: Space) -> float:
    """The number of points; infinite with a range of numbers."""
    return math.prod(len(v.values) if isinstance(v, Choices) else math.inf for v in own.values())


def of_method(table: Mapping[str, T], method: str) -> dict[str, T]:
    """The choices of one method: common keys, the method's own, and any key under its name.

    ``fedsam.lr`` is the key ``lr`` for fedsam alone, and overrides a common one.
    """
    fields = config.keys()
    common, own = {}, {}
    for key, value in table.items():
        first, _, rest = key.partition(".")
        if first not in METHODS:
            common[key] = value
        elif first == method:
            own[key if key in fields else rest] = value
    return common | own


def grid(space: Space) -> Iterator[dict[str, Any]]:
    """Every combination, the last key first. Raises ValueError if a key has a range."""
    for key, values in space.items():
        if isinstance(values, Range):
            raise ValueError(
                f"[space] {key}: expected a list with search=grid, got a range; list the values, "
                "or choose search=random"
            )
    choices = [values.values for values in space.values() if isinstance(values, Choices)]
    for point in product(*choices):
        yield dict(zip(space, point, strict=True))


def draw(space: Space, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` distinct points, fewer if there are no more: a Latin hypercube.

    One value is drawn from each of ``count`` equal parts of a key's values, independently of the
    other keys: methods get the same values of shared keys, unless a point repeats, which lists and
    integers alone can do: the next hypercube replaces it.
    """
    from scipy.stats import qmc  # which few commands need

    sizes = [len(v.values) if isinstance(v, Choices) else math.inf for v in space.values()]
    if math.prod(sizes) <= count:
        return list(grid(space))
    points: list[dict[str, Any]] = []
    rngs = {key: np.random.default_rng([seed, zlib.crc32(key.encode())]) for key in space}
    samplers = {key: qmc.LatinHypercube(1, seed=rng) for key, rng in rngs.items()}
    for _ in range(DRAWS):  # lists and integers may give a point twice
        if len(points) == count:
            break
        drawn = {key: sampler.random(count)[:, 0].tolist() for key, sampler in samplers.items()}
        for row in zip(*drawn.values(), strict=True):
            point = {key: space[key].at(u) for key, u in zip(drawn, row, strict=True)}
            if point not in points and len(points) < count:
                points.append(point)
    return points


def corners(space: Space) -> Iterator[dict[str, Any]]:
    """Points that include both ends of every key."""
    first = {key: values.ends[0] for key, values in space.items()}
    yield first
    for key, values in space.items():
        for end in values.ends[1:]:
            yield first | {key: end}
