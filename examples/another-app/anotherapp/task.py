"""The app's own model, data and test: nothing here uses FedAccord."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

TEST = 297  # the last samples


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.norm = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(self.features(x)).flatten(1))


def digits() -> tuple[Tensor, Tensor]:
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(bunch.target)


class Samples(Dataset):
    """Samples as Flower Datasets gives them: a DataLoader makes batches of a dict."""

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self.images, self.targets = images, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"img": self.images[i], "label": self.targets[i]}


def load_data(
    partition: int, num_partitions: int, batch_size: int
) -> tuple[DataLoader, DataLoader]:
    """A client's samples: four fifths to train on, a fifth to evaluate on."""
    images, targets = digits()
    mine = slice(partition, -TEST, num_partitions)
    images, targets = images[mine], targets[mine]
    cut = len(targets) // 5
    return (
        DataLoader(Samples(images[cut:], targets[cut:]), batch_size, shuffle=True),
        DataLoader(Samples(images[:cut], targets[:cut]), batch_size),
    )


def load_test_data() -> DataLoader:
    images, targets = digits()
    return DataLoader(Samples(images[-TEST:], targets[-TEST:]), batch_size=100)


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    loss, right = 0.0, 0
    for batch in loader:
        targets = batch["label"]
        predictions = model(batch["img"])
        loss += nn.functional.cross_entropy(predictions, targets, reduction="sum").item()
        right += int((predictions.argmax(1) == targets).sum())
    samples = len(loader.dataset)
    return loss / samples, right / samples
