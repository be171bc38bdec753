"""The run configuration: its defaults, refused values and their messages, plug-ins by key."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.common.config import flatten_dict

from fedaccord import config
from fedaccord.config import RunConfig
from fedaccord.core.options import AFFECTS, options
from fedaccord.core.plugin import PlugIn
from fedaccord.federation.settings import own_options
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.hints import SYNONYMS
from fedaccord.strategies import METHODS, PLUGINS, AFedPD, FedAvg, FedDyn, RelaxedInit, Scaffold
from fedaccord.task.config import TaskConfig

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


def make(**values: Any) -> RunConfig:
    return RunConfig.make({key.replace("_", "-"): value for key, value in values.items()})


# --- keys -----------------------------------------------------------------------------------------


def test_pyproject_has_no_federations() -> None:
    """`flwr run` would move that section to the user's home and edit this file."""
    assert set(PYPROJECT["tool"]["flwr"]) == {"app"}
    assert "federations" not in PYPROJECT["tool"]["flwr"]["app"]


def test_pyproject_names_the_apps() -> None:
    components = PYPROJECT["tool"]["flwr"]["app"]["components"]
    assert components == {
        "serverapp": "fedaccord.apps:server_app",
        "clientapp": "fedaccord.apps:client_app",
    }


@pytest.mark.parametrize("key", config.keys())
def test_every_key_has_a_meaning_and_a_default_in_its_range(key: str) -> None:
    field = config.keys()[key]
    assert len(field.metadata["doc"]) > 5
    assert RunConfig.make({key: config.default(field)}).flat[key] == config.default(field)
    assert key == key.lower()
    assert "_" not in key


def test_what_keys_affect() -> None:
    """Each key affects one thing. Keys that affect no numbers are listed again, so that a new key
    with a wrong or a forgotten effect is noticed."""
    assert {what: config.affecting(what) for what in AFFECTS if what != "numbers"} == {
        "rounds": {
            *("num-server-rounds", "min-replies", "max-failed-rounds"),
            *("max-update-norm", "max-client-norm", "max-examples", "dp.max-epsilon"),
            "secure-sum.threshold",
        },
        "records": {
            *("eval-every", "eval-train", "evaluation", "fraction-evaluate", "metrics"),
            *("keep-best", "gossip.eval-nodes", "dp.write-client-metrics"),
        },
        "speed": {
            *("threads", "workers", "gpus-per-worker", "checkpoint-every"),
            *("round-timeout", "wait-timeout"),
        },
        "place": {
            *("name", "out-dir", "state-dir", "data-dir", "resume", "tracker", "download"),
            *("device", "ray-address", "client-state"),
        },
    }
    assert {"seed", "lr", "model", "precision", "sam.rho"} <= config.affecting("numbers")


def test_keys_whose_values_are_paths() -> None:
    every = dict.fromkeys(config.keys(), "/a/file.csv")
    paths = config.paths(every)
    for key, field in config.keys().items():
        assert field.metadata["path"] == (key in paths) == ("absolute" in field.metadata["doc"])
    assert config.paths(config.defaults()) == []
    for word in ("lognormal", "LogNormal"):
        assert config.paths({"device-profile": word, "state-dir": "/x"}) == ["state-dir"]


def test_names_of_keys_do_not_collide() -> None:
    kinds = (RunConfig, TaskConfig, FederatedStrategy)
    plain = [f.name for kind in kinds for f in options(kind)]
    assert len(plain) == len(set(plain))
    assert not set(METHODS) & set(PLUGINS)
    for name, kind in METHODS.items():
        assert {f"{name}.{f.name.replace('_', '-')}" for f in own_options(kind)} <= set(
            config.keys()
        )
        again = {*plain} & vars(kind).get("__annotations__", {}).keys()
        assert not again, f"{kind.__name__}: rename {again}, which every method or run has"


def test_flower_passes_the_defaults_of_pyproject() -> None:
    """Under Flower the run config has every key, flattened; tools/sync.py writes it."""
    flat = flatten_dict(PYPROJECT["tool"]["flwr"]["app"]["config"])
    assert flat == config.defaults()
    assert RunConfig.make(flat).flat == RunConfig.make({}).flat


# --- what is refused ------------------------------------------------------------------------------

