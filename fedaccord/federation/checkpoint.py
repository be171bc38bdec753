"""The state between two rounds as tensors and plain values, and back; when a checkpoint is due."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedaccord.core.privacy import Privacy
from fedaccord.core.rounds import RoundState, first_moments
from fedaccord.core.vectors import fill, leaves
from fedaccord.federation.method import Method


def pack(s: RoundState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, plain values)."""
    tensors = {"w": s.w, "accepted": s.accepted}
    if s.w_init is not None:
        tensors["w_init"] = s.w_init
    if s.buffers is not None:
        tensors["buffers"] = s.buffers
    tensors |= {f"server.{name}": vector for name, vector in leaves(s.server)}
    tensors |= {f"moments.{name}": vector for name, vector in leaves(s.moments)}
    privacy = None if s.privacy is None else [*s.privacy]
    return tensors, {"t": s.t, "failed": s.failed, "clock": s.clock, "privacy": privacy}


def unpack(method: Method, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> RoundState:
    """The state of ``method`` that `pack` was given."""
    w = tensors["w"]
    server, moments = (
        {name.removeprefix(group): v for name, v in tensors.items() if name.startswith(group)}
        for group in ("server.", "moments.")
    )
    return RoundState(
        t=facts["t"],
        w=w,
        w_init=tensors.get("w_init"),
        server=fill(method.init(w), server),
        accepted=tensors["accepted"],
        failed=facts["failed"],
        moments=fill(first_moments(method), moments),
        buffers=tensors.get("buffers"),
        clock=facts.get("clock", 0.0),  # earlier versions wrote none
        privacy=Privacy(*facts["privacy"]) if facts.get("privacy") else None,
    )


TIME_SHARE = 1 / 20  # of the time that checkpoints may take
FIRST_SECONDS = 0.05  # assumed cost of the first one


class Pace:
    """When a checkpoint is due: every so many rounds, or such that they take at most
    `TIME_SHARE` of the time."""

    def __init__(self, every: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._every = every  # rounds; 0: by the clock
        self._clock = clock
        self._last, self._cost = clock(), FIRST_SECONDS

    def is_due(self, number: int) -> bool:
        if self._every:
            return number % self._every == 0
        return self._clock() - self._last >= self._cost / TIME_SHARE

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A block that writes one."""
        began = self._clock()
        yield
        self._last = self._clock()
        self._cost = self._last - began
