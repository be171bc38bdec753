"""Settings from the command line: KEY=VALUE pairs and a TOML file."""

import sys
import tomllib
from pathlib import Path

import pytest

from fedaccord.cli.settings import read_begun, read_settings
from tests.cli.shell import invoke, refusal, run, success


def test_values_are_toml_or_else_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    pairs = {
        "lr=0.05": 0.05,
        "lr=1e-3": 1e-3,
        "lr=.1": 0.1,
        "lr=1.": 1.0,
        "lr=-.5E-1": -0.05,
        "lr=+0.1": 0.1,
        "lr=1.e-2": 0.01,
        "lr=.": ".",
        "lr=1..": "1..",
        "lr=0.1.2": "0.1.2",
        "seed=1_000": 1000,
        "name=.1": ".1",
        "name=1.": "1.",
        "num-clients = 7": 7,
        "download=true": True,
        "download=True": True,
        "eval-train=FALSE": False,
        "eval-train=1": 1,
        "name=True": "True",
        "algo=fedavg": "fedavg",
        'algo="fedavg"': "fedavg",
        "relaxed-init.beta=auto": "auto",
        "relaxed-init.beta=0.1": 0.1,
        "name=1": "1",
        "name=true": "true",
        "name=2026-01-01": "2026-01-01",
        "name=a=b #c": "a=b #c",
        "name=": "",
        "out-dir=runs": str(tmp_path / "runs"),
        "data-dir=../my data": str(tmp_path.parent / "my data"),
        "partition-file=~/parts.json": "/home/someone/parts.json",
        "out-dir=/a": "/a",
        "out-dir=": "",
        "lr=1\nalgo = 2": "1\nalgo = 2",
        "lr=[1]": "[1]",
        f"seed={'9' * 5000}": "9" * 5000,
        "unknown=1": 1,
    }
    for pair, value in pairs.items():
        (result,) = read_settings([pair]).values()
        assert (result, type(result)) == (value, type(value)), pair


def test_pairs_replace_values_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "preset.toml"
    file.write_text('lr = 0.5\nalgo = "scaffold"\n[relaxed-init]\nbeta = 0.1\n')
    expected = {"lr": 0.25, "algo": "scaffold", "relaxed-init.beta": 0.1}
    assert read_settings(["lr=0.25"], read_begun(file, None)) == expected


@pytest.mark.parametrize(
    "content",
    [
        "\ufefflr = 0.5\n[sam]\nrho = 0.1",
        "commit = ''\n[run]\nlr = 0.5\n[run.sam]\nrho = 0.1\n[used]\nlr = 1",
        "[project]\nname = 'x'\n[tool.flwr.app.config]\nlr = 0.5\n[tool.flwr.app.config.sam]\n"
        "rho = 0.1",
    ],
    ids=["with a byte-order mark", "of a run", "of a Flower app"],
)
def test_a_file_of_another_form(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file.toml"
    file.write_text(content, encoding="utf-8")
    assert read_settings([], read_begun(file, None)) == {"lr": 0.5, "sam.rho": 0.1}


def test_a_key_given_twice_and_keys_without_effect_give_one_warning_each(tmp_path: Path) -> None:
    """For each typed key, also with its default; for keys of a file only if they differ."""
    file = tmp_path / "file.toml"
    text = 'partition = "iid"\nclasses-per-client = 3\nreplacement = "none"\ndownload = true\n'
    file.write_text(text)
    words = "download=false lr=0.5 lr=0.25 algo=fedavg fedprox.mu=0.1 name=a"
    result = success(run(tmp_path, "--config", file, *words.split()))
    assert result.stderr.splitlines() == [
        "warning: lr is given twice: the later value, '0.25', is used",
        "warning: classes-per-client=3 has no effect: it needs partition=pathological",
        "warning: fedprox.mu=0.1 has no effect: it needs algo=fedprox",
    ]
    settings = tomllib.loads((tmp_path / "runs" / "a" / "config.toml").read_text())["run"]
    assert settings["lr"] == 0.25


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("lr: 0.1", "preset.toml is not valid TOML: "),
        ("\udcff", "preset.toml is not valid TOML: "),
        ("lr = 'fast'", "lr: expected a number"),
        ("[fedinit]\nlr = 1", "unknown key 'fedinit.lr'"),
        ("run = 3", "unknown key 'run'"),
        (
            "'sam.rho' = 0.1\n[sam]\nrho = 0.2",
            "sam.rho: expected one value, got two, in a table and as a key in quotes; remove one",
        ),
        ("[run]\nlr = 0.1\n[space]\nlr = [0.1]", "preset.toml is a sweep file: start it"),
        ("lr = 0.1\n[sweep]\nseeds = [0]", "preset.toml is a sweep file: start it"),
        (
            "lr = 0.2\n[run]\nalgo = 'fedavg'\n[sam]\nrho = 0.1",
            "expected all settings in [run], or no [run], got lr, sam beside it; move them",
        ),
    ],
)
def test_a_bad_file_gives_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "preset.toml"
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    assert message in refusal(tmp_path, run(tmp_path, "--config", file))


def test_a_function_of_this_folder_is_found_before_those_of_a_clone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = "/usr/lib/python/site-packages"
    monkeypatch.setattr(sys, "path", ["/bin", "/usr/lib/python", packages, "/clone"])
    success(invoke("--version"))
    assert sys.path == ["/bin", "/usr/lib/python", packages, "", "/clone"]
