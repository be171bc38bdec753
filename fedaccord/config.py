"""Run configurations: every key with its type, default, range and meaning.

A key is the name of an option in kebab case. The options of all strategies and of the task have
plain keys (``fraction-train``, ``batch-size``), those of one method or plug-in are below its name
(``scaffold.server-lr``, ``relaxed-init.beta``).
"""

from collections.abc import Container, Mapping
from dataclasses import Field, dataclass, replace
from typing import Any

from fedaccord import hints
from fedaccord.core.optimizer import OPTIMIZERS, SGD, Optimizer
from fedaccord.core.options import (
    check_option,
    did_you_mean,
    is_path,
    key_of,
    meaning,
    option,
    options,
    range_text,
    unread,
)
from fedaccord.core.plugin import PlugIn
from fedaccord.federation.settings import Settings, own_options
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins import PLUGINS
from fedaccord.strategies import METHODS
from fedaccord.task.config import TaskConfig

TRACKERS = ("none", "tensorboard", "mlflow", "wandb")  # packages, started by runs/trackers.py
AUTO = "auto"  # of a plug-in: the method's choice, off for most methods
RETIRED = {  # values of earlier versions and their replacement
    ("precision", "auto"): "no longer chosen by a trial; set float32, or bfloat16 if the "
    "processor is faster with it: docs/results/precision.md",
    ("algo", "centralised"): "now fedavg with one client; set algo=fedavg num-clients=1 and the "
    "local-steps of a client, as `fedaccord run --preset centralised` does",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A checked run configuration: task, strategy and runtime. Make one with `make`."""

    algo: str = option("fedinit", "the method; `fedaccord methods` lists them")
    num_server_rounds: int = option(30, "rounds T", low=1, affects="rounds")
    num_clients: int = option(
        20, "clients C in process, or devices without a partition-id; others report C", low=1
    )
    name: str = option(
        "",
        "name of the run directory; empty: method, data set, seed and time",
        affects="place",
        managed=True,
    )
    out_dir: str = option(
        "",
        "absolute folder of run directories; empty: ~/fedaccord-runs",
        affects="place",
        path=True,
        managed=True,
    )
    eval_train: bool = option(
        False,
        "evaluate on the training samples too: train accuracy, generalisation gap",
        affects="records",
    )
    keep_best: str = option(
        "",
        "evaluated metric, e.g. client-accuracy; saves the output model of its best round",
        affects="records",
    )
    threads: int = option(
        0,
        "CPU threads of PyTorch in each process; 0: chosen by the model and the cores",
        low=0,
        affects="speed",
        node=True,
    )
    workers: int = option(
        0,
        "Ray actors that share the clients of a round, with one thread each unless threads is "
        "set; 0: only this process",
        low=0,
        affects="speed",
    )
    ray_address: str = option(
        "local",
        "Ray cluster of the workers: local, started on this machine, or auto or HOST:PORT",
        affects="place",
    )
    gpus_per_worker: float = option(
        0.0,
        "GPUs of a worker, or a share of one; 0: all",
        low=0,
        affects="speed",
    )
    vectorize: str = option(
        "off",
        "many clients in one call, in process: never, always, or (auto) for small models and five "
        "clients a round or more, on a GPU for all that accept it; results then differ in the last "
        "bits from those of one client at a time and of Flower's runtimes",
        choices=("off", "on", "auto"),
        affects="numbers",
    )
    client_state: str = option(
        "auto",
        "storage of visited clients' states, in process: memory, files in the run directory, or "
        "(auto) files if they do not fit into half of the free memory",
        choices=("auto", "memory", "disk"),
        affects="place",
    )
    tracker: str = option(
        "none",
        "tracker of the run, beside its own directory",
        choices=TRACKERS,
        affects="place",
    )
    checkpoint_every: int = option(
        0,
        "rounds between checkpoints; 0: by time, of which they take a twentieth",
        low=0,
        affects="speed",
    )
    state_dir: str = option(
        "",
        "absolute folder of the clients' states in Flower's simulation; empty: in Flower's memory; "
        "devices have a state-dir of their own in their --node-config",
        affects="place",
        path=True,
    )
    resume: bool = option(
        False,
        "resume from the last checkpoint of the run called name",
        affects="place",
        managed=True,
    )

    task: TaskConfig
    strategy: FederatedStrategy  # the method with its plug-ins and the federation's settings
    flat: dict[str, Any]  # every key with its value

    @staticmethod
    def make(values: Mapping[str, Any], method: FederatedStrategy | None = None) -> "RunConfig":
        """Check ``values`` (key -> value, with defaults for missing keys).

        method: used instead of the keys that make one.
        Raises ValueError, in one line, for an unknown key, a wrong type, a value out of range and
        settings that do not fit together.
        """
        fields = keys()
        for key in values:
            if key not in fields:
                if "algo" in values:  # of an absent package, whose keys are unknown, too
                    _check("algo", values["algo"], fields["algo"])
                chosen = values.get("algo", RunConfig.algo), values.get("optimizer")
                raise hints.unknown(key, chosen, (*METHODS, *OPTIMIZERS), fields)
        if method is not None:
            values = {**values, **settings_of(method)}
        flat = {key: _check(key, values.get(key, default(f)), f) for key, f in fields.items()}
        return RunConfig(
            **_values(flat, RunConfig),
            task=TaskConfig(**_values(flat, TaskConfig), seed=flat["seed"]),
            strategy=method or _strategy(flat),
            flat=flat,
        )

    def having(self, key: str, value: Any) -> "RunConfig":
        """The same with another value of a plain key of this class."""
        field = {key.replace("-", "_"): value}
        return replace(self, **field, flat=self.flat | {key: value})

    def unread(self, explicit: Container[str] = ()) -> list[str]:
        """A line for each key that was set and has no effect in this configuration.

        Keys that differ from their defaults or are in ``explicit`` count as set.
        """
        usual, reasons = defaults(), self.unread_keys()
        return [
            f"{key}={toml(value)} has no effect: {reasons[key]}"
            for key, value in self.flat.items()
            if key in reasons and (key in explicit or value != usual[key])
        ]

    def unread_keys(self) -> dict[str, str]:
        """The keys without effect in this configuration, and why."""
        needs: dict[str, str] = {}  # a key -> the setting without which it has no effect
        reasons = {key_of(name): why for name, why in self.strategy.replaces.items()}
        if not self.workers:
            needs |= dict.fromkeys(("ray-address", "gpus-per-worker"), "workers")
        else:
            reasons["client-state"] = "Ray keeps the states of the workers' clients"
        if self.strategy.evaluation == "clients":
            reasons["eval-train"] = "only the clients evaluate"
        if self.strategy.is_buffered and self.strategy.concurrency:
            reasons["fraction-train"] = "concurrency sets the number of active clients"
        if all(map(self.strategy.is_one_step, range(self.num_server_rounds))):
            reasons.setdefault("lr-schedule", "one local step a round has the rate lr")
        parts: list[tuple[str, Any]] = [("", self.task), ("", self.strategy)]
        for name in METHODS:
            if name == self.algo:
                parts.append((f"{name}.", self.strategy))
            else:
                other = (key for key in self.flat if key.startswith(f"{name}."))
                needs |= dict.fromkeys(other, f"algo={name}")
        steps = self.strategy.own_optimizer()
        if isinstance(steps, SGD):
            reasons["optimizer-state"] = "plain SGD keeps no vectors"
        for name, optimizer in OPTIMIZERS.items():
            if name != self.strategy.optimizer_name:
                own = (f"{name}.{key_of(field.name)}" for field in options(optimizer))
                needs |= dict.fromkeys(own, f"optimizer={name}")
        every = {type(p): p for p in (*self.strategy.plugins, *self.strategy.active_plugins)}
        for name, kind in PLUGINS.items():
            strength, *others = options(kind)
            plugin = every.get(kind)  # another option may turn it off, e.g. compress.share=1
            if plugin and (not plugin.is_off or getattr(plugin, strength.name) not in (0, "none")):
                parts.append((f"{name}.", plugin))
                reasons |= {key_of(field): why for field, why in plugin.replaces.items()}
                unused = plugin.unread(self.strategy)
                reasons |= {f"{name}.{key_of(field)}": why for field, why in unused.items()}
            else:
                own = (f"{name}.{key_of(field.name)}" for field in others)
                needs |= dict.fromkeys(own, f"{name}.{key_of(strength.name)}")
        for prefix, settings in parts:
            needs |= {prefix + key_of(f): prefix + other for f, other in unread(settings).items()}
        return {key: f"it needs {other}" for key, other in needs.items()} | reasons


def _strategy(flat: Mapping[str, Any]) -> FederatedStrategy:
    """Raises ValueError, in one line, if method, plug-ins and settings do not fit together."""
    name = flat["algo"]
    kind = METHODS[name]
    own = {type(plugin): plugin for plugin in default_plugins(kind)}
    plugins: list[PlugIn] = []
    for prefix, plugin_kind in PLUGINS.items():
        values = {f.name: flat[f"{prefix}.{key_of(f.name)}"] for f in options(plugin_kind)}
        values = {field: value for field, value in values.items() if value != AUTO}
        if plugin_kind.is_set(values) or plugin_kind in own:
            plugins.append(replace(own.get(plugin_kind, plugin_kind()), **values))
    method = {f.name: flat[f"{name}.{key_of(f.name)}"] for f in own_options(kind)}
    strategy = kind(**_values(flat, Settings), **method, plugins=tuple(plugins))
    optimizer = _optimizer(strategy.optimizer_name, flat)
    return strategy if optimizer is None else replace(strategy, local_optimizer=optimizer)


def _optimizer(name: str, flat: Mapping[str, Any]) -> Optimizer | None:
    """The optimiser if it has options in a table; None: its name is sufficient."""
    if name not in OPTIMIZERS:
        return None
    kind = OPTIMIZERS[name]
    values = {f.name: flat[f"{name}.{key_of(f.name)}"] for f in options(kind)}
    return kind(**values) if values else None


def settings_of(method: FederatedStrategy) -> dict[str, Any]:
    """The keys that make a method, with their values, if it is one of `METHODS`."""
    names = {kind: name for name, kind in METHODS.items()}
    settings = {key_of(f.name): getattr(method, f.name) for f in options(Settings)}
    if name := names.get(type(method)):
        own = own_options(type(method))
        settings |= {
            "algo": name,
            **{f"{name}.{key_of(f.name)}": getattr(method, f.name) for f in own},
        }
    steps = method.own_optimizer()
    if steps.registered_name() == method.optimizer_name:
        table, fields = method.optimizer_name, options(type(steps))
        settings |= {f"{table}.{key_of(f.name)}": getattr(steps, f.name) for f in fields}
    return settings | resolved(method)


def method_keys() -> set[str]:
    """The keys that make a method: its settings, its own options and its plug-ins."""
    return {key for key in keys() if "." in key} | {key_of(f.name) for f in options(Settings)}


def task_keys() -> set[str]:
    """The keys of data, model and device."""
    return {key_of(field.name) for field in options(TaskConfig)}


def node_keys() -> list[str]:
    """The keys of which a node's config may have its own value."""
    return [key for key, field in keys().items() if field.metadata["node"]]


def in_use(config: RunConfig) -> dict[str, Any]:
    """The settings without those of other methods and of unused plug-ins, unless they were set.

    `RunConfig.make` of them gives the same configuration.
    """
    usual, plugins = defaults(), [type(plugin) for plugin in config.strategy.active_plugins]
    tables = {config.algo, config.flat["optimizer"]}
    tables |= {name for name, kind in PLUGINS.items() if kind in plugins}
    tables |= {
        key.partition(".")[0]
        for key, value in config.flat.items()
        if key.partition(".")[0] in (*PLUGINS, *OPTIMIZERS) and value != usual[key]
    }
    return {
        key: value
        for key, value in config.flat.items()
        if "." not in key or key.partition(".")[0] in tables
    }


def affecting(*what: str) -> set[str]:
    """The keys that affect one of ``what``; see `option`."""
    return {key for key, field in keys().items() if field.metadata["affects"] in what}


def paths(values: Mapping[str, Any]) -> list[str]:
    """The keys among ``values`` that hold a path, and are not empty."""
    return [key for key, field in keys().items() if is_path(values.get(key), field)]


def resolved(method: FederatedStrategy) -> dict[str, Any]:
    """The keys of a method's plug-ins in use, with the values behind "auto"."""
    kinds = {kind: name for name, kind in PLUGINS.items()}
    return {
        f"{kinds[type(plugin)]}.{key_of(field.name)}": getattr(plugin, field.name)
        for plugin in method.active_plugins
        if type(plugin) in kinds
        for field in options(type(plugin))
    }


def default_plugins(kind: type[FederatedStrategy]) -> tuple[PlugIn, ...]:
    """The plug-ins that a method itself activates."""
    return kind(fraction_train=1.0).own_plugins()


def keys() -> dict[str, "Field[Any]"]:
    """Every key with the option behind it."""
    fields = keys_of(RunConfig) | keys_of(TaskConfig) | keys_of(Settings)
    for name, kind in METHODS.items():
        fields |= {f"{name}.{key_of(f.name)}": f for f in own_options(kind)}
    for name, part in (*OPTIMIZERS.items(), *PLUGINS.items()):
        fields |= {f"{name}.{key_of(f.name)}": f for f in options(part)}
    return fields


def keys_of(kind: type) -> dict[str, "Field[Any]"]:
    """The plain keys of one class of settings."""
    return {key_of(field.name): field for field in options(kind)}


def allowed(key: str, field: "Field[Any]") -> str:
    """The allowed values of a key in words."""
    return ", ".join(METHODS) if key == "algo" else range_text(field)


def defaults() -> dict[str, Any]:
    """Every key with its default, as in pyproject.toml."""
    return {key: default(field) for key, field in keys().items()}


def default(field: "Field[Any]") -> Any:
    return AUTO if field.metadata["auto"] else field.default


def _values(flat: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The options of ``kind`` with their values."""
    return {field.name: flat[key_of(field.name)] for field in options(kind)}


def _check(key: str, value: Any, field: "Field[Any]") -> Any:
    if field.metadata["auto"] and value == AUTO:
        return value
    if isinstance(value, str) and (instead := RETIRED.get((key, value))):
        raise ValueError(f"{key}={value}: {instead}")
    if key == "algo" and isinstance(value, str) and value not in METHODS:
        if why := METHODS.left_out(value):
            raise ValueError(f"algo={value}: its package cannot be loaded ({why}); fix it")
        near = did_you_mean(value, METHODS)
        if ":" in value:
            near = "; the entry point of a package names a method of your own: CONTRIBUTING.md"
        raise ValueError(f"{key}: expected one of {', '.join(METHODS)}, got {value!r}{near}")
    return check_option(key, value, field)


def config_toml() -> str:
    """The table [tool.flwr.app.config] of pyproject.toml: every key, its default and meaning."""
    lines, table = ["[tool.flwr.app.config]"], ""
    for key, field in keys().items():
        group, _, name = key.rpartition(".")
        if group != table:
            lines += ["", f"[tool.flwr.app.config.{group}]"]
            table = group
        comment = meaning(field, allowed=allowed(key, field))
        lines.append(f"{name} = {toml(default(field))}  # {comment}")
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
