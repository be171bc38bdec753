"""`fedaccord flwr-config`: settings as one line to paste after `flwr run . --run-config`."""

import json
import shlex
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import typer

from fedaccord.cli.settings import ConfigFile, Pairs, Preset, checked

if TYPE_CHECKING:
    from fedaccord.config import RunConfig


def flwr_config(pairs: Pairs = None, config: ConfigFile = None, preset: Preset = None) -> None:
    """Print settings as one line, quoted for the shell, to paste after `--run-config`.

    `flwr run` accepts either a file or KEY=VALUE pairs, and strings only in quotes. The line has
    the settings that differ from the app's defaults, with absolute paths. Example:

    fedaccord flwr-config --preset fedinit lr=0.05 data-dir=cifar10
    """
    settings, typed = checked(pairs or [], config, preset)
    typer.echo(shlex.quote(run_config(differing(settings, typed))))


def differing(settings: "RunConfig", typed: Container[str]) -> dict[str, Any]:
    """The method, the keys that differ from the app's defaults, and the typed ones, for which the
    app's pyproject.toml may have been given other defaults."""
    from fedaccord.config import defaults

    usual = defaults()
    given = {k: v for k, v in settings.flat.items() if k in typed or v != usual[k]}
    return {"algo": settings.algo} | given


def run_config(values: Mapping[str, Any]) -> str:
    """Keys and values as `flwr run` parses them from one argument."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


def _quoted(value: Any) -> str:
    """A TOML value; a string has only the outer quotes, because Flower splits at inner ones."""
    if not isinstance(value, str):
        return json.dumps(value)
    inside = json.dumps(value, ensure_ascii=False)[1:-1]
    escaped = inside.replace('\\"', "\\u0022")  # JSON has put a backslash before each "
    return f'"{escaped}"'
