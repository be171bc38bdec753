"""`fedaccord presets`: the settings of the papers' experiments, a TOML file each."""

import typer


def list_presets() -> None:
    """List the presets: the papers' settings, each with its sources in its comments.

    `fedaccord run --preset NAME` runs one; KEY=VALUE pairs change it.
    """
    from fedaccord.presets import presets, setting

    found = presets()
    width = max(map(len, found))
    for name, path in found.items():
        typer.echo(f"{name:{width}}  {setting(path)}")
