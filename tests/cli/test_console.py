"""The group of commands: what help needs, and an unknown command."""

import subprocess
import sys
import tomllib
from pathlib import Path

from fedaccord import __version__
from tests.cli.shell import REPOSITORY, invoke, refusal


def test_help_explains_pairs_and_needs_no_pytorch() -> None:
    code = "import sys; from fedaccord.cli import app\n"
    code += "try: app()\nfinally: print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "run", "--help"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert found.endswith("False\n")
    text = " ".join(found.split())
    assert "--list-keys" in text
    assert text.count("fedaccord run algo=") == 2


def test_the_version_is_that_of_the_package() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == __version__
    assert invoke("--version").stdout == f"fedaccord {__version__}\n"


def test_an_unknown_command_is_one_line(tmp_path: Path) -> None:
    assert "No such command 'rum'" in refusal(tmp_path, invoke("rum"))
