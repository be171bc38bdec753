"""FL-Simulator's train.py in its checkout, the current folder, with the name that it lacks.

Its LeNet calls `F.relu`, but its models.py does not import `torch.nn.functional` as F.
"""

import builtins
import runpy
import sys

from common import read_job
from torch.nn import functional

if __name__ == "__main__":
    read_job()  # which sets the threads
    builtins.F = functional  # type: ignore[attr-defined]
    sys.path.insert(0, ".")
    runpy.run_path("train.py", run_name="__main__")
