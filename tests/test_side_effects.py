"""A call leaves the settings of the process as they were."""

import subprocess
import sys

import pytest

SETUP = """
import gc, logging, os, pickle, random, signal, sys, threading, warnings
import flwr.clientapp, flwr.serverapp, numpy, pandas, torch
import torch._dynamo  # imported by the first backward pass, with filters of its own
import fedaccord, fedaccord.strategies, fedaccord.engine

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

def seen():
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "environment": dict(os.environ),
        "warning filters": [*warnings.filters],
        "tracebacklimit": getattr(sys, "tracebacklimit", None),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "tf32": [flag.allow_tf32 for flag in flags],
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "logging": [(logging.getLogger(n).level, len(logging.getLogger(n).handlers))
                    for n in ("", "flwr", "fedaccord", "torch")],
        "generators": (random.getstate(), pickle.dumps(numpy.random.get_state()),
                       torch.get_rng_state().tolist()),
        "numpy": numpy.geterr(),
        "directory": os.getcwd(),
    }

MODEL = torch.nn.Linear(4, 2)

def samples(n):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(12, 4, generator=generator), torch.arange(12) % 2
"""
SIMULATE = """
for more in OPTIONS:
    fedaccord.simulate("scaffold", clients=[samples(0), samples(1)], test=samples(2),
                       model=MODEL, rounds=2, local_steps=2, threads=1, **more)
"""
LOADED = """
from flwr.clientapp import ClientApp
from tests.client import test_train
from tests.grid import InProcessGrid
InProcessGrid(ClientApp(), 1).__enter__()  # messages have a sender
MESSAGE, DATA, NET = test_train.message(), test_train.batches(4), test_train.linear()
"""
TRAIN = """
w, metrics = test_train.train(MESSAGE, DATA, model=NET)
assert metrics["num-examples"] > 0
assert w.isfinite().all()
"""


CHANGES = "torch.set_num_threads(3); warnings.simplefilter('ignore'); os.environ['X'] = '1'"


def changed(*codes: str, more: str = "") -> list[list[str]]:
    """The names of the settings that each of ``codes`` changed, one after another in a new process.
    more: code that runs first."""
    lines = [SETUP, more]
    for code in codes:
        lines += ["before = seen()", code, "after = seen()"]
        lines.append("print('changed:', *(name for name in before if before[name] != after[name]))")
    command = [sys.executable, "-c", "\n".join(lines)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    entries = [line for line in result.stdout.splitlines() if line.startswith("changed:")]
    assert len(entries) == len(codes)
    return [line.split()[1:] for line in entries]


def test_simulate_and_train_locally_leave_the_process_as_it_was() -> None:
    simulated, trained, control = changed(
        SIMULATE.replace("OPTIONS", '{}, {"vectorize": "on"}, {"precision": "bfloat16"}'),
        TRAIN,
        CHANGES,
        more=LOADED,
    )
    assert simulated == trained == []
    assert control == ["environment", "warning", "filters", "threads"]  # else nothing would be seen


@pytest.mark.flower  # it starts Ray
def test_simulate_with_workers_leaves_the_process_as_it_was() -> None:
    pytest.importorskip("ray")
    imported = "import ray, ray.util, sklearn"  # which sets a variable
    (names,) = changed(SIMULATE.replace("OPTIONS", '{"workers": 1},'), more=imported)
    assert names in ([], ["generators"])  # Ray draws ports by Python's
