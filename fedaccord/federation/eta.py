"""The time that a run still takes."""

import time
from collections.abc import Callable
from datetime import timedelta


class Eta:
    """From the mean of the rounds since it was made, with what happens between them.

    begun: rounds that were done before; rounds: T; clock: seconds.
    """

    def __init__(
        self, begun: int, rounds: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.begun, self.rounds, self.clock = begun, rounds, clock
        self.start = clock()

    def __call__(self, number: int) -> str:
        """After so many rounds, as "0:12:03 left"; empty where nothing is left or known."""
        done, left = number - self.begun, self.rounds - number
        if done < 1 or left < 1:
            return ""
        seconds = (self.clock() - self.start) / done * left
        return f"{timedelta(seconds=round(seconds))} left"
