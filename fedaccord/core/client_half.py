"""The client half: a method's rule in its plug-ins, with the optimiser of the local steps."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.cohort import Cohort, Decoded
from fedaccord.core.optimizer import CONSTANT, SGD, Optimizer, Schedule
from fedaccord.core.plugin import PlugIn, joined, joined_type
from fedaccord.core.privacy import Privacy
from fedaccord.core.rule import (
    Direction,
    GradientAt,
    LocalConfig,
    LocalResult,
    LocalRule,
    Registered,
    Rounding,
    Shapes,
    Stateless,
)
from fedaccord.core.vectors import Vector, leaves, map_vectors, versions

PLAIN = SGD()


class WithMoments(NamedTuple):
    """A client's state with optimizer-state=keep."""

    moments: Any  # the optimiser's vectors
    base: Any  # the method's state in its plug-ins'


class Layer(NamedTuple):
    """A plug-in's gradient buffers around those of the state that it wraps."""

    own: Any
    inner: Any


class WithLocal(NamedTuple):
    """The state of a client whose model has tensors of its own."""

    base: Any  # the method's and the plug-ins' state
    local: Vector  # (d_l,), the client's own parameters and buffers


@dataclass(frozen=True)
class ClientHalf:
    """The client's part of a method: its rule in its plug-ins, the outermost last."""

    rule: LocalRule
    plugins: tuple[PlugIn, ...] = ()
    optimizer: Optimizer = PLAIN
    schedule: Schedule = CONSTANT
    optimizer_state: str = "reset"
    keeps_local: bool = False  # the model has parameters or buffers that stay at the client

    def __post_init__(self) -> None:
        """Raises TypeError, in one line, for a rule that is none, ValueError if a part has a field
        that cannot travel."""
        if not isinstance(self.rule, LocalRule):
            got = "a class" if isinstance(self.rule, type) else f"a {type(self.rule).__name__}"
            raise TypeError(f"rule: expected it to return an instance of a LocalRule, got {got}")
        for part in (self.rule, *self.plugins, self.optimizer):
            part.own_fields()

    @property
    def _shared(self) -> Any:
        """The type of the optimiser's vectors in messages, beside the method's own."""
        return self.optimizer.sends if self.optimizer_state == "average" else Stateless

    @property
    def rounding(self) -> Rounding | None:
        """What rounds the broadcast; None: it is sent as it is."""
        return next((r for p in self.plugins if (r := p.rounding()) is not None), None)

    @property
    def _keeps(self) -> bool:
        """Whether the optimiser's vectors belong to the client's state."""
        return self.optimizer_state == "keep" and not self.optimizer.is_stateless

    def moments(self, w: Vector, down: Any, state: Any) -> Any:
        """The optimiser's vectors before the first step, to be changed in place; w: w_{i,0}."""
        if self._keeps:
            return map_vectors(torch.clone, state.moments)
        names = self._shared._fields
        if names and getattr(down, names[0]) is not None:  # None: no round was averaged yet
            return self.optimizer.resume(self._shared(*(getattr(down, name) for name in names)))
        return self.optimizer.init(w)

    @property
    def receives(self) -> Any:
        return joined_type(self.rule.receives, self._shared)

    @property
    def sends(self) -> Any:
        """The type of a reply on the wire, after the plug-ins' `encode`."""
        return self._sends()[-1]

    def _sends(self) -> list[Any]:
        """The type of the method's own upload, then after each plug-in's `encode`."""
        kinds = [joined_type(self.rule.sends, self._shared)]
        for plugin in self.plugins:
            kinds.append(plugin.sends(kinds[-1]))
        return kinds

    @property
    def needs_w_init(self) -> bool:
        return self.rule.needs_w_init or any(plugin.needs_w_init for plugin in self.plugins)

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> Any:
        def initial(part: LocalRule | PlugIn) -> Any:
            return w_init if part.needs_w_init else None

        state = _of_vectors(self.rule, self.rule.init(w, initial(self.rule), config))
        for plugin in self.plugins:
            inner = state
            state = _of_type(plugin, "init", plugin.init(w, initial(plugin), inner))
            if plugin.base(state) is not inner:
                raise TypeError(
                    f"{type(plugin).__name__}.base: expected the state that `init` was given, got "
                    f"another; return the field of {type(state).__name__} that holds it"
                )
        if not self._keeps:
            return state
        return WithMoments(self.optimizer.init(w), state)

    def states(self, state: Any) -> list[Any]:
        """The rule's own state, then each plug-in's state with the states inside it."""
        states = [state.base if self._keeps else state]
        for plugin in reversed(self.plugins):
            states.append(plugin.base(states[-1]))
        return states[::-1]

    def start(self, down: Any, state: Any, config: LocalConfig) -> Vector:
        base, *around = self.states(state)
        w_i0 = _of_length(down.w, self.rule, "start", "w_i0", self.rule.start(down, base, config))
        for plugin, own in zip(self.plugins, around, strict=True):
            w_i0 = plugin.start(w_i0, own)
        return w_i0

    def received(self, down: Any, w_i0: Vector) -> Any:
        for plugin in self.plugins:
            down = plugin.received(down, w_i0)
        return down

    def direction(self, down: Any, state: Any, config: LocalConfig) -> Direction:
        direction = self.rule.direction(down, self.states(state)[0], config)
        _of_type(self.rule, "direction", direction, Direction)
        for name in ("shift", "anchor", "along"):
            if (vector := getattr(direction, name)) is not None:
                _of_length(down.w, self.rule, "direction", name, vector)
        return direction

    def gradient_init(self, w: Vector, down: Any, state: Any, config: LocalConfig) -> Any:
        buffers = self.rule.gradient_init(w, down, self.states(state)[0], config)
        for plugin in self.plugins:
            buffers = Layer(plugin.gradient_init(w), buffers)
        return buffers

    def gradient(
        self, w: Vector, g: Vector, buffers: Any, at: GradientAt, config: LocalConfig
    ) -> Tensor:
        for plugin in reversed(self.plugins):
            own, buffers = buffers
            at = partial(plugin.gradient, at, g=g, buffers=own)
        loss = self.rule.gradient(w, g, buffers, at, config)
        return _tensor(self.rule, "gradient", "the loss at w", loss)

    def gradient_result(
        self, w: Vector, g: Vector, buffers: Any, at: GradientAt, config: LocalConfig
    ) -> Any:
        for _ in self.plugins:
            buffers = buffers.inner
        return self.rule.gradient_result(w, g, buffers, at, config)

    def finish(self, received: Any, down: Any, state: Any, result: LocalResult) -> tuple[Any, Any]:
        """The message to the server, and the client's next state.

        down: the broadcast; received: the result of `received` for it.
        """
        base, *around = self.states(state)
        sent = self.rule.upload(result.w_K, received, base, result)
        up = message = _of_type(self.rule, "upload", sent, self.rule.sends)
        for name in self.rule.models:
            if (vector := getattr(up, name)) is not None:  # of a round that is not sent
                _of_length(result.w_K, self.rule, "upload", name, vector)
        if self._shared is not Stateless:
            up = message = joined(up, self.optimizer.upload(result.moments, result.config))
        memories = []
        for plugin, own, kind in zip(self.plugins, around, self._sends()[1:], strict=True):
            message, memory = plugin.encode(message, down, own, result)
            message = _of_type(plugin, "encode", message, kind)
            memories.append(memory)
        if any(plugin.loses for plugin in self.plugins):
            up, w_i0 = self.decode(message, down, result.w_K)
            if w_i0 is not None:
                received = self.received(down, w_i0)
        next_state = self.rule.remember(up, received, base, result)
        base = _like(self.rule, base, _of_type(self.rule, "remember", next_state, type(base)))
        for memory in memories:
            base = base if memory is None else memory._replace(base=base)
        return message, WithMoments(result.moments, base) if self._keeps else base

    @contextmanager
    def unchanged(self, down: Any, state: Any) -> Iterator[None]:
        """A block in which no vector of the message and the state may be changed in place: other
        clients have the same message, and a lost reply leaves the state as it is.

        Raises TypeError, in one line, after a block that has changed one.
        """
        before = versions(down, state)
        yield
        if versions(down, state) != before:
            raise TypeError(
                f"{type(self.rule).__name__}: expected unchanged vectors of the message and the "
                "client's state, got one changed in place; return new vectors, e.g. c - x, not "
                "c.sub_(x)"
            )

    def dual(self, down: Any, state: Any) -> Vector | None:
        return self.rule.dual(down, self.states(_base(state))[0])

    def personal(self, state: Any) -> Vector | None:
        return self.rule.personal(self.states(_base(state))[0])

    def decode(self, up: Any, down: Any, like: Vector) -> Decoded:
        """The method's own upload, from a message and the broadcast that it replies to.

        Raises ValueError as the plug-ins' `decode`.
        """
        decoded, kinds = Decoded(up), self._sends()
        for plugin, kind in zip(reversed(self.plugins), reversed(kinds[:-1]), strict=True):
            decoded = plugin.decode(decoded, kind, down, like)
        return decoded

    def mean(self, ups: Any, cohort: Cohort) -> tuple[Any, Cohort]:
        for plugin in reversed(self.plugins):
            ups, cohort = plugin.mean(ups, cohort)
        return ups, cohort

    def at(self, privacy: Privacy | None) -> "ClientHalf":
        """The client half in a round that begins with this state of the privacy mechanism."""
        if privacy is None:
            return self
        return replace(self, plugins=tuple(plugin.at(privacy) for plugin in self.plugins))

    @property
    def moves_anchor(self) -> bool:
        return any(plugin.moves_anchor for plugin in self.plugins)


