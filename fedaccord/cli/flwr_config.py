"""`fedaccord flwr-config`: settings as one line to paste behind `flwr run . --run-config`."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

import typer

from fedaccord.cli.console import stop, warn
from fedaccord.cli.settings import ConfigFile, Pairs, Preset, read_settings, unread


def flwr_config(pairs: Pairs = None, config: ConfigFile = None, preset: Preset = None) -> None:
    """Print settings as one line, quoted for the shell, to paste behind `--run-config`.

    Flower takes no file beside KEY=VALUE pairs, and strings in quotes only. The line holds what
    differs from the app's defaults, with absolute paths. Example:

    fedaccord flwr-config --preset fedinit lr=0.05 data-dir=cifar10
    """
    from fedaccord.config import RunConfig, defaults

    try:
        settings = RunConfig.make(read_settings(pairs or [], config, preset))
        for line in unread(settings, pairs or [], config, preset):
            warn(line)
    except (ValueError, FileNotFoundError) as error:
        stop(error, 2)
    usual = defaults()
    differing = {k: v for k, v in settings.flat.items() if k == "algo" or v != usual[k]}
    typer.echo(shlex.quote(run_config(differing)))


def run_config(values: Mapping[str, Any]) -> str:
    """Keys and values as `flwr run` parses them from one argument."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


def _quoted(value: Any) -> str:
    """A TOML value; in a string no quote but the outer ones, at which Flower cuts."""
    if not isinstance(value, str):
        return json.dumps(value)
    inside = json.dumps(value, ensure_ascii=False)[1:-1]
    escaped = inside.replace('\\"', "\\u0022")  # where " stands, a backslash of its own precedes it
    return f'"{escaped}"'
