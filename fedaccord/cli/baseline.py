"""The baseline of a run: plain averaging in the same setting."""

import json
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedaccord.config import RunConfig


HOOKS = {"start", "gradient"}  # a plug-in with one of these hooks makes another method


def comparison(settings: "RunConfig", preset: str | None = None) -> str | None:
    """The command of FedAvg (without a server DFedAvg) in the same setting; None for a run of the
    baseline itself and for a resumed run, whose settings were not typed. preset: its own preset."""
    from fedaccord.cli.settings import read_begun, read_settings
    from fedaccord.config import RunConfig, defaults, in_use
    from fedaccord.plugins import PLUGINS
    from fedaccord.strategies import METHODS

    if settings.resume:
        return None
    baseline = "dfedavg" if settings.strategy.topology.is_decentralised else "fedavg"
    local = {name for name, kind in PLUGINS.items() if HOOKS & vars(kind).keys()}
    usual, of_method = defaults(), {*METHODS, *local} - {baseline}
    shared = {
        key: value
        for key, value in settings.flat.items()
        if key.partition(".")[0] not in of_method
        and value != usual[key]
        and key != "keep-best"  # perhaps of a metric that the baseline lacks
    }
    other = RunConfig.make(shared | {"algo": baseline})
    read, plugins = in_use(other), other.strategy.active_plugins
    setting = {"algo": baseline} | {
        key: value for key, value in shared.items() if key in read and key not in ("algo", "name")
    }
    if settings.algo == baseline and len(plugins) == len(settings.strategy.active_plugins):
        return None
    words = ["fedaccord", "run"]
    if preset:  # then only the differences from it
        words += ["--preset", preset]
        begun = {"algo": None, **read_settings([], read_begun(None, preset))}
        others = {key for key in begun if key.partition(".")[0] in METHODS}
        wanted = {key: setting.get(key, usual[key]) for key in {**begun, **setting}}
        setting = {
            key: value
            for key, value in wanted.items()
            if key not in others and value != begun.get(key, usual[key])
        }
    values = ((k, v if isinstance(v, str) else json.dumps(v)) for k, v in setting.items())
    return shlex.join([*words, *(f"{key}={value}" for key, value in values)])
