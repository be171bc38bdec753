"""A score predicted from ten measurements, at five sites with patients of different ages.

The data are the 442 patients of scikit-learn's diabetes table; each method's mean absolute error on
every fifth patient is printed, in points of the score, which has a standard deviation of 77.

    python examples/diabetes/regression.py fedavg scaffold --rounds 20
"""

import argparse

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset

from fedaccord import simulate

SITES = 5


def samples() -> tuple[list[TensorDataset], TensorDataset, float]:
    """The training samples of each site, the test samples, and the score's standard deviation."""
    table = load_diabetes()
    x = torch.tensor(table.data, dtype=torch.float32)
    y = torch.tensor(table.target, dtype=torch.float32).unsqueeze(1)
    scale = float(y.std())
    x, y = x / x.std(0), (y - y.mean()) / scale
    by_age = x[:, 0].argsort()
    is_test = torch.arange(len(by_age)) % 5 == 0
    sites = [TensorDataset(x[rows], y[rows]) for rows in by_age[~is_test].chunk(SITES)]
    return sites, TensorDataset(x[by_age[is_test]], y[by_age[is_test]]), scale


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))


def errors(methods: list[str], rounds: int) -> dict[str, list[float]]:
    """The mean absolute error before the first round and after each one."""
    sites, test, scale = samples()
    errors: dict[str, list[float]] = {}
    for method in methods:
        metrics = simulate(
            method,
            clients=sites,
            test=test,
            model=network(),
            loss="mean-squared-error",
            metrics="mae",
            rounds=rounds,
            local_epochs=5,
            batch_size=16,
            lr=0.02,
        ).metrics
        errors[method] = [scale * value for value in metrics["test-mae"]]
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="*", default=["fedavg", "scaffold", "fedinit"])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for method, values in errors(arguments.methods, arguments.rounds).items():
        print(f"{method}: mean absolute error {values[0]:.1f} before, {values[-1]:.1f} after")
