"""Arguments of calls in Python: run-config keys as keywords, and a model."""

from collections.abc import Callable, Mapping
from operator import index
from types import MappingProxyType
from typing import Any

from torch import nn

from fedaccord.config import RunConfig
from fedaccord.core.optimizer import OPTIMIZERS
from fedaccord.core.options import key_of, plain
from fedaccord.data.seeding import seeded
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.hints import UnknownKey
from fedaccord.strategies import METHODS, PLUGINS


def keys_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """``local_steps=10`` sets local-steps, ``clip_norm=None`` switches clipping off; ``metrics``
    may be a function or a list."""
    values = {key_of(key): value for key, value in keywords.items()}
    if not isinstance(metrics := values.get("metrics", ""), str):
        each = metrics if isinstance(metrics, list | tuple) else [metrics]
        values["metrics"] = ", ".join(map(_name_of, each))
    if values.get("clip-norm", 0) is None:
        values["clip-norm"] = 0.0
    return values


def _name_of(metric: Any) -> str:
    """A metric's name; for a function with its module, from which it is imported again."""
    if callable(metric) and hasattr(metric, "__qualname__"):
        return f"{metric.__module__}:{metric.__qualname__}"
    return str(metric)


def make_config(
    values: Mapping[str, Any],
    method: FederatedStrategy | None = None,
    *,
    arguments: Mapping[str, str] = MappingProxyType({}),
    refusal: Callable[[str], str] = lambda key: "",
) -> RunConfig:
    """Raises ValueError as `RunConfig.make`; its advice is a keyword that the call accepts.

    arguments: of the call, in place of keys; refusal: why the call refuses a key, else empty.
    """
    try:
        return RunConfig.make(values, method)
    except UnknownKey as error:
        unknown, _, _ = str(error).partition(" (did you mean")
        for why in filter(None, map(refusal, error.near[:1])):
            raise TypeError(f"{unknown}; {why}") from None
        accepted = [keyword(arguments.get(k, k)) for k in error.near if not refusal(k)]
        if not accepted:
            raise
        raise ValueError(f"{unknown} (did you mean {' or '.join(accepted)}?)") from None


def refusal_beside(key: str, method: FederatedStrategy) -> str:
    """Why a key of methods has no effect beside a strategy, in one line."""
    table, _, option = key.rpartition(".")
    name, argument = type(method).__name__, f"{option.replace('-', '_')}=..."
    if not isinstance(method, METHODS.get(table, object)):
        return f"{key}: expected options of {name}, got one of {table}"
    if table in PLUGINS:
        argument = f"plugins=({PLUGINS[table].__name__}({argument}),)"
    if table in OPTIMIZERS:
        argument = f"local_optimizer={OPTIMIZERS[table].__name__}({argument})"
    return (
        f"{key}: expected it in the strategy, e.g. {name}({argument}), which has its own settings; "
        "got it outside"
    )


def keyword(key: str) -> str:
    """How a run-config key is written in a call."""
    return f'**{{"{key}": ...}}' if "." in key else f"{key.replace('-', '_')}=..."


def module_of(model: Any, seed: int) -> nn.Module:
    """The module, or the one that ``model`` returns with random numbers from the seed.

    Raises ValueError, in one line, if it returns none.
    """
    if isinstance(model, nn.Module):
        return model
    wanted = "model: expected a name, a module, or a function without arguments that returns one"
    if not callable(model):
        raise ValueError(f"{wanted}, got {type(model).__name__}")
    try:
        with seeded(seed):  # as for models by name
            module = model()
    except TypeError as error:  # for example a class that needs arguments
        raise ValueError(f"{wanted}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{wanted}, got a function that returns {type(module).__name__}")
    return module


def cohorts_of(participation: Any) -> list[list[int]]:
    """The clients of each round. Raises ValueError, in one line, for anything else, e.g. masks."""
    try:
        return [[*map(_client, cohort)] for cohort in participation]
    except TypeError:
        raise ValueError(
            "participation: expected a share of the clients, or the clients of each round, e.g. "
            f"[[0, 2], [1]], got {participation!r:.80}"
        ) from None


def _client(i: Any) -> int:
    if isinstance(plain(i), bool):
        raise TypeError
    return index(i)
