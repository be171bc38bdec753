"""The privacy budget of a run: its noise multiplier, epsilon so far, and number of rounds."""

import logging
import math
from typing import Any

from fedaccord.core.privacy import Guarantee, Privacy, raised
from fedaccord.federation.accounting import Accountant, certainty, noise_multiplier

log = logging.getLogger("flwr")

OR_END = "it, or end the run here"  # the remedy if a run that resumes has spent its budget
NOISE_WARNING_RATIO = 20  # times the norm of the mean upload, above which to warn about noise


def accountant(guarantee: Guarantee, privacy: Privacy, num_clients: int) -> Accountant:
    """The accountant: if clients add the noise, an upload may change by 2 S."""
    z = privacy.multiplier / (2 if privacy.local else 1)
    certain = certainty(privacy.share, num_clients, guarantee.least)
    return Accountant(z, privacy.share, guarantee.delta, certain)


def check_left(guarantee: Guarantee, privacy: Privacy, num_clients: int, remedy: str) -> None:
    """Raise ValueError, in one line, if one more round would exceed the budget."""
    number, bound = privacy.releases + 1, guarantee.max_epsilon
    if bound and (cost := accountant(guarantee, privacy, num_clients).epsilon(number)) > bound:
        raise ValueError(
            f"dp.max-epsilon: expected a budget for one more round, got {bound:g}: {number} rounds "
            f"cost {cost:.4g}; raise {remedy}"
        )


def first_of(guarantee: Guarantee, share: float, num_rounds: int, num_clients: int) -> Privacy:
    """The state before round 1. Raises ValueError, in one line, if the budget allows no round."""
    z, delta, sensitivity, clients = guarantee.multiplier, guarantee.delta, 1.0, share * num_clients
    if guarantee.local:
        share, sensitivity = 1.0, 2.0  # in units of S
    if z < 0:
        certain = certainty(share, num_clients, guarantee.least)
        z = sensitivity * noise_multiplier(guarantee.epsilon, delta, share, num_rounds, certain)
    if guarantee.adaptive:
        raised(z, clients)
    first = Privacy(
        releases=0,
        multiplier=z,
        clip=guarantee.clip,
        share=share,
        adaptive=guarantee.adaptive,
        local=guarantee.local,
    )
    check_left(guarantee, first, num_clients, "dp.noise-multiplier")
    return first


class Budget:
    """The cost of a guarantee over the rounds of a run.

    numbers: elements of an upload. begun: the state of the mechanism from which a run resumes: it
    keeps its noise multiplier for any number of rounds. secret: whether the noise is drawn from the
    operating system. If clients add the noise, a client's upload may change by 2 S, and the server
    sees it alone.
    Raises ValueError, in one line, if dp-accounting is not installed, or a new run has no round.
    """

    def __init__(
        self,
        guarantee: Guarantee,
        share: float,
        num_rounds: int,
        num_clients: int,
        numbers: int,
        begun: Privacy | None,
        secret: bool,
    ) -> None:
        self.first = begun or first_of(guarantee, share, num_rounds, num_clients)
        z, delta, clients = self.first.multiplier, guarantee.delta, share * num_clients
        self.delta, self.secret = delta, secret
        self._accountant = accountant(guarantee, self.first, num_clients)
        spent, bound = self.first.releases, guarantee.max_epsilon
        self.rounds_left = num_rounds  # rounds that the budget allows
        if bound:
            within = self._accountant.rounds_within(bound, spent + num_rounds)
            self.rounds_left = max(0, within - spent)
        log.info(
            "privacy: noise multiplier %.4g on %s, delta %g, noise from %s",
            z,
            "each upload" if guarantee.local else "sums",
            delta,
            self.source,
        )
        if delta * num_clients > 1:
            log.warning(
                "dp.delta: %g is more than 1 / C = %.2g and allows the data of some client to be "
                "published in the clear; lower it", delta, 1 / num_clients
            )  # fmt: skip
        noise = z * math.sqrt(numbers) / (math.sqrt(clients) if guarantee.local else clients)
        if noise > NOISE_WARNING_RATIO:
            log.warning(
                "dp: the noise of a round is %.0f times as long as the longest mean update: use a "
                "smaller model (as model=linear), more clients, fewer rounds or more epsilon", noise
            )  # fmt: skip

    @property
    def source(self) -> str:
        return "the operating system" if self.secret else "the seed, as in any simulation"

    def epsilon(self, privacy: Privacy) -> float:
        """Epsilon of all releases so far."""
        return self._accountant.epsilon(privacy.releases)

    def facts(self, privacy: Privacy) -> dict[str, Any]:
        """Facts for the summary."""
        return {
            "epsilon": self.epsilon(privacy) if privacy.multiplier else None,  # JSON has no inf
            "delta": self.delta,
            "noise-multiplier": privacy.multiplier,
            "clip": privacy.clip,
            "noise": "system" if self.secret else "seed",
        }
