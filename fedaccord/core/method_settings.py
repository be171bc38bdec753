"""The plug-ins of a method, and the settings that they and the method require."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fedaccord.core.plugin import COMPRESS
from fedaccord.core.topology import ServerHalf

OWN_STATES = ["reset", "keep"]  # values of optimizer-state with which the server averages none
OWN_BUFFERS = ["refuse", "freeze", "local"]  # values of buffers with which it averages none
PER_CLIENT = {  # settings, and their values with which the server reads no means besides uploads
    "weighting": ["uniform"],
    "optimizer-state": OWN_STATES,
    "buffers": OWN_BUFFERS,
}


def combine(own: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    """A method's own plug-ins and a caller's, sorted by `PlugIn.place`; the caller's replaces the
    method's of the same type.

    Raises ValueError if the caller has two of one type, or if two compress or two mask uploads.
    """
    kinds = [type(plugin) for plugin in others]
    if twice := [kind.__name__ for kind in kinds if kinds.count(kind) > 1]:
        raise ValueError(f"plugins: expected one of a kind, got {twice[0]} twice; leave one out")
    instead = dict(zip(kinds, others, strict=True))
    plugins = [instead.pop(type(plugin), plugin) for plugin in own]
    plugins = sorted((*plugins, *instead.values()), key=lambda plugin: plugin.place)
    for one, other in pairwise(plugins):
        if one.place == other.place >= COMPRESS:
            what = "compresses" if one.place == COMPRESS else "masks"
            names = f"{type(one).__name__} and {type(other).__name__}"
            raise ValueError(f"plugins: expected one that {what} uploads, got {names}")
    return tuple(plugins)


def in_use(method: ServerHalf) -> list[Any]:
    """The plug-ins of a method that are not off, before `fit`."""
    return [p for p in combine(method.own_plugins(), method.plugins) if not p.is_off]


def has_gossip(method: ServerHalf) -> bool:
    """Whether nodes average with their neighbours, without a server."""
    return any(plugin.graph(method.seed) is not None for plugin in in_use(method))


def expect(method: ServerHalf, key: str, values: Sequence[Any], beside: str, why: str = "") -> None:
    """Raise ValueError, in one line, unless the setting ``key`` of the method is one of ``values``.

    beside, why: the other part of the conflict, and the end of the line.
    """
    own = key == "optimizer-state"  # which a method may set
    value = method.own_state() if own else getattr(method, key.replace("-", "_"))
    if value not in values:
        *first, last = map(str, values)
        words = f"{', '.join(first)} or {last}" if first else last
        got = f"{value:g}" if isinstance(value, float) else repr(value)
        raise ValueError(f"{key}: expected {words} {beside}, got {got}{why}")
