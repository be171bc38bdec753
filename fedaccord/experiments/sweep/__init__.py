"""Sweeps: many runs, chosen by a file, that resume. docs/sweeps.md describes both.

space.py: the choices; configuration.py: one of them; plan.py: the file; estimate.py: its hours;
search.py: which configurations, for how many rounds; trial.py: one run; workers.py, on_ray.py:
parallel runs; records.py: what a folder's sweep began with; table.py, sweep.py: the result.
"""

from fedaccord.experiments.sweep.plan import Plan
from fedaccord.experiments.sweep.sweep import Step, Sweep

__all__ = ["Plan", "Step", "Sweep"]