def _of_type(owner: Registered, verb: str, value: Any, kind: Any = None) -> Any:
    """The value that a rule or a plug-in returned. Raises TypeError, in one line, if it is not
    of the type ``kind`` or, without ``kind``, not a NamedTuple."""
    if type(value) is not kind if kind else not hasattr(value, "_fields"):
        wanted = f"a {kind.__name__}" if kind else "the client's state as a NamedTuple of vectors"
        raise TypeError(
            f"{type(owner).__name__}.{verb}: expected {wanted}, got a {type(value).__name__}"
        )
    return value


def _of_vectors(rule: LocalRule, state: Any) -> Any:
    """A client's first state. Raises TypeError, in one line, if it is no NamedTuple of vectors."""
    for name, value in _of_type(rule, "init", state)._asdict().items():
        if not hasattr(value, "_fields"):
            hint = "; w_init is None unless needs_w_init is True" if value is None else ""
            _tensor(rule, "init", f"a vector as {name}", value, hint)
    return state


def _tensor(rule: LocalRule, verb: str, what: str, value: Any, hint: str = "") -> Tensor:
    """Raises TypeError, in one line, if it is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(rule).__name__}.{verb}: expected {what}, got {value!r}{hint}")
    return value


def _of_length(like: Vector | None, rule: LocalRule, verb: str, name: str, value: Any) -> Vector:
    """A vector (..., d) as ``like``, if there is one. Raises TypeError or ValueError, in one line,
    if it is none."""
    vector = _tensor(rule, verb, f"a vector as {name}", value)
    if like is not None and vector.shape[-1:] != like.shape[-1:]:
        raise ValueError(
            f"{type(rule).__name__}.{verb}: expected {name} of shape (..., {like.shape[-1]}), as "
            f"the model, got {tuple(vector.shape)}"
        )
    return vector


def _like(rule: LocalRule, state: Any, next_state: Any) -> Any:
    """The client's next state. Raises ValueError, in one line, if a vector has another shape."""
    before = dict(leaves(state))
    for name, vector in leaves(next_state):
        if name in before and vector.shape != before[name].shape:
            raise ValueError(
                f"{type(rule).__name__}.remember: expected {name} of shape "
                f"{tuple(before[name].shape)} as before, got {tuple(vector.shape)}"
            )
    return next_state


