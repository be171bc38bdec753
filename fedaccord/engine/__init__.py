"""Runs in one process: the same rounds as under Flower, with values instead of messages.

There is no ClientApp here: a fleet calls the clients' local rounds (`client/train.py`) directly, as
a ClientApp does with the content of a message.
"""

from fedaccord.engine.history import History, Recorder
from fedaccord.engine.run import quiet, run, run_with
from fedaccord.engine.simulate import simulate

__all__ = ["History", "Recorder", "quiet", "run", "run_with", "simulate"]