# the nearest three, a key of the chosen method or of a plug-in first, by the name that is typed
NEAREST: list[tuple[dict[str, Any], str]] = [
    ({"lrr": 0.1}, "'lr'"),
    ({"num_clients": 3}, "'num-clients'"),
    ({"scaffold.server_lr": 1.0}, "'scaffold.server-lr'"),
    ({"algo": "fedprox", "mu": 0.1}, "'fedprox.mu'"),
    ({"algo": "scaffold", "rho": 0.1}, "'sam.rho'"),
    ({"beta": 0.1}, "'relaxed-init.beta'"),
    ({"server_lr": 1.0}, "'fedinit.server-lr'"),
    ({"algo": "feddyn", "alpha": 0.5}, "'feddyn.alpha' or 'dirichlet-alpha'"),
    ({"client": 3}, "'num-clients', 'client-state' or 'max-client-norm'"),
    ({"clients": 3}, "'num-clients'"),
    ({"learning_rate": 3}, "'lr'"),
    ({"participation": 1}, "'fraction-train'"),
    ({"epochs": 1}, "'local-epochs'"),
    ({"rounds": 1}, "'num-server-rounds'"),
    ({"momentum": 0.9}, "'momentum.mu', 'fedavgm.beta' or 'dfedavgm.momentum'"),
    ({"algo": "fedavgm", "momentum": 0.9}, "'fedavgm.beta'"),
    ({"optimiser": "adamw"}, "'optimizer'"),
    ({"optimizer": "adamw", "beta1": 0.8}, "'adamw.beta1'"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [  # ...: more follows
    *((v, f"unknown key '{[*v][-1]}' (did you mean {advice}?)") for v, advice in NEAREST),
    ({"": 1}, "unknown key ''; `fedaccord run --list-keys` lists the known ones"),
    ({"qqq": 3}, "unknown key 'qqq'; `fedaccord run --list-keys` lists the known ones"),
    ({"fedmine.lam": 1, "algo": "fedmine"}, "algo: expected one of ..."),  # an absent package's
    ({"alpha": 0.5}, "alpha: this key is now called 'dirichlet-alpha'"),
    *(
        (
            {"algo": algo, "relaxed-init.server": "updates"},
            "relaxed-init.server: this key is now called 'fedinit.server'",
        )
        for algo in ("fedinit", "fedavg", "fedsam")
    ),
    (
        {"optimizer": "adam"},
        "optimizer: expected one of sgd, momentum, adamw, muon, or package.module:function, got "
        "'adam' (did you mean 'adamw'?)",
    ),
    ({"lr": "fast"}, "lr: expected a number, got 'fast'"),
    ({"lr": True}, "lr: expected a number, got True"),
    ({"lr": 0}, "lr: expected above 0, got 0.0"),
    ({"lr": float("inf")}, "lr: expected a finite number, got inf"),
    ({"lr": float("nan")}, "lr: expected a finite number, got nan"),
    ({"lr": 1e39}, "lr: expected a number that float32 holds, up to 3.4e38, got 1e+39"),
    ({"lr-decay": 1.01}, "lr-decay: expected above 0 and at most 1, got 1.01"),
    ({"weight-decay": -1e-9}, "weight-decay: expected at least 0, got -1e-09"),
    ({"num-clients": 0}, "num-clients: expected at least 1, got 0"),
    ({"num-clients": 2.0}, "num-clients: expected an integer, got 2.0"),
    ({"num-clients": True}, "num-clients: expected an integer, got True"),
    (
        {"fedadagrad.v0": -0.3},
        "fedadagrad.v0: expected at least 0 and at most 1e+18, or -1, got -0.3",
    ),
    ({"fedadam.tau": 1e30}, "fedadam.tau: expected above 0 and at most 1e+09, got 1e+30"),
    ({"fedprox.mu": -1}, "fedprox.mu: expected at least 0, got -1.0"),
    ({"scaffold.server-lr": -1.0}, "scaffold.server-lr: expected at least 0, got -1.0"),
    ({"feddyn.alpha": 0}, "feddyn.alpha: expected above 0, got 0.0"),
    ({"seed": 2**63}, "seed: expected an integer below 2^63, got 9223372036854775808"),
    ({"fraction-train": 1e-9}, "fraction-train: expected at least 1e-06 and at most 1, got 1e-09"),
    ({"download": 1}, "download: expected true or false, got 1"),
    ({"name": 3}, "name: expected a string, got 3"),
    ({"out-dir": "/a\0b"}, "out-dir: expected a path without the character NUL, got '/a\\x00b'"),
    (
        {"algo": "centralised"},
        "algo=centralised: now fedavg with one client; set algo=fedavg num-c...",
    ),
    ({"precision": ["auto"]}, "precision: expected a string, got ['auto']"),
    ({"algo": ["fedavg", "scaffold"]}, "algo: expected a string, got ['fedavg', 'scaffold']"),
    (
        {"precision": "auto"},
        "precision=auto: no longer chosen by a trial; set float32, or bfloat16...",
    ),
    ({"weighting": "size"}, "weighting: expected one of uniform, examples, got 'size'"),
    (
        {"model": "resnet"},
        "model: expected one of linear, mlp, lenet, lenet5, cnn, resnet18, vgg11, "
        "transformer, or package.module:function, got 'resnet' (did you mean 'resnet18'?)",
    ),
    (
        {"precision": "half"},
        "precision: expected one of float32, float64, bfloat16, tf32, got 'half'",
    ),
    ({"relaxed-init.beta": "much"}, "relaxed-init.beta: expected a number, got 'much'"),
    ({"relaxed-init.beta": -2}, "relaxed-init.beta: expected at least -1, got -2.0"),
    (
        {"relaxed-init.first-visit": "first"},
        "relaxed-init.first-visit: expected one of initial, ...",
    ),
]


@pytest.mark.parametrize(("values", "line"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_bad_setting_is_one_line_that_names_the_key(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        RunConfig.make(values)
    start = line.removesuffix("...")
    assert str(error.value).startswith(start) if start != line else str(error.value) == line


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("algo", "scafold", "scaffold"),
        ("algo", "fed-init", "fedinit"),
        ("algo", "FEDAVG", "fedavg"),
        ("model", "MLP", "mlp"),
        ("device-profile", "LogNormal", "lognormal"),
        ("dataset", "cifar-10", "cifar10"),
        ("partition", "dirchlet", "dirichlet"),
    ],
)
def test_the_nearest_known_value_is_named(key: str, value: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: expected one of .* got '{value}'") as error:
        RunConfig.make({key: value})
    assert str(error.value).endswith(f" (did you mean {advice!r}?)")


def test_a_method_by_its_path_is_told_how_to_get_a_name() -> None:
    line = "^algo: .* got 'own:Grow'; the entry point of a package names a method of your own: CONT"
    with pytest.raises(ValueError, match=line):
        RunConfig.make({"algo": "own:Grow"})


def test_synonyms_name_existing_keys() -> None:
    keys = config.keys()
    for word, targets in SYNONYMS.items():
        assert {*targets} <= keys.keys()
        assert word not in keys


UNREAD: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"fedprox.mu": 0.2}, {"fedprox.mu": "algo=fedprox"}),
    ({"algo": "fedprox", "fedprox.mu": 0.2}, {}),
    ({"algo": "fedinit", "fedavg.server-lr": 0.5}, {"fedavg.server-lr": "algo=fedavg"}),
    (
        {"partition": "iid", "classes-per-client": 3, "dirichlet-alpha": 0.1},
        {"classes-per-client": "partition=pathological", "dirichlet-alpha": "partition=dirichlet"},
    ),
    ({"partition": "pathological", "classes-per-client": 3, "replacement": "cyclic"}, {}),
    ({"partition-file": "/parts.json"}, {"partition-file": "partition=file"}),
    ({"stem": "cifar", "model": "lenet"}, {"stem": "model=resnet18"}),
    ({"stem": "cifar", "model": "resnet18"}, {}),
    (
        {"data-dir": "/data"},
        {
            "data-dir": "dataset=fashion-mnist|cifar10|cifar100|image-folder|npz|text|"
            "package.module:function"
        },
    ),
    ({"dataset": "mine:load", "data-dir": "/data", "max-length": 8, "tokenizer": "mine:ids"}, {}),
    (
        {"dataset": "mine:load", "download": True, "labels": "a,b"},
        {
            "download": "dataset=fashion-mnist|cifar10|cifar100",
            "labels": "dataset=text|image-folder",
        },
    ),
    ({"model": "mine:net", "stem": "cifar"}, {"stem": "model=resnet18"}),
    ({"device-profile": "/phones.csv", "deadline": 3.0}, {}),
    ({"dataset": "npz", "download": True}, {"download": "dataset=fashion-mnist|cifar10|cifar100"}),
    ({"local-steps": 5, "local-epochs": 2}, {"local-epochs": "local-steps=0"}),
    (
        {"algo": "dpsgd", "local-epochs": 2},
        {"local-epochs": "local-epochs=2 has no effect: dpsgd takes one step a round"},
    ),
    (
        {"algo": "fedavg", "relaxed-init.center": "start"},
        {"relaxed-init.center": "relaxed-init.beta"},
    ),
    *(
        ({"algo": algo, "relaxed-init.beta": 0.1, "relaxed-init.center": "start"}, {})
        for algo in ("fedprox", "feddyn", "fedspeed", "scaffold")
    ),
    *(
        (
            {"algo": algo, "relaxed-init.beta": 0.1, "relaxed-init.center": "start"},
            {
                "relaxed-init.center": 'relaxed-init.center="start" has no effect: the method has '
                "no prox or dual term that would have an anchor"
            },
        )
        for algo in ("fedavg", "fedinit", "fedsam", "fedadam")
    ),
    *(
        (
            {"algo": algo, "lr-schedule": "linear", **steps},
            {
                "lr-schedule": 'lr-schedule="linear" has no effect: one local step a round has '
                "the rate lr"
            },
        )
        for algo, steps in (
            ("fedavg", {"local-steps": 1}),
            ("fedavg", {"batch-size": 0, "local-epochs": 1}),
            ("dpsgd", {}),
        )
    ),
    ({"algo": "fedavg", "lr-schedule": "linear", "batch-size": 0}, {}),
    ({"algo": "fedavg", "lr-schedule": "linear", "local-steps": 2}, {}),
    ({"algo": "fedavg", "lr-schedule": "linear"}, {}),
    (
        {"relaxed-init.beta": 0, "relaxed-init.center": "start"},
        {"relaxed-init.center": "relaxed-init.beta"},
    ),
    ({"adamw.beta1": 0.5}, {"adamw.beta1": "optimizer=adamw"}),
    ({"optimizer": "adamw", "adamw.beta1": 0.5, "optimizer-state": "keep"}, {}),
    (
        {"optimizer-state": "keep"},
        {"optimizer-state": 'optimizer-state="keep" has no effect: plain SGD keeps no vectors'},
    ),
    ({"gossip.steps": 2}, {"gossip.steps": "gossip.topology"}),
    ({"gpus-per-worker": 0.5}, {"gpus-per-worker": "workers"}),
    ({"ray-address": "auto", "workers": 2}, {}),
    ({"algo": "dfedavg", "gossip.peers": 3}, {"gossip.peers": "gossip.topology=random"}),
    ({"algo": "dfedavg", "gossip.peers": 3, "gossip.topology": "random"}, {}),
]


@pytest.mark.parametrize(("values", "needs"), UNREAD, ids=str)
def test_keys_without_effect_are_reported(values: dict[str, Any], needs: dict[str, str]) -> None:
    lines = RunConfig.make(values).unread()
    assert {line.partition("=")[0]: line.rpartition(" needs ")[2] for line in lines} == needs


def test_client_state_has_no_effect_with_workers() -> None:
    line = "client-state='disk' has no effect: Ray keeps the states of the workers' clients"
    values = {"client-state": "disk", "workers": 2}
    assert RunConfig.make(values).unread() == [line.replace("'disk'", '"disk"')]


def test_a_built_in_choice_is_not_looked_up_among_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedaccord.core.named.entry_points", None)
    assert RunConfig.make({"model": "mlp", "dataset": "digits"}).unread() == []


def test_a_default_without_effect_is_reported_if_given() -> None:
    settings = RunConfig.make({"algo": "fedavg", "fedprox.mu": 0.1})
    assert settings.unread() == []
    assert settings.unread(explicit=["algo", "fedprox.mu"]) == [
        "fedprox.mu=0.1 has no effect: it needs algo=fedprox"
    ]


def test_a_plug_in_that_is_set_and_off_has_no_key_without_effect() -> None:
    values = {"algo": "fedavg", "compress.share": 1.0}
    assert RunConfig.make(values | {"compress.method": "topk"}).unread(explicit=values) == []
    (line,) = RunConfig.make(values).unread(explicit=values)
    assert line.startswith("compress.share=1.0 has no effect: it needs compress.m")


@pytest.mark.parametrize("algo", ["dfedsam", "scaffold"])
def test_without_a_server_fraction_train_has_no_effect(algo: str) -> None:
    values = {"algo": algo, "gossip.topology": "ring", "fraction-train": 0.1}
    line = "fraction-train=0.1 has no effect: under gossip all nodes train in every round"
    assert RunConfig.make(values | {"sampling": "fixed"}).unread() == [line]
    assert RunConfig.make({"algo": "scaffold", "fraction-train": 0.1}).unread() == []


def test_with_concurrency_fraction_train_has_no_effect() -> None:
    values = {"algo": "fedavg", "schedule": "buffered", "fraction-train": 0.9}
    line = "fraction-train=0.9 has no effect: concurrency sets the number of active clients"
    assert RunConfig.make(values | {"concurrency": 2}).unread() == [line]
    assert RunConfig.make(values).unread() == []  # it makes the number


@pytest.mark.parametrize("algo", ["fedadmm", "local"])
def test_staleness_without_effect_is_reported(algo: str) -> None:
    values = {"algo": algo, "schedule": "buffered", "staleness": "polynomial"}
    (line,) = RunConfig.make(values).unread()
    assert line.startswith('staleness="polynomial" has no effect: ')


def test_the_momentum_of_dfedavgm_is_its_own() -> None:
    """optimizer=momentum, which would read the key, is refused."""
    (line,) = RunConfig.make({"algo": "dfedavgm", "momentum.mu": 0.5}).unread()
    assert line == "momentum.mu=0.5 has no effect: dfedavgm has its own, dfedavgm.momentum"


@pytest.mark.parametrize("algo", METHODS)
def test_a_methods_own_settings_are_read(algo: str) -> None:
    """All keys of each method are given, with their defaults."""
    own = {key: value for key, value in config.defaults().items() if key.startswith(f"{algo}.")}
    full = {"fraction-train": 1.0} if METHODS[algo].all_clients else {}
    settings = RunConfig.make({"algo": algo, **full, **own})
    assert settings.unread(explicit=own) == []


@pytest.mark.parametrize("v0", [-1, 0, 0.3])
def test_an_initial_second_moment_is_not_negative(v0: float) -> None:
    assert RunConfig.make({"algo": "fedadagrad", "fedadagrad.v0": v0}).strategy.init(
        torch.zeros(2)
    ).v.tolist() == pytest.approx([1e-6 if v0 == -1 else v0] * 2)


def test_integers_are_numbers() -> None:
    flat = make(lr=1, clip_norm=0, **{"scaffold.server-lr": 2}).flat
    assert (flat["lr"], flat["clip-norm"], flat["scaffold.server-lr"]) == (1.0, 0.0, 2.0)
    assert {type(flat[key]) for key in ("lr", "clip-norm", "scaffold.server-lr")} == {float}


REFUSED_TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    *(
        (algo, {"relaxed-init.beta": 0.1, "relaxed-init.center": "start"}, "center=start")
        for algo in ("afedpd", "fedlesam")
    ),
    *(
        (algo, {"weighting": "examples"}, "weighting: expected uniform")
        for algo in ("scaffold", "fedgamma", "feddyn", "fedspeed", "fedsmoo", "fedadmm")
    ),
]


