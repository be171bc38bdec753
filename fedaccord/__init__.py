"""FedAccord: federated optimisation under client drift, for Flower."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedaccord.client.train import evaluate_locally, train_locally
    from fedaccord.engine.run import run_with as run
    from fedaccord.engine.simulate import simulate
    from fedaccord.experiments.analysis.notebook import compare, report
    from fedaccord.experiments.analysis.saved_model import load

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "compare",
    "evaluate_locally",
    "load",
    "report",
    "run",
    "simulate",
    "train_locally",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a Flower app that uses one half does not load the other."""
    if name == "simulate":
        from fedaccord.engine import simulate

        return simulate
    if name == "run":
        from fedaccord.engine import run_with

        return run_with
    if name in ("compare", "report"):
        from fedaccord.experiments.analysis import notebook

        return getattr(notebook, name)
    if name == "load":
        from fedaccord.experiments.analysis.saved_model import load

        return load
    if name in ("evaluate_locally", "train_locally"):
        from fedaccord import strategies  # registers the methods for messages
        from fedaccord.client import train

        len(strategies.METHODS)  # also those of other packages
        return getattr(train, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
