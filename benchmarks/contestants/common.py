"""What the contestants of peers.py share; NumPy and PyTorch only, as each has its own environment.

A job is a JSON file: where the data, the partition and the initial parameters lie, the clients of
every round, and the settings of the local training.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import transforms

Job = dict[str, Any]


def read_job() -> Job:
    """Of the file that $PEERS_JOB names."""
    job: Job = json.loads(Path(os.environ["PEERS_JOB"]).read_text())
    torch.set_num_threads(job["threads"])
    return job


def report(round: int, accuracy: float) -> None:
    """Tell peers.py, which takes the time, that so many rounds are done and evaluated."""
    print(f"PEER {round} {accuracy:.6f}", flush=True)


def due(job: Job, round: int) -> bool:
    """Whether the model is evaluated after so many rounds."""
    return round % job["eval-every"] == 0 or round == len(job["cohorts"])


def arrays(job: Job) -> dict[str, np.ndarray]:
    """x_train, y_train, x_test, y_test: (n, 32, 32, 3) uint8 images and (n,) labels."""
    with np.load(job["data"]) as file:
        return {name: file[name] for name in file}


def prepared(job: Job, images: np.ndarray) -> Tensor:
    """(n, 3, 32, 32) float32, normalised."""
    mean, std = (torch.tensor(job[name])[:, None, None] for name in ("mean", "std"))
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std


def transform(job: Job) -> transforms.Compose:
    """The same, image by image."""
    return transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(job["mean"], job["std"])]
    )


def partition(job: Job) -> list[list[int]]:
    parts: list[list[int]] = json.loads(Path(job["partition"]).read_text())
    return parts


def network(job: Job) -> nn.Sequential:
    """The model in the usual order of layers, with the initial parameters of the job."""
    net = NETWORKS[job["model"]]()
    with np.load(job["initial"]) as file, torch.no_grad():
        for name, parameter in zip(file, net.parameters(), strict=True):
            parameter.copy_(torch.from_numpy(file[name]))
    return net


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def lenet5() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


NETWORKS = {"cnn": cnn, "lenet5": lenet5}