@pytest.mark.parametrize(("algo", "values", "line"), REFUSED_TOGETHER)
def test_settings_that_a_method_does_not_support_are_refused(
    algo: str, values: dict[str, Any], line: str
) -> None:
    """Each of them would silently change the fixed point of the method."""
    with pytest.raises(ValueError, match=f".*{line}") as error:
        RunConfig.make({"algo": algo} | values)
    assert METHODS[algo].__name__ in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("algo", ["fedavg", "fedinit"])
def test_settings_that_a_method_supports_are_accepted(algo: str) -> None:
    values = {"relaxed-init.beta": 0.1, "relaxed-init.center": "start", "weighting": "examples"}
    assert RunConfig.make({"algo": algo} | values).strategy.weighting == "examples"


# --- plug-ins -------------------------------------------------------------------------------------


def own_values(plugin: PlugIn) -> tuple[type[PlugIn], dict[str, Any]]:
    """The class and the options of a plug-in, without the rule inside it."""
    return type(plugin), {f.name: getattr(plugin, f.name) for f in options(type(plugin))}


def plugins(algo: str, **keys: Any) -> list[Any]:
    values = {"algo": algo, "fraction-train": 1.0, **keys}
    return [own_values(plugin) for plugin in RunConfig.make(values).strategy.active_plugins]


