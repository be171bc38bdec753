"""The group of commands: what help needs, and an unknown command."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedaccord import __version__
from tests.cli.shell import REPOSITORY, invoke, refusal

SLOW = ("torch", "flwr", "numpy", "pandas", "ray", "sklearn", "psutil")  # to import


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_help_loads_nothing_that_takes_long(words: list[str]) -> None:
    code = "import sys; from fedaccord.cli import app\n"
    code += f"try: app()\nfinally: print([name for name in {SLOW} if name in sys.modules])"
    run = [sys.executable, "-c", code, *words]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.endswith("\n[]\n")


def test_a_run_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """Once the data are decoded."""
    unneeded = ("sympy", "torch._dynamo", "torchvision", "sklearn", "scipy", "pandas", "ray")
    pairs = ["num-server-rounds=1", "num-clients=4", f"out-dir={tmp_path}"]
    assert invoke("run", *pairs).exit_code == 0
    code = "import sys; from fedaccord.cli import app\n"
    code += f"try: app()\nfinally: print([name for name in {unneeded} if name in sys.modules])"
    run = [sys.executable, "-c", code, "run", *pairs]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.endswith("\n[]\n")


def test_help_explains_pairs() -> None:
    found = invoke("run", "--help").stdout
    text = " ".join(found.split())
    assert "--list-keys" in text
    assert text.count("fedaccord run algo=") == 2


def test_the_version_is_that_of_the_package() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == __version__
    assert invoke("--version").stdout == f"fedaccord {__version__}\n"


def test_an_unknown_command_is_one_line(tmp_path: Path) -> None:
    assert "No such command 'rum'" in refusal(tmp_path, invoke("rum"))
