"""The remaining time of a run."""

import time
from collections.abc import Callable
from datetime import timedelta


class Eta:
    """Estimated from the mean time of the rounds so far, with the pauses between them.

    begun: rounds before a resume; rounds: T; clock: seconds.
    """

    def __init__(
        self, begun: int, rounds: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.begun, self.rounds, self.clock = begun, rounds, clock
        self.start = clock()

    def __call__(self, number: int) -> str:
        """After ``number`` rounds, as "0:12:03 left"; empty if unknown or finished."""
        rounds_done, left = number - self.begun, self.rounds - number
        if rounds_done < 1 or left < 1:
            return ""
        seconds = (self.clock() - self.start) / rounds_done * left
        return f"{timedelta(seconds=round(seconds))} left"
