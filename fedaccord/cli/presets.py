"""`fedaccord presets`: the settings of the papers' experiments, a TOML file each."""

import typer

from fedaccord.cli.console import Json, print_json


def list_presets(as_json: Json = False) -> None:
    """List the presets: settings of the papers' experiments; each file names its sources.

    `fedaccord run --preset NAME` runs one; KEY=VALUE pairs replace settings of it.
    """
    from fedaccord.experiments.presets import presets, setting

    found = presets()
    if as_json:
        print_json([{"preset": name, "setting": setting(path)} for name, path in found.items()])
        return
    width = max(map(len, found))
    for name, path in found.items():
        typer.echo(f"{name:{width}}  {setting(path)}")
