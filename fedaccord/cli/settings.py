"""Run-config values from the command line: KEY=VALUE pairs and a TOML file."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedaccord.cli.console import refusing, warn

if TYPE_CHECKING:
    from fedaccord.config import RunConfig

NUMBER = re.compile(r"[+-]?(\d+\.|\d*\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)

RUN_TABLES = {"run", "used", "versions", "commit"}  # of a run directory's config.toml

Pairs = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Settings, e.g. lr=0.05.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="TOML file of settings, e.g. a run's config.toml or a Flower app's pyproject.toml; "
        "KEY=VALUE pairs override it.",
        metavar="FILE",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Settings of a paper's experiment (`fedaccord presets`); KEY=VALUE pairs override it.",
        metavar="NAME",
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.", readable=False)]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Continue even if a process on another machine wrote in the last two minutes.",
    ),
]


def read_settings(pairs: Sequence[str], begun: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run-config values of ``key=value`` pairs, which replace those of ``begun``.

    A value is read as TOML, otherwise as a number such as .1 or 1., otherwise as a string. Paths
    become absolute, from the current folder. Warns about repeated keys. Raises ValueError on a pair
    without ``=``.
    """
    from fedaccord import config

    values = {**(begun or {})}
    fields, seen = config.keys(), set()
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals:
            raise ValueError(f"expected key=value, e.g. lr=0.05, got {pair!r}")
        kind = type(fields[key].default) if key in fields else None
        if key in seen:
            warn(f"{key} is given twice: the later value, {text!r}, is used")
        seen.add(key)
        values[key] = _value(text, kind)
    make_absolute(values)
    return values


def checked(
    pairs: Sequence[str], file: Path | None, preset: str | None
) -> tuple["RunConfig", set[str]]:
    """The configuration of a command, with a warning for each key without effect, and the keys of
    the file or preset and of the pairs; a wrong one ends the command."""
    from fedaccord.config import RunConfig

    with refusing(ValueError, FileNotFoundError):
        begun = read_begun(file, preset)
        config = RunConfig.make(read_settings(pairs, begun))
        for line in unread(config, pairs, begun):
            warn(line)
        return config, {*begun} | _keys(pairs)


def _keys(pairs: Sequence[str]) -> set[str]:
    return {pair.partition("=")[0].strip() for pair in pairs}


def read_place(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings that may differ from those of a finished run: data folder, device and threads.

    Raises ValueError, in one line, for other keys.
    """
    from fedaccord.config import affecting, node_keys, task_keys

    values = read_settings(pairs)
    allowed = sorted(affecting("place", "speed") & (task_keys() | {*node_keys()}))
    if unknown := [key for key in values if key not in allowed]:
        raise ValueError(f"expected only {', '.join(allowed)} beside RUN_DIR, got {unknown[0]}")
    return values


def unread_typed(settings: "RunConfig", typed: Mapping[str, Any]) -> list[str]:
    """A line for each of the settings typed beside RUN_DIR without effect in this configuration."""
    lines = settings.unread(explicit=typed)
    return [line for line in lines if line.partition("=")[0] in typed]


def make_absolute(values: dict[str, Any]) -> None:
    """Replace the paths among run-config values by absolute ones, from the current folder."""
    from fedaccord import config

    for key in config.paths(values):
        if isinstance(values[key], str):
            values[key] = os.path.abspath(os.path.expanduser(values[key]))


def unread(settings: "RunConfig", pairs: Sequence[str], begun: Mapping[str, Any]) -> list[str]:
    """A line for each key without effect beside the other settings; pairs with a default count,
    unless they replace a value of ``begun``."""
    return settings.unread(explicit=_keys(pairs) - {*begun})


def _value(text: str, kind: type | None) -> Any:
    """kind: of the key's values; None: an unknown key."""
    is_string = kind is str
    if kind is bool and text.lower() in ("true", "false"):  # also as Python and YAML write them
        return text.lower() == "true"
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # not TOML, or an integer of thousands of digits
        return text if is_string or not NUMBER.fullmatch(text) else float(text)
    value = parsed["value"]
    allowed = str if is_string else (str, bool, int, float)
    return value if isinstance(value, allowed) and len(parsed) == 1 else text


def read_begun(file: Path | None, preset: str | None) -> dict[str, Any]:
    """Run-config values of a TOML file or a preset. A file may be a pipe, which is read only once.

    Raises ValueError on a file that cannot be read and on an unknown preset."""
    if file and preset is not None:
        raise ValueError("expected --config or --preset, got both; leave one out")
    if preset is not None:
        from fedaccord.experiments.presets import preset_file

        file = preset_file(preset)
    return _read_file(file) if file else {}


def _read_file(file: Path) -> dict[str, Any]:
    """Overrides, the settings of a run directory's config.toml, or those of a Flower app, with
    dotted keys."""
    from fedaccord.runs import flatten

    content = read_toml(file, "--config: ")
    if any(isinstance(content.get(table), Mapping) for table in ("sweep", "space")):
        raise ValueError(f"--config: {file} is a sweep file: start it with `fedaccord sweep`")
    if isinstance(table := content.get("run"), Mapping):
        if others := sorted(content.keys() - RUN_TABLES):
            raise ValueError(
                f"--config: {file}: expected all settings in [run], or no [run], got "
                f"{', '.join(others)} beside it; move them"
            )
        return flatten(table)
    app: Any = content
    for name in ("tool", "flwr", "app", "config"):  # of a pyproject.toml
        app = app.get(name) if isinstance(app, Mapping) else None
    return flatten(app if isinstance(app, Mapping) else content)


def read_run(run: Path) -> dict[str, Any]:
    """The settings of a run directory. Raises ValueError, in one line that names it."""
    from fedaccord import config
    from fedaccord.runs import flatten
    from fedaccord.strategies import METHODS

    content = read_toml(run / "config.toml", f"{run}: expected a run directory; ")
    if not isinstance(content.get("run"), Mapping):
        raise ValueError(f"{run}: expected a run directory with [run] in config.toml, found none")
    values = flatten(content["run"])
    known = config.keys()
    if values.get("algo") in METHODS and (unknown := [key for key in values if key not in known]):
        raise ValueError(
            f"{run}: its config.toml has the key {unknown[0]!r}, which this version does not know: "
            "use the version, or install the package, that wrote it"
        )
    make_absolute(values)
    return values


def read_toml(file: Path, option: str = "") -> dict[str, Any]:
    """Raises ValueError, in one line that begins with ``option``, if the file cannot be read."""
    try:
        return tomllib.loads(file.expanduser().read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{option}cannot read {file} ({error.strerror}); check the path") from None
    except ValueError as error:
        raise ValueError(f"{option}{file} is not valid TOML: {error}") from None
