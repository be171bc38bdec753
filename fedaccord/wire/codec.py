"""The client half of a message as JSON: short names and fields.

Names are looked up among the classes that this process has defined; a message never causes an
import.
"""

import json
from functools import lru_cache
from typing import Any

from fedaccord.core.client_half import ClientHalf
from fedaccord.core.optimizer import Optimizer, Schedule
from fedaccord.core.plugin import PlugIn
from fedaccord.core.rule import LocalRule, Registered

STEPS = "optimizer", "lr-schedule", "optimizer-state", "keeps-local"  # keys of the local steps


def dumps(half: ClientHalf) -> str:
    """Raises ValueError, in one line, if a field is not a number, string, boolean or None."""
    parts = {"rule": encode(half.rule), "plugins": [*map(encode, half.plugins)]}
    schedule = half.schedule._asdict()
    steps = encode(half.optimizer), schedule, half.optimizer_state, half.keeps_local
    return json.dumps(parts | dict(zip(STEPS, steps, strict=True)))


@lru_cache(maxsize=8)
def loads(text: str) -> ClientHalf:
    """The client half from the text of `dumps`. Raises ValueError, in one line, otherwise."""
    try:
        content = json.loads(text)
        rule, plugins = content["rule"], [*content["plugins"]]
        optimizer, schedule, state, local = (content[name] for name in STEPS)
        schedule = Schedule(**schedule)
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"expected a message with the rule that FedAccord's server wrote, got {text[:80]!r}: "
            "install the same version on server and clients"
        ) from None
    own = tuple(decode(plugin, PlugIn) for plugin in plugins)
    steps = decode(optimizer, Optimizer), schedule, state, bool(local)
    return ClientHalf(decode(rule, LocalRule), own, *steps)


def encode(part: Registered) -> dict[str, Any]:
    """A rule or plug-in, a dataclass of plain values, as JSON values."""
    return {"class": part.registered_name()} | part.own_fields()


def decode(encoded: Any, base: type) -> Any:
    """The reverse of `encode`. Raises ValueError if the class is not a registered ``base``."""
    if not isinstance(encoded, dict) or not isinstance(encoded.get("class"), str):
        raise ValueError(
            f"expected a {base.__name__} with its 'class', got {encoded!r}: the message was not "
            "written by FedAccord's server"
        )
    name = encoded["class"]
    values = {key: value for key, value in encoded.items() if key != "class"}
    kind = Registered.registry.get(name)
    if kind is not None and issubclass(kind, base):
        try:
            return kind(**values)
        except TypeError:  # fields of another version
            pass
    raise ValueError(
        f"expected a message with a {base.__name__} that this client knows, got {name!r}: install "
        "the same version of its package on server and clients"
    )
