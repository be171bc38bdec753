"""The clients of a round: a function of (seed, t) and of the connected clients."""

import math
import random
import secrets
from collections.abc import Iterable, Sequence, Sized

import numpy as np

from fedaccord.core.options import listed

BLOCK = 2**16  # clients drawn at a time


def cohort_size(fraction: float, num_clients: int) -> int:
    """P of a cohort of fixed size, at least 1."""
    return max(1, round(fraction * num_clients))


def generator(purpose: str, seed: int, t: int, secret: bool = False) -> random.Random:
    """A generator for each (purpose, seed, t); secret: with a seed of the operating system."""
    return random.Random(secrets.token_hex(32) if secret else f"{purpose} {seed} {t}")


def fixed(clients: Iterable[int], size: int, generator: random.Random) -> list[int]:
    """``size`` clients drawn without replacement from the sorted ones, or all if they are fewer;
    sorted. clients: a range is not converted to a list."""
    available = clients if isinstance(clients, range) else sorted(clients)
    return sorted(generator.sample(available, min(size, len(available))))


def bernoulli(
    clients: Iterable[int], fraction: float, generator: random.Random, may_be_empty: bool
) -> list[int]:
    """The sorted clients, each drawn with probability ``fraction``, together again if none is,
    unless the cohort may be empty. clients: as of `fixed`."""
    available = clients if isinstance(clients, range) else sorted(clients)
    uniforms, drawn = _numpys(generator), list[int]()
    while available and not drawn:
        for first in range(0, len(available), BLOCK):
            block = available[first : first + BLOCK]
            drawn += [block[k] for k in np.flatnonzero(uniforms.random(len(block)) < fraction)]
        if may_be_empty:
            break
    return drawn


def chance_of_fewer(least: int, fraction: float, num_clients: int, may_be_empty: bool) -> float:
    """The probability that `bernoulli` draws fewer than ``least`` of all clients."""
    if fraction == 1:
        return float(num_clients < least)
    ways = (math.comb(num_clients, k) for k in range(min(least, num_clients + 1)))
    odds = math.log(fraction) - math.log1p(-fraction)
    empty = num_clients * math.log1p(-fraction)
    of_size = [math.exp(math.log(number) + k * odds + empty) for k, number in enumerate(ways)]
    if may_be_empty:
        return sum(of_size)
    return sum(of_size[1:]) / -math.expm1(empty)


def check_number(cohorts: Sized, num_rounds: int) -> None:
    """Raise ValueError, in one line, unless there is an explicit cohort for each round."""
    if (number := len(cohorts)) != num_rounds:
        raise ValueError(
            f"participation: expected a cohort for each of {num_rounds} rounds, got {number}; "
            f"give {num_rounds} cohorts" + (f", or set {number} rounds" if number else "")
        )


def check_cohort(cohort: Iterable[int], t: int, num_clients: int) -> None:
    """Raise ValueError, in one line, if the explicit cohort of round t has unknown clients."""
    if strange := [i for i in cohort if not 0 <= i < num_clients]:
        raise ValueError(
            f"participation: expected clients 0..{num_clients - 1} in round {t + 1}, got "
            f"{listed(strange)}"
        )


def scheduled(wanted: Sequence[int], clients: Iterable[int], size: int | None = None) -> list[int]:
    """The connected clients of an explicit cohort, sorted; the first ``size`` of them."""
    available = clients if isinstance(clients, range) else set(clients)
    return sorted([i for i in dict.fromkeys(wanted) if i in available][:size])


def _numpys(generator: random.Random) -> np.random.RandomState:
    """NumPy's Mersenne Twister in the same state: the same numbers, many at a time."""
    _, (*key, position), _ = generator.getstate()
    twister = np.random.RandomState()
    twister.set_state(("MT19937", np.array(key, dtype=np.uint32), position, 0, 0.0))
    return twister
