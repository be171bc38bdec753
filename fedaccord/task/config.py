"""The settings of the learning task, as run-config keys."""

from dataclasses import dataclass

from fedaccord.core import named
from fedaccord.core.metrics import METRICS
from fedaccord.core.options import option
from fedaccord.data.datasets import DATASETS, MAX_IMAGE_SIZE
from fedaccord.data.function import FUNCTIONS
from fedaccord.data.kind import ReadOptions
from fedaccord.data.partition import MAX_ALPHA, REPLACEMENTS, SCHEMES
from fedaccord.data.text import BYTE_TOKENIZER
from fedaccord.task import losses, models
from fedaccord.task.models import NAMES

AUGMENTED = [name for name, kind in DATASETS.items() if kind.augment]
MAX_LENGTH = 65_536


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Data set, partition, model and device."""

    dataset: str = option("digits", "the data set", choices=[*DATASETS], also=FUNCTIONS, node=True)
    data_dir: str = option(
        "",
        "absolute folder (npz, text: or file) with the data; cifar10: torchvision's files, or "
        "images in train/<class>/* and test/<class>/*",
        only={
            "dataset": [*(n for n, kind in DATASETS.items() if kind.origin != "package"), FUNCTIONS]
        },
        affects="place",
        path=True,
        node=True,
    )
    download: bool = option(
        False,
        "let torchvision fetch a missing data set",
        only={"dataset": [name for name, kind in DATASETS.items() if kind.origin == "download"]},
        affects="place",
    )
    image_size: int = option(
        0,
        "image-folder: resize and crop to this side; 0: unchanged",
        low=0,
        high=MAX_IMAGE_SIZE,
        node=True,
    )
    tokenizer: str = option(
        "bytes",
        "text: the tokenizer, a function of a text, or an object with `encode`",
        choices=[BYTE_TOKENIZER],
        also=named.Functions(),
        only={"dataset": ["text", FUNCTIONS]},
    )
    max_length: int = option(
        256,
        "text: tokens of a sample",
        low=1,
        high=MAX_LENGTH,
        only={"dataset": ["text", FUNCTIONS]},
    )
    labels: str = option(
        "",
        "text, image-folder: names of the classes in their order, with commas, for sites that may "
        "lack some; empty: those in the data",
        only={"dataset": ["text", "image-folder"]},
    )
    augment: bool = option(
        True,
        f"{', '.join(AUGMENTED)}: local steps shift each image by up to 4 pixels, and mirror "
        "it with probability 1/2",
        only={"dataset": AUGMENTED},
    )
    partition: str = option(
        "dirichlet",
        "partition of the training samples; natural: by the clients in the data",
        choices=SCHEMES,
    )
    dirichlet_alpha: float = option(
        0.3,
        "dirichlet: concentration of class priors; small: skewed",
        above=0,
        high=MAX_ALPHA,
        only={"partition": ["dirichlet"]},
    )
    replacement: str = option(
        "none",
        "how samples of a class are drawn: none (strict partition), cyclic, iid",
        choices=REPLACEMENTS,
        only={"partition": ["dirichlet", "pathological"], "samples_per_client": [0]},
    )
    classes_per_client: int = option(
        2, "pathological: classes a client holds", low=1, only={"partition": ["pathological"]}
    )
    samples_per_client: int = option(
        0,
        "samples that each client draws for itself, with replacement: clients share samples, and "
        "there may be more clients than samples; 0: all samples are divided once",
        low=0,
        only={"partition": ["iid", "dirichlet", "pathological"]},
    )
    partition_file: str = option(
        "",
        'file: absolute path of JSON, a list of index lists or {"0": [indices], "1": ...}',
        only={"partition": ["file"]},
        path=True,
    )
    validation: float = option(
        0.0,
        "share of the training samples held out of all clients' data, on which the model is "
        "evaluated instead of the test samples",
        low=0,
        high=0.9,
        managed=True,
    )
    model: str = option("mlp", "the model", choices=NAMES, also=models.FUNCTIONS)
    stem: str = option(
        "imagenet",
        "resnet18: first layers as for ImageNet or CIFAR",
        choices=("imagenet", "cifar"),
        only={"model": ["resnet18"]},
    )
    loss: str = option(
        losses.AUTO,
        "the loss, a mean over a batch, of (predictions, targets); auto: cross-entropy of classes, "
        "mean squared error of numbers",
        choices=(losses.AUTO, *losses.LOSSES),
        also=named.Functions(),
    )
    metrics: str = option(
        "",
        f"metrics besides the loss, with commas: {', '.join(METRICS)}, or {named.FORM}, a number "
        "for each sample from (predictions, targets); empty: accuracy of classes, mae of numbers",
        affects="records",
        also=named.Functions(),
    )
    device: str = option(
        "auto", "auto (cuda if available), cpu, cuda, cuda:1, mps", affects="place", node=True
    )
    seed: int = 0  # the run's, of initial model and partition

    @property
    def reading(self) -> ReadOptions:
        """How the data set's files are read."""
        return ReadOptions(**{name: getattr(self, name) for name in ReadOptions._fields})
