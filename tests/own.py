"""Functions as a user writes them, named in settings as ``tests.own:tiny``."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

# --- models ---------------------------------------------------------------------------------------


def tiny(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def pocket(classes: int) -> nn.Module:
    """For images of 8x8 grey pixels; its layers have the names of a ResNet's."""
    block = nn.Sequential(
        OrderedDict(
            bn1=nn.BatchNorm2d(2), downsample=nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        )
    )
    layers = {"conv1": nn.Conv2d(1, 2, 3, stride=3), "bn1": nn.BatchNorm2d(2), "layer1": block}
    return nn.Sequential(OrderedDict(layers, flatten=nn.Flatten(), fc=nn.Linear(8, classes)))


class Still(nn.Dropout):
    """As docs/model-roles.md keeps dropout off."""

    def train(self, mode: bool = True) -> "Still":
        return super().train(False)


def still_dropout(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(Still(0.5), *tiny(shape, classes))


def no_dropout(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.0), *tiny(shape, classes))


def bag_of_tokens(vocabulary: int, classes: int) -> nn.Module:
    return nn.EmbeddingBag(vocabulary, classes, padding_idx=0)


def bag_of_shifted_integers(classes: int) -> nn.Module:
    """It reads integers as they are, and no vocabulary."""

    class Shifted(nn.EmbeddingBag):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + 1)

    return Shifted(10, classes)


def narrow(classes: int) -> nn.Module:
    return nn.Linear(7, classes)


def few_outputs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def no_module() -> str:
    return "a module"


# --- losses and metrics ---------------------------------------------------------------------------


def doubled(predictions: Tensor, targets: Tensor) -> Tensor:
    return 2 * F.cross_entropy(predictions, targets)


def of_known(predictions: Tensor, targets: Tensor) -> Tensor:
    """Of the targets that are not NaN."""
    mask = ~targets.isnan()
    return F.mse_loss(predictions[mask], targets[mask])


def one_logit() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))


def is_large(predictions: Tensor, targets: Tensor) -> Tensor:
    """A loss of one output: whether the digit is 5 or more."""
    return F.binary_cross_entropy_with_logits(predictions[:, 0], (targets > 4).to(predictions))


def is_found(predictions: Tensor, targets: Tensor) -> Tensor:
    return ((predictions[:, 0] > 0) == (targets > 4)).float()


def brier(predictions: Tensor, targets: Tensor) -> Tensor:
    p = predictions.softmax(1)
    return (p - F.one_hot(targets, p.shape[1])).square().sum(1)


def not_a_number(predictions: Tensor, targets: Tensor) -> Tensor:
    return float("nan") * predictions[:, 0]


def is_right(predictions: Tensor, targets: Tensor) -> Tensor:
    return predictions.argmax(1) == targets


def one_number(predictions: Tensor, targets: Tensor) -> Tensor:
    return predictions.mean()


def no_tensor(predictions: Tensor, targets: Tensor) -> float:
    return 0.5


def broken(predictions: Tensor, targets: Tensor) -> Tensor:
    raise KeyError("no\nsuch thing")


