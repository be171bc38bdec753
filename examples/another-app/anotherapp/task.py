"""The app's own model and data: nothing here knows of FedAccord."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST = 297  # the last samples


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.norm = nn.GroupNorm(2, 8)
        self.classifier = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(self.features(x)).flatten(1))


def digits() -> tuple[Tensor, Tensor]:
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(bunch.target)


def train_loader(partition: int, num_partitions: int) -> DataLoader:
    images, targets = digits()
    mine = slice(partition, -TEST, num_partitions)
    return DataLoader(TensorDataset(images[mine], targets[mine]), batch_size=16, shuffle=True)


def accuracy(model: nn.Module) -> float:
    images, targets = digits()
    with torch.no_grad():
        right = model(images[-TEST:]).argmax(1) == targets[-TEST:]
    return right.float().mean().item()
