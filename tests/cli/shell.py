"""Commands as a user types them."""

import json
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from fedaccord import cli

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ("model=linear", "num-clients=4", "num-server-rounds=2", "local-epochs=1", "threads=1")


def invoke(*words: object, **env: str) -> Result:
    return CliRunner().invoke(
        cli.app, [str(word) for word in words], env=env, prog_name="fedaccord"
    )


def run(tmp_path: Path, *words: object) -> Result:
    """A tiny run; ``words`` replace its settings."""
    keys = {str(word).partition("=")[0] for word in words}
    usual = (*TINY, f"out-dir={tmp_path / 'runs'}")
    return invoke("run", *(x for x in usual if x.partition("=")[0] not in keys), *words)


def summary(path: Path) -> dict[str, Any]:
    """The summary of a run directory."""
    return json.loads((path / "summary.json").read_text())  # type: ignore[no-any-return]


def success(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def refusal(tmp_path: Path, result: Result, code: int = 2) -> str:
    """The line of a command that ended with an error and wrote nothing."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("fedaccord: ")
    assert not list(tmp_path.glob("runs/*"))
    return result.stderr
