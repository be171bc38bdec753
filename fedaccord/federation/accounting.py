"""The epsilon of the subsampled Gaussian mechanism, by Google's dp-accounting.

Privacy loss distributions of Gaussian noise of deviation z S on a sum that contains each client
with probability q, composed over the rounds; two federations are neighbours if one has one more
client. If smaller cohorts have no sum, a client of one of the least size is in it for certain:
such sums have a loss of their own, and count as often as they are drawn.
dp-accounting belongs to the extra ``dp`` and is imported on first use.
"""

import math
from bisect import bisect_right
from functools import lru_cache, partial
from typing import Any, NamedTuple

INTERVAL = 1e-3  # largest grid interval of losses; it raises epsilon by less than 1%
DEVIATION_SHARE = 1 / 30  # grid interval as a share of a round's deviation, at small q
GRID_POINTS = 3e4  # most points of a round's loss: with more an epsilon takes seconds
WEAK_NOISE_MULTIPLIER = 0.3  # below it losses grow as 1 / z^2, and the grid with them
LARGEST = 700.0  # exponent of a float
NEGLIGIBLE = 1e-20  # chance of a sum with a loss of its own: far below every delta
TOLERANCE = 1e-4  # of the search for a noise multiplier; relative below 1


def _library() -> Any:
    """Raises ValueError, in one line, if it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError as error:
        raise ValueError(
            f"dp: expected the package dp-accounting, found none ({error}); "
            "`uv run --extra dp ...` has it"
        ) from None
    return dp_accounting


def certainty(q: float, num_clients: int, least: int) -> float:
    """The probability that a sum, of at least ``least`` clients, has a client without which there
    would be none; 0 if `NEGLIGIBLE`. Otherwise the client is in it with probability q, whoever
    else is."""
    if not least:
        return 0.0
    _library()
    from scipy.stats import binom  # which dp-accounting needs, too

    has_sum = binom.sf(least - 1, num_clients, q)
    certain = min(1.0, q * binom.pmf(least - 1, num_clients - 1, q) / has_sum) if has_sum else 1.0
    return float(certain) if certain > NEGLIGIBLE else 0.0


@lru_cache(maxsize=8)
def noise_multiplier(
    epsilon: float, delta: float, q: float, rounds: int, certain: float = 0.0
) -> float:
    """The smallest z, to `TOLERANCE`, with which these rounds cost at most (epsilon, delta).

    Raises ValueError if they cost no more without noise, because most clients are never drawn.
    """
    if (drawn := -math.expm1(rounds * math.log1p(-q)) if q < 1 else 1.0) <= delta:
        raise ValueError(
            f"dp.delta: expected less than {drawn:.3g}, the chance that a client is ever drawn in "
            f"{rounds} rounds, got {delta:g}, which promises nothing; set at most 1 / clients"
        )
    low, high = 0.0, 1.0
    while _epsilon(high, q, delta, rounds, certain) > epsilon:
        low, high = high, 2 * high
    while high - low > TOLERANCE * min(1.0, high):
        z = (low + high) / 2
        if _epsilon(z, q, delta, rounds, certain) > epsilon:
            low = z
        else:
            high = z
    return high


@lru_cache(maxsize=8)
def _loss(z: float, q: float, certain: float) -> Any:
    """The privacy loss distribution of one round."""
    dp = _library()
    gaussian = partial(
        dp.pld.privacy_loss_distribution.from_gaussian_mechanism,
        z,
        value_discretization_interval=_interval(z, q),
        neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    sampled = gaussian(sampling_prob=q)
    return gaussian(sampling_prob=1.0).compute_mixture(sampled, certain) if certain else sampled


def _interval(z: float, q: float) -> float:
    """The grid of one round's loss, which is rounded up in every round."""
    deviation = q * math.sqrt(math.expm1(min(z**-2, LARGEST)))
    largest = math.log1p(q * math.expm1(min(10 / z, LARGEST)))  # except for noise beyond 10 z
    fine = max(deviation * DEVIATION_SHARE, largest / GRID_POINTS)
    return min(INTERVAL, fine) * max(1.0, (WEAK_NOISE_MULTIPLIER / z) ** 2)


@lru_cache(maxsize=4096)
def _epsilon(z: float, q: float, delta: float, rounds: int, certain: float) -> float:
    if rounds == 0:
        return 0.0
    try:
        loss = _loss(z, q, certain) if z else None
    except OverflowError:  # of e^epsilon
        loss = None
    return float(loss.self_compose(rounds).get_epsilon_for_delta(delta)) if loss else math.inf


class Accountant(NamedTuple):
    """Epsilon after a number of rounds with noise multiplier z, at sampling probability q.

    certain: see `certainty`.
    """

    z: float
    q: float
    delta: float
    certain: float = 0.0

    def epsilon(self, rounds: int) -> float:
        return _epsilon(self.z, self.q, self.delta, rounds, self.certain)

    def rounds_within(self, epsilon: float, most: int) -> int:
        """The number of rounds, at most ``most``, that cost no more than ``epsilon``."""
        return bisect_right(range(1, most + 1), epsilon, key=self.epsilon)
