"""The in-process engine: no daemon, no copies, the same ServerApp and ClientApp."""

from fedaccord.engine.simulate import History, Recorder, quiet, run, simulate

__all__ = ["History", "Recorder", "quiet", "run", "simulate"]
