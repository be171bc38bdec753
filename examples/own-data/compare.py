"""Methods compared on your own tensors, with your own model and loss, in this process.

Replace `samples` and `network`; the rest stays. Here: 569 tumours of scikit-learn's breast cancer
table, at eight clinics that each see tumours of one size and so mostly one diagnosis.
"""

import argparse

import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import simulate

CLINICS = 8
TEST = 5  # every fifth sample is kept for the test

Samples = tuple[Tensor, Tensor]  # inputs (n, ...), targets (n, ...)


def samples() -> tuple[list[Samples], Samples]:
    """The training samples of each clinic, and the test samples of all."""
    table = load_breast_cancer()
    x = torch.tensor(table.data, dtype=torch.float32)
    y = torch.tensor(table.target, dtype=torch.float32).unsqueeze(1)
    size = x[:, 0].argsort()  # by mean radius
    x = (x - x.mean(0)) / x.std(0)
    train, test = size[torch.arange(len(size)) % TEST > 0], size[::TEST]
    return [(x[part], y[part]) for part in train.chunk(CLINICS)], (x[test], y[test])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(predictions, targets)


def compare(methods: list[str], rounds: int) -> pd.DataFrame:
    """Test loss by round, one column per method."""
    clients, test = samples()
    losses = {
        method: simulate(
            method,
            clients=clients,
            test=test,
            model=network(),
            loss=loss,
            rounds=rounds,
            participation=0.25,  # two of the eight clinics a round
            local_epochs=5,
            batch_size=16,
            lr=0.1,
        ).metrics.set_index("round")["test-loss"]
        for method in methods
    }
    return pd.DataFrame(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="*", default=["fedavg", "scaffold", "feddyn", "afedpd"])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    table = compare(arguments.methods, arguments.rounds)
    print(table.iloc[::10].round(4).to_string())
    print("mean of the last 10 rounds:", table.tail(10).mean().round(4).to_dict())
