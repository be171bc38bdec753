"""`fedaccord presets`: the settings of the papers' experiments, a TOML file each."""

import typer

from fedaccord.cli.console import Json, print_json


def presets(as_json: Json = False) -> None:
    """List the presets: settings of the papers' experiments; each file names its sources.

    `fedaccord run --preset NAME` runs one; KEY=VALUE pairs replace settings of it.
    """
    from fedaccord.experiments import presets

    settings = {name: presets.setting(path) for name, path in presets.presets().items()}
    if as_json:
        print_json([{"preset": name, "setting": words} for name, words in settings.items()])
        return
    width = max(map(len, settings))
    for name, words in settings.items():
        typer.echo(f"{name:{width}}  {words}")