OTHERS = ("fedavg", "scaffold", "feddyn", "afedpd")
RELAXED: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("fedinit", {}, {"beta": 0.1}),
    ("fedinit", {"beta": "auto"}, {"beta": 0.1}),
    ("fedinit", {"beta": 0.05}, {"beta": 0.05}),
    ("fedinit", {"beta": 0.1, "first-visit": "current"}, {"beta": 0.1, "first_visit": "current"}),
    ("fedinit", {"first-visit": "current"}, {"beta": 0.1, "first_visit": "current"}),
    ("fedinit", {"beta": 0}, None),  # what is left is FedAvg
    *((algo, {}, None) for algo in OTHERS),
    *((algo, {"first-visit": "current"}, None) for algo in OTHERS),
    *((algo, {"beta": 0.2}, {"beta": 0.2}) for algo in OTHERS),
]


@pytest.mark.parametrize(("algo", "keys", "plugin"), RELAXED)
def test_keys_make_plug_ins(algo: str, keys: dict[str, Any], plugin: dict[str, Any] | None) -> None:
    own = [] if plugin is None else [own_values(RelaxedInit(**plugin))]
    values = {f"relaxed-init.{key}": value for key, value in keys.items()}
    assert plugins(algo, **values) == own
    if algo == "fedinit" and plugin is None:
        half = RunConfig.make({"algo": algo, **values}).strategy.client_half()
        assert half == FedAvg().client_half()


