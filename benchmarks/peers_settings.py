"""The settings and contestants of peers.py."""

from dataclasses import dataclass, field
from typing import Any

OURS = ("fedaccord", "fedaccord-workers")
THREADS = "-threads"  # ends the names of those with two PyTorch threads in their one process
PLAIN = {"lr-decay": 1.0, "weight-decay": 0.0, "clip-norm": 0.0, "lr": 0.1}  # FedAvg, bare


@dataclass(frozen=True)
class Setting:
    about: str
    keys: dict[str, Any]  # of ours; num-server-rounds is what a run has by default
    contestants: tuple[str, ...]
    targets: dict[str, float] = field(default_factory=dict)  # peer -> how many times as fast

    @property
    def rounds(self) -> int:
        return int(self.keys["num-server-rounds"])


def fl_simulator(algo: str) -> Setting:
    return Setting(
        about=(
            "LeNet of 797,962 parameters; 100 clients of 500 samples, Dirichlet-0.1 drawn with "
            "replacement, each active with probability 0.1; 5 epochs of batch 50 at rate 0.1, "
            "weight decay 0.001, gradients clipped at 10; random crops and mirrored images; all "
            "training and all test samples evaluated after every round. Seconds are of a round "
            "with its evaluations"
        ),
        keys={
            "algo": algo,
            "dataset": "cifar10",
            "model": "lenet",
            "num-clients": 100,
            "fraction-train": 0.1,
            "replacement": "cyclic",
            "dirichlet-alpha": 0.1,
            "eval-train": True,
            "num-server-rounds": 1,
        },
        contestants=(*OURS, "fl-simulator", f"fl-simulator{THREADS}"),
        targets={"fl-simulator": 2.0},  # 4 with bfloat16, on a CPU that gains by it
    )


SETTINGS = {
    "pfl": Setting(
        about=(
            "pfl-research's own benchmark: CNN of 1,626,442 parameters with dropout; 1,000 clients "
            "of 50 samples, IID, 50 active a round; one epoch of batch 10 at rate 0.1, no "
            "augmentation; the test samples evaluated every tenth round"
        ),
        keys={
            "algo": "fedavg",
            "dataset": "npz",
            "model": "cnn",
            "partition": "iid",
            "num-clients": 1000,
            "fraction-train": 0.05,
            "batch-size": 10,
            "local-epochs": 1,
            "eval-every": 10,
            "num-server-rounds": 10,
            **PLAIN,
        },
        contestants=(*OURS, "pfl", f"pfl{THREADS}"),
        targets={"pfl": 2.0},
    ),
    "flower": Setting(
        about=(
            "BlazeFL's benchmark: CNN of 62,006 parameters; 100 clients of 500 samples, IID, all "
            "active; 5 epochs of batch 50 at rate 0.1, no augmentation; the test samples evaluated "
            "every round"
        ),
        keys={
            "algo": "fedavg",
            "dataset": "npz",
            "model": "lenet5",
            "partition": "iid",
            "num-clients": 100,
            "fraction-train": 1.0,
            "local-epochs": 5,
            "num-server-rounds": 1,
            **PLAIN,
        },
        contestants=(*OURS, "flower", "flower-tensors", "blazefl"),
        targets={"flower": 3.0},
    ),
    **{f"fl-simulator-{a}": fl_simulator(a) for a in ("fedavg", "scaffold", "feddyn", "fedsmoo")},
}
CONTESTANTS = {
    "fedaccord": "this package, one process with one thread",
    "fedaccord-workers": "this package with two worker processes of one thread, `workers=2`; while "
    "they wait, the server evaluates two batches at a time",
    "pfl": "pfl-research's simulated backend, tensors in memory, one process with one thread; it "
    "iterates over a client's samples in the same order each time",
    f"pfl{THREADS}": "the same with two threads",
    "flower": "Flower's simulation with Flower's FedAvg, two actors of one CPU; the client of "
    "Flower's first PyTorch example, a DataLoader that transforms image by image; its first round "
    "includes the actors' start",
    "flower-tensors": "the same with a client that has prepared tensors in memory",
    "blazefl": "BlazeFL's FedAvg with its pool of two processes, images transformed one by one, as "
    "in its examples",
    "fl-simulator": "FL-Simulator, one process with one thread; a missing import of its LeNet is "
    "added from outside. It draws its initial parameters itself, and crops an image with "
    "probability 1/2, we always",
    f"fl-simulator{THREADS}": "the same with two threads",
}