def in_a_row(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(predictions, targets)[None]


def huber(predictions: Tensor, targets: Tensor) -> Tensor:
    error = (predictions - targets).abs()
    return torch.where(error < 1, error.square() / 2, error - 0.5).mean()


def in_place(predictions: Tensor, targets: Tensor) -> Tensor:
    return predictions.sub_(F.one_hot(targets, predictions.shape[1])).square().mean(1)


def without_gradient(predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions.argmax(1) != targets).float().mean()


def detached(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(predictions.detach(), targets)


def gaussian(predictions: Tensor, targets: Tensor) -> Tensor:
    """Of means and log variances, two outputs for each target."""
    mean, log_variance = predictions.chunk(2, 1)
    return ((mean - targets).square() * (-log_variance).exp() + log_variance).mean()


def two_outputs() -> nn.Module:
    return nn.Linear(3, 2)


def _hidden(predictions: Tensor, targets: Tensor) -> Tensor:
    return is_right(predictions, targets)


def f1(predictions: Tensor, targets: Tensor) -> Tensor:
    return is_right(predictions, targets)


# --- data sets ------------------------------------------------------------------------------------


def numbers(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def save(path: Path, count: int) -> Path:
    """Write the samples of a site as a .npz file, of which four are for testing too."""
    x, y = numbers(count, seed=count)
    np.savez(path, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    return path


def arrays() -> Any:
    return numbers(40, 0), numbers(10, 1)


def torch_datasets() -> Any:
    return [TensorDataset(*map(torch.from_numpy, part)) for part in arrays()]


def tables() -> Any:
    """With names of columns, and an index that does not begin at 0."""
    return [
        (pd.DataFrame(x, columns=[*"abc"]), pd.Series(y, index=range(5, 5 + len(y))))
        for x, y in arrays()
    ]


class Unreadable(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise OSError(f"file {index} is damaged")


def unreadable() -> Any:
    return [Unreadable(*map(torch.from_numpy, part)) for part in arrays()]


class Noisy(TensorDataset):
    """Its inputs have a random transform."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(3), y


def noisy() -> Any:
    return [Noisy(*map(torch.from_numpy, part)) for part in arrays()]


def augmented() -> Any:
    """With numbers of the generator and of the default ones."""

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.rand(x.shape, generator=generator) + torch.rand(x.shape) + random.random()
        return x + 10 + noise.to(x.dtype)

    train, test = arrays()
    return {"train": train, "test": test, "augment": augment}


def halved() -> Any:
    return augmented() | {"augment": lambda x, generator: x[:, :2]}


def augmented_by_name() -> Any:
    return augmented() | {"augment": "crop"}


def from_one() -> Any:
    return [(x, y + 1) for x, y in arrays()]


def identities() -> Any:
    """One label of each split is a hash."""
    return [(x, np.where(np.arange(len(y)) == 1, 2**31 + 1, y)) for x, y in arrays()]


def mapping() -> Any:
    train, test = arrays()
    return {"train": train, "test": test, "classes": ["below", "above", "neither"]}


def one_target() -> Any:
    return [(x, x @ np.ones((3, 1), np.float32)) for x, _ in arrays()]


def targets() -> Any:
    return [(x, x @ np.ones((3, 2), np.float32)) for x, _ in arrays()]


def from_folder(data_dir: str) -> Any:
    """Three samples for each letter of the path."""
    return numbers(3 * len(data_dir), 2), numbers(10, 1)


def images() -> Any:
    x = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    return (x, [0, 1]), (x, [1, 0])


def grey_tensors() -> Any:
    x = torch.arange(2 * 4 * 5, dtype=torch.uint8).view(2, 1, 4, 5)
    return (x, torch.tensor([0, 1])), (x, torch.tensor([1, 0]))


class Rows:
    """The part of the interface of a Hugging Face dataset that is used."""

    def __init__(self, names: Sequence[str] = (), **columns: Any) -> None:
        self.columns = columns
        self.column_names = [*columns]
        self.features = dict.fromkeys(columns, object())
        if names:
            self.features["label"] = type("ClassLabel", (), {"names": [*names]})()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}


def columns() -> Any:
    """Texts, with names of their classes."""
    names = ("negative", "positive")
    return {
        "train": Rows(text=["bad", "good", "so so"], label=[0, 1, 0], names=names),
        "test": Rows(text=["fine"], label=[1], names=names),
    }


class Partitioner:
    """The used interface of a Flower Datasets partitioner: pieces of 5, 10 and 25 samples."""

    num_partitions = 3

    def load_partition(self, partition_id: int) -> Rows:
        x, y = numbers(40, 0)
        rows = [slice(0, 5), slice(5, 15), slice(15, 40)][partition_id]
        return Rows(features=[*x[rows]], label=[*y[rows]], names=("below", "above"))


def partitioned() -> Any:
    return Partitioner(), numbers(10, 1)


def with_clients(clients: Any) -> Any:
    return {"train": numbers(4, 0), "test": numbers(4, 1), "client": clients}


def clients_of_a_table() -> Any:
    return with_clients(pd.Series(["b", "a", "b", "c"], index=range(5, 9)))


def clients_of_some() -> Any:
    return with_clients([0, 1, 1])


def clients_by_floats() -> Any:
    return with_clients(np.array([0.5, 1, 1, 2]))


def clients_twice() -> Any:
    return with_clients([0, 0, 1, 1]) | {"train": Partitioner()}


def sequences() -> Any:
    """The next token of each."""
    tokens = torch.randint(1, 9, (12, 6), generator=torch.Generator().manual_seed(0))
    pair = tokens[:, :-1], tokens[:, 1:]
    return {"train": pair, "test": pair, "vocabulary": 9, "classes": 9}


def next_token(vocabulary: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary))


def tokens() -> Any:
    """Token ids without the size of the vocabulary."""
    pair = sequences()["train"][0], torch.arange(12) % 3
    return pair, pair


def tokens_of_16_bits() -> Any:
    return [(x.short(), y) for x, y in tokens()]


def tokens_of_unsigned_16_bits() -> Any:
    return [(x.numpy().astype(np.uint16), y) for x, y in tokens()]


def tokens_below_zero() -> Any:
    return [(x.where(x > 1, -1), y) for x, y in tokens()]


def negative_token() -> Any:
    train, test = tokens_below_zero()
    return {"train": train, "test": test, "vocabulary": 9}


def unknown_token() -> Any:
    x, y = torch.tensor([[1, 2], [3, 0]]), torch.tensor([0, 1])
    return {"train": (x, y), "test": (x + 5, y), "vocabulary": 4}


def drawn() -> Any:
    """Samples of random numbers without a seed."""
    x = np.random.randn(8, 3) + random.random() + torch.rand(3).numpy()
    return (x, np.arange(8) % 2), (x, np.arange(8) % 2)


def half_precision() -> Any:
    x = torch.arange(8, dtype=torch.bfloat16).reshape(4, 2)
    return (x, torch.tensor([0, 1, 0, 1])), (x[:2], torch.tensor([0, 1]))


def no_test() -> Any:
    return {"train": numbers(40, 0)}


def test_of_nothing() -> Any:
    return numbers(40, 0), None


def empty_test() -> Any:
    return numbers(40, 0), numbers(0, 1)


def texts_without_test() -> Any:
    return {"train": columns()["train"], "test": Rows(text=[], label=[])}


# --- those that are none --------------------------------------------------------------------------


def nothing() -> None:
    pass


def uneven() -> Any:
    x, y = numbers(4, 0)
    return (x, y[:3]), (x, y)


def other_inputs() -> Any:
    x, y = numbers(4, 0)
    return (x, y), (x[:, :2], y)


def broken_inputs() -> Any:
    x, y = numbers(4, 0)
    return (x * np.nan, y), (x, y)


def raw_table() -> Any:
    x = np.zeros((4, 6), np.uint8)
    return (x, np.array([0, 1, 0, 1])), (x[:2], np.array([0, 1]))


def names_of_classes() -> Any:
    x, _ = numbers(4, 0)
    return ((x, np.array(["a", "b", "a", "b"])),) * 2


def steps_below_zero() -> Any:
    x, _ = numbers(4, 0)
    return ((x, torch.tensor([[0, 1], [1, -100], [1, -1], [0, 1]])),) * 2


def below_zero() -> Any:
    x, y = numbers(4, 0)
    return ((x, y - 1),) * 2


def one_class() -> Any:
    x, _ = numbers(4, 0)
    return ((x, [0] * 4),) * 2


def misspelt() -> Any:
    return {"train": numbers(4, 0), "clases": 3}


def unseen_class() -> Any:
    x, _ = numbers(4, 0)
    return (x, [0, 1, 1, 0]), (x, [0, 1, 3, 0])


def many_columns() -> Any:
    return (Rows(a=[1.0], b=[2.0], label=[0]),) * 2


def ragged() -> Any:
    return (([[1.0], [1.0, 2.0]], [0, 1]),) * 2


# --- tokenizers -----------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return [ord(letter) - ord("a") + 1 for letter in text if "a" <= letter <= "z"]


letters.vocab_size = 27  # type: ignore[attr-defined]


class Words:
    vocab_size = 100

    def encode(self, text: str) -> Tensor:
        return torch.tensor([len(word) for word in text.split()])


words = Words()


def no_size(text: str) -> list[int]:
    return [1]


def zeros(text: str) -> list[int]:
    return [0]


zeros.vocab_size = 3  # type: ignore[attr-defined]
