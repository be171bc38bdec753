"""The settings of the papers' experiments, a TOML file each, with sources in its comments."""

import tomllib
from pathlib import Path
from typing import Any


def presets() -> dict[str, Path]:
    """The files of the presets by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"), key=_name)}


def preset(name: str) -> dict[str, Any]:
    """The run-config values of a preset. Raises ValueError for an unknown name."""
    from fedaccord.runs import flatten

    return flatten(tomllib.loads(preset_file(name).read_text(encoding="utf-8")))


def preset_file(name: str) -> Path:
    """Raises ValueError for an unknown name."""
    from fedaccord.core.options import did_you_mean

    files = presets()
    if name not in files:
        near = did_you_mean(name, files)
        raise ValueError(f"--preset: unknown preset {name!r}{near}; `fedaccord presets` lists them")
    return files[name]


def setting(path: Path) -> str:
    """Task and cohort of a preset in a few words: its first line, without the method."""
    return path.read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2]


def _name(path: Path) -> str:
    return path.stem
