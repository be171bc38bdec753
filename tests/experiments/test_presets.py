"""The presets: each is valid, has only what differs from the defaults, and suits Flower."""

import tomllib
from collections.abc import Callable
from functools import cache
from inspect import getdoc, getmodule
from pathlib import Path

import flwr.common.config
import pytest
import torch
from flwr.common.config import get_fused_config_from_dir, parse_config_args
from torch import nn

from fedaccord import config, simulate
from fedaccord.cli.settings import read_begun, read_settings
from fedaccord.config import RunConfig
from fedaccord.experiments.presets import presets
from fedaccord.strategies import METHODS, DFedAvg
from fedaccord.task.models import build
from tests.cli.shell import invoke, refusal, run, success, summary

FEDAVG_BY_ANOTHER_NAME = (
    "centralised",
    "fedper",
    "fedbn",
    "lg-fedavg",
    "ffa-lora",
)  # one that readers look for
REPOSITORY = Path(__file__).resolve().parent.parent.parent
PRESETS = presets()
project_config = cache(flwr.common.config.get_project_config)  # read once

each_preset = pytest.mark.parametrize("name", PRESETS)


def values(name: str) -> dict[str, object]:
    return read_settings([], read_begun(None, name))


def test_every_method_of_a_paper_has_a_preset() -> None:
    published = [n for n, kind in METHODS.items() if "arXiv" in (getdoc(getmodule(kind)) or "")]
    assert len(published) > 20
    assert [name for name in published if name not in PRESETS] == []


@each_preset
def test_a_preset_is_valid_and_has_only_what_differs_from_the_defaults(name: str) -> None:
    """Besides `algo`, so that no file depends on the default method."""
    own, defaults = values(name), config.defaults()
    settings, algo = RunConfig.make(own), str(own["algo"])
    assert type(settings.strategy) is METHODS[algo]
    assert name == algo or name.startswith(f"{algo}-") or name in FEDAVG_BY_ANOTHER_NAME
    assert (name in FEDAVG_BY_ANOTHER_NAME) <= (algo == "fedavg")
    assert {k: v for k, v in own.items() if k != "algo" and defaults[k] == v} == {}
    # a key of another method would be read and do nothing
    assert {key.partition(".")[0] for key in own if "." in key} & set(METHODS) <= {algo}
    assert settings.unread(explicit=own) == []


@each_preset
def test_flower_reads_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function behind `flwr run --run-config`, and joined with the app's defaults."""
    monkeypatch.setattr(flwr.common.config, "get_project_config", project_config)
    fields = parse_config_args([str(PRESETS[name])])
    assert fields == values(name)
    assert {k: type(v) for k, v in fields.items()} == {k: type(v) for k, v in values(name).items()}
    fused = get_fused_config_from_dir(REPOSITORY, fields)
    assert RunConfig.make(fused).flat == RunConfig.make(values(name)).flat


@each_preset
def test_the_comment_of_a_preset_has_setting_sources_and_commands(name: str) -> None:
    lines = PRESETS[name].read_text().splitlines()
    head = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    text = "\n".join(head)
    assert head[0].count(": ") == 1
    assert "# Setting: " in text
    assert "# Method: " in text
    assert f"fedaccord run --preset {name} " in text
    assert f" --run-config fedaccord/experiments/presets/{name}.toml " in text
    assert f'"num-supernodes={RunConfig.make(values(name)).num_clients} ' in text
    assert max(map(len, lines)) <= 100


def test_the_presets_named_as_methods_share_a_task() -> None:
    """One task with a server, another without."""
    keys = ("dataset", "model", "num-clients", "partition", "dirichlet-alpha", "replacement")
    for with_server in (True, False):
        names = [
            name
            for name, kind in METHODS.items()
            if name in PRESETS and with_server != issubclass(kind, DFedAvg)
        ]
        flats = [RunConfig.make(values(name)).flat for name in names]
        assert len({tuple(flat[key] for key in keys) for flat in flats}) == 1


def test_they_are_listed_with_a_line_each_that_fits_80_columns() -> None:
    result = success(invoke("presets"))
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert max(map(len, lines)) <= 80
    line = next(line for line in lines if line.startswith("fedsam-200clients "))
    assert line.split(maxsplit=1)[1] == "CIFAR-10, ResNet-18-GN, 10 of 200 clients, Dirichlet 0.1"


def test_an_unknown_preset_is_one_line_that_names_the_nearest(tmp_path: Path) -> None:
    line = refusal(tmp_path, run(tmp_path, "--preset", "fedint"))
    assert "unknown preset 'fedint' (did you mean 'fedinit'?)" in line
    both = run(tmp_path, "--preset", "fedinit", "--config", PRESETS["fedinit"])
    assert "expected --config or --preset, got both" in refusal(tmp_path, both)


@pytest.mark.parametrize("name", ["fedsam-200clients", "fedpd"])
def test_a_preset_runs(name: str, tmp_path: Path) -> None:
    """Shortened, on data that needs no download."""
    short = ("dataset=digits", "model=linear", "threads=1", "num-server-rounds=1", "local-epochs=1")
    words = ("--preset", name, *short, f"out-dir={tmp_path}", "name=run")
    success(invoke("run", *words))
    assert summary(tmp_path / "run")["status"] == "completed"
    content = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["run"]
    for key in ("algo", "num-clients", "fraction-train", "replacement"):
        assert content[key] == values(name)[key]


LAYERS: dict[str, Callable[[str, nn.Module], bool]] = {  # whose parameters stay at the client
    "fedper": lambda layer, _: layer == "fc",
    "fedbn": lambda _, module: isinstance(module, nn.GroupNorm),
    "lg-fedavg": lambda layer, _: layer != "fc",
}


@pytest.mark.parametrize("name", LAYERS)
def test_local_parameters_are_trained_at_the_client(name: str) -> None:
    """On data that needs no download: each client has its own, and w has the rest."""
    small = {"dataset": "digits", "num-clients": 2, "local-steps": 1, "batch-size": 8}
    keys = values(name) | small | {"fraction-train": 1.0}
    del keys["num-server-rounds"], keys["download"]
    history = simulate(rounds=1, **{key.replace("-", "_"): value for key, value in keys.items()})
    with torch.device("meta"):
        model = build(str(keys["model"]), (1, 8, 8), 10)
    local = sum(
        parameter.numel()
        for layer, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if LAYERS[name](layer, module)
    )
    first, other = [state.local for state in history.clients]
    assert len(first) == local
    assert len(history.state.w) == sum(p.numel() for p in model.parameters()) - local
    assert (first - other).norm() > 1e-4
