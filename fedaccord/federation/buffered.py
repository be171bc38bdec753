"""Settings that buffered rounds do not support."""

from fedaccord.federation.method import Method


def check_buffered(method: Method) -> None:
    """Raise ValueError, in one line, if the method does not support replies to earlier models."""
    if why := method.why_synchronous:
        name = type(method).__name__
        raise ValueError(f"schedule: expected synchronous with {name}, got 'buffered': {why}")
    kept = {"sampling": ["fixed"], "buffers": ["refuse", "freeze", "local"]}
    found = {key: getattr(method, key) for key in kept} | {"optimizer-state": method.own_state()}
    kept["optimizer-state"] = ["reset", "keep"]
    for key, values in kept.items():
        if found[key] not in values:
            raise ValueError(
                f"{key}: expected {' or '.join(values)} with schedule=buffered, got {found[key]!r}"
            )
    if any(plugin.moves_anchor for plugin in method.active_plugins):
        raise ValueError("relaxed-init.center: expected server with schedule=buffered, got 'start'")
    if method.guarantee is not None:
        raise ValueError(
            "dp: expected off with schedule=buffered: its budget counts rounds of drawn cohorts"
        )
