"""`fedaccord presets`: the settings of the papers' experiments, a TOML file each."""

from pathlib import Path

import typer

FOLDER = Path(__file__).resolve().parents[1] / "presets"


def list_presets() -> None:
    """List the presets: the papers' settings, each with its sources in its comments.

    `fedaccord run --preset NAME` runs one; KEY=VALUE pairs change it.
    """
    found = presets()
    width = max(map(len, found))
    for name, path in found.items():
        typer.echo(f"{name:{width}}  {setting(path)}")


def presets() -> dict[str, Path]:
    """The files of the presets by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"), key=lambda path: path.stem)}


def setting(path: Path) -> str:
    """Task and cohort of a preset in a few words: its first line, without the method."""
    return path.read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2]


def preset_file(name: str) -> Path:
    """Raises ValueError for an unknown name."""
    from fedaccord.core.options import did_you_mean

    found = presets()
    if name not in found:
        near = did_you_mean(name, found)
        raise ValueError(f"--preset: unknown preset {name!r}{near}; `fedaccord presets` lists them")
    return found[name]
