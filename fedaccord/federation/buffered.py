"""Settings that buffered rounds do not support."""

from fedaccord.core.checks import expect
from fedaccord.federation.method import Method


def check_buffered(method: Method) -> None:
    """Raise ValueError, in one line, if the method does not support replies to earlier models."""
    if why := method.why_synchronous:
        name = type(method).__name__
        raise ValueError(f"schedule: expected synchronous with {name}, got 'buffered': {why}")
    expect(method, "sampling", ["fixed"], "with schedule=buffered")
    expect(method, "buffers", ["refuse", "freeze", "local"], "with schedule=buffered")
    expect(method, "optimizer-state", ["reset", "keep"], "with schedule=buffered")
    if any(plugin.moves_anchor for plugin in method.active_plugins):
        raise ValueError("relaxed-init.center: expected server with schedule=buffered, got 'start'")
    if method.guarantee is not None:
        raise ValueError(
            "dp: expected off with schedule=buffered: its budget counts rounds of drawn cohorts"
        )
