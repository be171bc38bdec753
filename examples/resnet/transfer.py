"""ResNet-18 with BatchNorm, from a frozen stem, on a folder of images, with FedInit.

The images are scikit-learn's digits as PNG files, digits/{train,test}/<class>/*.png, dealt to ten
clients by a Dirichlet partition. The stem (the first convolution and the first group of blocks)
is frozen: it is never sent. BatchNorm's running statistics are averaged beside the model.

    python examples/resnet/transfer.py fedinit fedavg --rounds 8
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torchvision.models import resnet18

from fedaccord import simulate

STEM = ("conv1", "bn1", "layer1")


def write_images(folder: Path) -> None:
    """1,797 digits of 32x32 pixels; every fifth is a test image."""
    for k, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        split = "test" if k % 5 == 0 else "train"
        path = folder / split / str(label) / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels.reshape(8, 8) * 15.9).astype(np.uint8))
        image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR).save(path)


def network() -> nn.Module:
    """ResNet-18 with a frozen stem."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    for name in STEM:
        model.get_submodule(name).requires_grad_(False)
    return model


def accuracies(methods: list[str], folder: Path, rounds: int) -> dict[str, list[float]]:
    """The test accuracy before the first round and after each one."""
    accuracies: dict[str, list[float]] = {}
    for method in methods:
        metrics = simulate(
            method,
            dataset="image-folder",
            data_dir=str(folder),
            image_size=32,
            model="transfer:network",  # a function of this file, as a run config names it
            buffers="mean",
            num_clients=10,
            dirichlet_alpha=0.3,
            participation=0.5,
            rounds=rounds,
            local_epochs=2,
            batch_size=32,
            lr=0.05,
        ).metrics
        accuracies[method] = metrics["test-accuracy"].tolist()
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["fedinit", "fedavg"])
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_images(Path(name))
        for method, values in accuracies(arguments.methods, Path(name), arguments.rounds).items():
            print(method, " ".join(f"{100 * value:.1f}%" for value in values))