@pytest.mark.parametrize("algo", METHODS)
def test_without_keys_a_method_has_its_own_plug_ins(algo: str) -> None:
    own = METHODS[algo](fraction_train=1.0).active_plugins
    assert plugins(algo) == [own_values(plugin) for plugin in own]


# --- how the values are used ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "key", "kind"),
    [
        ("fedavg", "server_lr", FedAvg),
        ("scaffold", "server_lr", Scaffold),
        ("feddyn", "alpha", FedDyn),
        ("afedpd", "rho", AFedPD),
    ],
)
def test_options_of_a_method_reach_its_strategy(algo: str, key: str, kind: Any) -> None:
    name = f"{algo}.{key.replace('_', '-')}"
    strategy = RunConfig.make({"algo": algo, name: 0.25}).strategy
    assert type(strategy) is kind
    assert getattr(strategy, key) == 0.25
    other = "fedavg" if algo == "scaffold" else "scaffold"
    plain = RunConfig.make({"algo": algo, f"{other}.server-lr": 0.25}).strategy
    assert getattr(plain, key) == getattr(kind(), key) != 0.25


@pytest.mark.parametrize("algo", METHODS)
def test_the_defaults_of_a_method_are_those_of_its_class(algo: str) -> None:
    strategy = make(algo=algo, fraction_train=1.0).strategy
    plain = METHODS[algo](fraction_train=1.0)
    for field in own_options(METHODS[algo]):
        assert getattr(strategy, field.name) == getattr(plain, field.name)
    assert strategy.client_half() == plain.client_half()


