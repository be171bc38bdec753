"""Run configurations: every key with its type, default, range and meaning; nothing else knows keys.

A key is the name of an option in kebab case. The options of all strategies and of the task have
plain keys (``fraction-train``, ``batch-size``), those of one method or plug-in stand under its
name (``scaffold.server-lr``, ``relaxed-init.beta``).
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from fedaccord.strategies import METHODS, PLUGINS
from fedaccord.strategies.base import (
    FederatedStrategy,
    PlugIn,
    own_options,
)
from fedaccord.strategies.gossip import Gossip
from fedaccord.strategies.options import check_option, meaning, option, options, range_text
from fedaccord.task.datasets import DATASETS
from fedaccord.task.models import MODELS

AUTO = "auto"  # of a plug-in: what the method itself asks for, which is off for most
OFF = (0, "none")  # values of a plug-in's first option, its strength, that switch it off


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A checked run configuration. Make one with `RunConfig.make`."""

    algo: str = option("fedinit", "the method; `fedaccord methods` lists them", choices=[*METHODS])
    num_server_rounds: int = option(30, "rounds T", low=1)
    num_clients: int = option(
        20, "clients C in process; under Flower the connected SuperNodes count", low=1
    )
    name: str = option("", "name of the run directory; empty: method, data set, seed and time")
    out_dir: str = option("", "absolute folder of run directories; empty: ~/fedaccord-runs")
    dataset: str = option("digits", "the data set", choices=[*DATASETS])
    data_dir: str = option("", "absolute folder (npz: file) with the data")
    download: bool = option(False, "let torchvision fetch a missing data set")
    image_size: int = option(0, "image-folder: resize and crop to this side; 0: as they are", low=0)
    partition: str = option(
        "dirichlet",
        "how training samples are dealt to clients",
        choices=("iid", "dirichlet", "pathological", "file"),
    )
    alpha: float = option(0.3, "dirichlet: concentration of class priors; small: skewed", above=0)
    replacement: str = option(
        "none",
        "how samples of a class are drawn: none (strict partition), cyclic, iid",
        choices=("none", "cyclic", "iid"),
    )
    classes_per_client: int = option(2, "pathological: classes a client holds", low=1)
    partition_file: str = option("", "file: absolute path of a JSON list of index lists")
    model: str = option("mlp", "the model", choices=[*MODELS])
    stem: str = option(
        "imagenet", "resnet18: first layers as for ImageNet or CIFAR", choices=("imagenet", "cifar")
    )
    eval_train: bool = option(
        False, "evaluate on the training samples too: train accuracy, generalisation gap"
    )
    device: str = option("auto", "auto (cuda where there is one), cpu, cuda, cuda:1, mps")
    threads: int = option(0, "CPU threads of PyTorch in each process; 0: its own choice", low=0)

    strategy: dict[str, Any]  # options of every strategy, by name
    method: dict[str, Any]  # options of the chosen method, by name
    plugins: dict[str, dict[str, Any]]  # options of each plug-in, by plug-in and name
    flat: dict[str, Any]  # every key with its value

    @staticmethod
    def make(values: Mapping[str, Any]) -> "RunConfig":
        """Check ``values`` (key -> value, missing keys take their defaults).

        Raises ValueError, in one line, for an unknown key, a wrong type or a value out of range.
        """
        known = keys()
        for key in values:
            if key not in known:
                raise ValueError(f"unknown key {key!r}{nearest(key, known)}; known: {_list(known)}")
        flat = {key: _check(key, values.get(key, default(f)), f) for key, f in known.items()}
        prefix = f"{flat['algo']}."
        return RunConfig(
            **{f.name: flat[_key(f.name)] for f in _app_options()},
            strategy={f.name: flat[_key(f.name)] for f in options(FederatedStrategy)},
            method={
                f.name: flat[prefix + _key(f.name)] for f in own_options(METHODS[flat["algo"]])
            },
            plugins={
                plugin: {f.name: flat[f"{plugin}.{_key(f.name)}"] for f in options(kind)}
                for plugin, kind in PLUGINS.items()
            },
            flat=flat,
        )

    def build_strategy(self, **more: Any) -> FederatedStrategy:
        """The configured strategy; ``more``: its arguments that are no options."""
        kind = METHODS[self.algo]
        own = {type(p): p for p in default_plugins(kind)}
        plugins: list[PlugIn | Gossip] = []
        for name, plugin_kind in PLUGINS.items():
            values = {key: value for key, value in self.plugins[name].items() if value != AUTO}
            strength = options(plugin_kind)[0].name
            if values[strength] in OFF if strength in values else plugin_kind not in own:
                continue
            plugins.append(replace(own.get(plugin_kind, plugin_kind()), **values))
        return kind(**self.strategy, **self.method, plugins=tuple(plugins), **more)

    def task(self) -> dict[str, Any]:
        """The arguments of `fedaccord.task.load_task`."""
        names = [f.name for f in _app_options()]
        names = [*names[names.index("dataset") : names.index("eval_train")], "device"]
        return {name: getattr(self, name) for name in names} | {"seed": self.strategy["seed"]}


def default_plugins(kind: type[FederatedStrategy]) -> tuple[PlugIn | Gossip, ...]:
    """The plug-ins that a method switches on itself."""
    field = next(f for f in fields(kind) if f.name == "plugins")
    return field.default  # type: ignore[return-value]


def keys() -> dict[str, "Field[Any]"]:
    """Every key with the option behind it."""
    known = {_key(f.name): f for f in [*_app_options(), *options(FederatedStrategy)]}
    for name, kind in METHODS.items():
        known |= {f"{name}.{_key(f.name)}": f for f in own_options(kind)}
    for name, plugin in PLUGINS.items():
        known |= {f"{name}.{_key(f.name)}": f for f in options(plugin)}
    return known


def defaults() -> dict[str, Any]:
    """Every key with its default: what pyproject.toml holds."""
    return {key: default(field) for key, field in keys().items()}


def default(field: "Field[Any]") -> Any:
    return AUTO if field.metadata["auto"] else field.default


def _app_options() -> "list[Field[Any]]":
    return options(RunConfig)


def _check(key: str, value: Any, field: "Field[Any]") -> Any:
    if field.metadata["auto"] and value == AUTO:
        return value
    choices = field.metadata["choices"]
    if choices and isinstance(value, str) and value not in choices:
        raise ValueError(
            f"{key}: expected one of {', '.join(choices)}, got {value!r}{nearest(value, choices)}"
        )
    return check_option(key, value, field)


def nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _list(known: Iterable[str]) -> str:
    return ", ".join(known)


def _key(name: str) -> str:
    return name.replace("_", "-")


def config_toml() -> str:
    """The table [tool.flwr.app.config] of pyproject.toml: every key, its default and meaning."""
    lines, table = ["[tool.flwr.app.config]"], ""
    for key, field in keys().items():
        group, _, name = key.rpartition(".")
        if group != table:
            lines += ["", f"[tool.flwr.app.config.{group}]"]
            table = group
        comment = meaning(field, allowed=range_text(field))
        lines.append(f"{name} = {_toml(default(field))}  # {comment}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
