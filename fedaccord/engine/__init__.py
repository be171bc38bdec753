"""The in-process engine: no daemon, no copies, the same ServerApp and ClientApp."""

from fedaccord.engine.history import History, Recorder
from fedaccord.engine.simulate import quiet, run, run_with, simulate

__all__ = ["History", "Recorder", "quiet", "run", "run_with", "simulate"]