def _base(state: Any) -> Any:
    return state.base if isinstance(state, WithLocal) else state


@lru_cache(maxsize=8)
def state_like(half: ClientHalf, shapes: Shapes) -> Any:
    """A client's state with empty vectors: the structure to fill with saved vectors.

    shapes: of the parameters, tuples. (On PyTorch's meta device the first zeros take seconds.)
    """
    w = torch.zeros(sum(map(math.prod, shapes)))
    config = LocalConfig(
        round=0, rounds=1, lr=0.1, weight_decay=0.0, clip_norm=0.0, client=0, seed=0, shapes=shapes
    )
    state = half.init(w, w, config)
    if half.keeps_local:
        state = WithLocal(state, w)
    return map_vectors(lambda v: v.new_empty(0), state)


def has_personal(half: ClientHalf) -> bool:
    """Whether clients have models of their own to evaluate."""
    return half.keeps_local or half.personal(state_like(half, ((1,),))) is not None


class GradientHook:
    """The gradient hook of one local round: init, gradient and result over the caller's buffers."""

    def __init__(self, half: ClientHalf, down: Any, state: Any, config: LocalConfig) -> None:
        self.half, self.down, self.state, self.config = half, down, state, config

    def init(self, w: Vector) -> Any:
        return self.half.gradient_init(w, self.down, self.state, self.config)

    def gradient(self, w: Vector, g: Vector, buffers: Any, at: GradientAt) -> Tensor:
        return self.half.gradient(w, g, buffers, at, self.config)

    def result(self, w: Vector, g: Vector, buffers: Any, at: GradientAt) -> Any:
        return self.half.gradient_result(w, g, buffers, at, self.config)
