"""The state between two rounds as tensors and plain values, and the schedule of checkpoints."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedaccord.core.cohort import PendingRequest
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
    facts: dict[str, Any] = {"t": s.t, "failed": s.failed, "clock": s.clock}
    facts["privacy"] = None if s.privacy is None else s.privacy._asdict()
    if s.delays is not None:
        tensors["delays"] = s.delays
        name_of = {id(vector): name for name, vector in tensors.items()}
        facts["visits"] = [_packed(request, tensors, name_of) for request in s.visits]
    return tensors, facts


SENT = ("down", "w_init", "buffers")  # vectors of a request, which those of one round share


def _packed(
    request: PendingRequest, tensors: dict[str, Tensor], name_of: dict[int, str]
) -> dict[str, Any]:
    """The plain values of a request, and the names of its vectors among ``tensors``, to which new
    vectors are added; name_of: the names by id."""
    names = {}
    for field, vector in leaves({name: getattr(request, name) for name in SENT}):
        name = name_of.setdefault(id(vector), f"visits.{request.client}.{field}")
        tensors.setdefault(name, vector)
        names[field] = name
    return {k: v for k, v in request._asdict().items() if k not in SENT} | {"vectors": names}


def _unpacked(
    method: Method, packed: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> PendingRequest:
    vectors = {field: tensors[name] for field, name in packed["vectors"].items()}
    fields = method.client_half().receives._fields
    down = method.client_half().receives(*(vectors.get(f"down.{name}") for name in fields))
    plain = {name: value for name, value in packed.items() if name != "vectors"}
    return PendingRequest(
        **plain, down=down, w_init=vectors.get("w_init"), buffers=vectors.get("buffers")
    )


def privacy_of(facts: Mapping[str, Any]) -> Privacy | None:
    """The privacy state in a checkpoint's values; earlier versions wrote its fields as a list."""
    packed = facts.get("privacy")
    if not packed:
        return None
    return Privacy(**packed) if isinstance(packed, Mapping) else Privacy(*packed)


def unpack(method: Method, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> RoundState:
    """The reverse of `pack` for ``method``."""
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
        privacy=privacy_of(facts),
        delays=tensors.get("delays"),
        visits=tuple(_unpacked(method, request, tensors) for request in facts.get("visits", ())),
    )


TIME_SHARE = 1 / 20  # share of the time for checkpoints
FIRST_SECONDS = 0.05  # assumed cost of the first one


class Pace:
    """Whether a checkpoint is due: every ``every`` rounds, or limited to `TIME_SHARE` of the
    time."""

    def __init__(self, every: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._every = every  # rounds; 0: by time
        self._clock = clock
        self._last, self._cost = clock(), FIRST_SECONDS

    def is_due(self, number: int) -> bool:
        if self._every:
            return number % self._every == 0
        return self._clock() - self._last >= self._cost / TIME_SHARE

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A block that writes a checkpoint, and measures its time."""
        began = self._clock()
        yield
        self._last = self._clock()
        self._cost = self._last - began