@pytest.mark.parametrize("algo", METHODS)
def test_the_settings_of_a_strategy_make_it_again(algo: str) -> None:
    strategy = METHODS[algo](fraction_train=1.0, lr=0.03)
    settings = config.settings_of(strategy)
    assert {*settings} <= {*config.keys()}
    assert config.settings_of(RunConfig.make(settings).strategy) == settings


def test_options_of_every_strategy_reach_it() -> None:
    values = {
        "fraction_train": 0.25,
        "sampling": "bernoulli",
        "seed": 3,
        "local_steps": 7,
        "lr": 0.03,
        "weighting": "examples",
        "precision": "float64",
        "round_timeout": 5.0,
    }
    strategy = make(algo="fedavg", **values).strategy
    assert {name: getattr(strategy, name) for name in values} == values


def test_the_task_gets_its_keys_and_the_seed() -> None:
    task = make(seed=5, dataset="cifar10", dirichlet_alpha=1, stem="cifar", lr=0.3).task
    assert (task.seed, task.dataset, task.dirichlet_alpha, task.stem) == (
        5,
        "cifar10",
        1.0,
        "cifar",
    )


def test_flat_has_every_key_and_what_was_given() -> None:
    flat = make(lr=0.3, algo="scaffold").flat
    assert list(flat) == list(config.keys())
    assert flat == config.defaults() | {"lr": 0.3, "algo": "scaffold"}
