"""The limits of a run on a device; a simulated client has none.

A run's settings come from the server. On a device the node-config, not the run, determines the
training data and the amount of work. (Flower also sends the app's code: this is no protection
against a malicious server.)
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fedaccord.compat import flower
from fedaccord.core.node_config import ALLOW, IMPORTS, MAX_STEPS, MAX_THREADS, STATE_DAYS
from fedaccord.core.request import TrainInstruction

DAYS = 90  # days that the states of a run are kept after its last request, by default
STEPS = 1_000_000  # steps of a round, unless a node's config sets them
HARMLESS = "digits"  # the images are part of scikit-learn: no private data


def is_simulated() -> bool:
    """Whether this process is a worker of Flower's simulation."""
    return flower.in_simulation()


def allowed(
    run: Mapping[str, Any], own: Mapping[str, Any], node: Mapping[str, Any], whole: bool
) -> dict[str, Any]:
    """The settings of a run without those that make a device read files that ``own`` does not set.

    own: the settings of its node-config; whole: all its data belong to the client. Raises
    ValueError, in one line, if it sets no data and the run needs some.
    """
    if is_simulated() or node.get(ALLOW) is True:
        return {**run}
    named = "dataset" in own or "data-dir" in own
    if not named and (
        run.get("dataset", HARMLESS) != HARMLESS or run.get("partition", "") == "file"
    ):
        raise ValueError(
            "expected a node-config that names this node's data, got none: start the SuperNode "
            'with dataset="npz" data-dir="/path/to/its.npz" in --node-config, or with '
            f"{ALLOW}=true to allow a run's files"
        )
    if run.get("partition") == "file":
        if not whole:
            raise ValueError(
                "expected a run that names no file of this node, got partition=file: use another "
                f"partition, or start the SuperNode with data-dir or {ALLOW}=true in --node-config"
            )
        run = {key: value for key, value in run.items() if key != "partition"}  # it has all
    return {**run, "data-dir": "", "partition-file": "", "download": False}


def check_imports(
    paths: Iterable[tuple[str, str]], own_package: str, node: Mapping[str, Any]
) -> None:
    """Raise ValueError, in one line, before a function is imported that the node does not allow.

    paths: (setting of the run, package.module:function). own_package: the app's, allowed by
    default.
    """
    if is_simulated():
        return
    allowed_packages = _text(node, IMPORTS, own_package).replace(",", " ").split()
    for key, path in paths:
        module = path.partition(":")[0]
        if not any(f"{module}.".startswith(f"{package}.") for package in allowed_packages):
            raise ValueError(
                f"{key}: this node imports nothing from {module} for a run: start the SuperNode "
                f'with {IMPORTS}="{module.partition(".")[0]}" in --node-config, packages separated '
                "by commas, if it may run here"
            )


def check_limits(node: Mapping[str, Any]) -> None:
    """Raises ValueError, in one line, for an invalid limit in this node's config."""
    for key in (MAX_STEPS, MAX_THREADS, STATE_DAYS):
        _limit(node, key, 1)
    _text(node, IMPORTS, "")


def state_days(node: Mapping[str, Any]) -> int:
    """Days for which the states of a run are kept after its last request to this node."""
    return _limit(node, STATE_DAYS, DAYS)


def check_steps(instruction: TrainInstruction, examples: int, node: Mapping[str, Any]) -> None:
    """Raises ValueError if a round has more steps than the node accepts."""
    most = _limit(node, MAX_STEPS, STEPS)
    steps = instruction.steps(examples)
    if steps > most and not is_simulated():
        raise ValueError(
            f"{MAX_STEPS}: expected at most {most} steps a round, the limit of this node, got "
            f"{steps} of the run; lower local-steps or local-epochs"
        )


def limited_threads(wanted: int, chosen: int, node: Mapping[str, Any]) -> int:
    """``chosen`` threads, at most the node's limit.

    wanted: those that the run requests, 0: none. Raises ValueError if that is more.
    """
    most = _limit(node, MAX_THREADS, chosen)
    if wanted > most:
        raise ValueError(
            f"{MAX_THREADS}: this node allows at most {most} threads, the run requests {wanted}; "
            "lower threads"
        )
    return min(chosen, most)


def _limit(node: Mapping[str, Any], key: str, otherwise: int) -> int:
    most = node.get(key, otherwise)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ValueError(
            f"expected {key} in this node's config to be an integer from 1, got {most!r}"
        )
    return most


def _text(node: Mapping[str, Any], key: str, otherwise: str) -> str:
    text = node.get(key, otherwise)
    if not isinstance(text, str):
        raise ValueError(f"expected {key} in this node's config to be a string, got {text!r}")
    return text
