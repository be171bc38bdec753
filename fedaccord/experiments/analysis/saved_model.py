"""The model of a run directory, ready to use."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedaccord.data.transforms import normalise
from fedaccord.runs import load_model
from fedaccord.task import models


class SavedModel(nn.Module):
    """The model of a run with the preparation of its inputs.

    Called with images (n, channels, height, width) uint8 as they are in their files, or with float
    features (n, features); returns the outputs (n, classes).
    """

    def __init__(self, module: nn.Module, card: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.shape: tuple[int, ...] = tuple(card["arguments"]["shape"])  # of one sample
        self.class_names: list[str] = card["class-names"]  # in the order of the outputs
        self.mean, self.std = tuple(card["mean"]), tuple(card["std"])  # per channel, of [0, 1]

    def forward(self, inputs: Tensor) -> Tensor:
        if tuple(inputs.shape[1:]) != self.shape:
            got = tuple(inputs.shape)
            raise ValueError(f"inputs: expected (n, {str(self.shape)[1:]} as in the run, got {got}")
        if self.mean and inputs.dtype != torch.uint8:
            raise ValueError(
                f"inputs: expected uint8 images with pixels from 0 to 255, got {inputs.dtype}"
            )
        dtype = next(self.module.parameters()).dtype
        outputs: Tensor = self.module(normalise(inputs, self, dtype))
        return outputs


def load(run: str | Path) -> SavedModel:
    """The model of a run directory, ready to use: in evaluation mode, on the CPU.

    It prepares its inputs itself, see `SavedModel`. Raises ValueError or OSError, in one line, if
    the directory has no model of a run or a damaged one.
    """
    path = Path(run).expanduser()
    if not (path / "model.safetensors").is_file():
        raise ValueError(f"{path}: expected a run directory with model.safetensors, found none")
    card, saved = read_card(path), load_model(path)
    arguments = card["arguments"] | {"shape": tuple(card["arguments"]["shape"])}
    module = models.build(card["architecture"], **arguments)
    module.to(next(iter(saved.values())).dtype)
    module.load_state_dict(saved)
    return SavedModel(module, card).eval()


def read_card(path: Path) -> dict[str, Any]:
    """How to build and feed the model in a run directory.

    Raises OSError if there is none, and ValueError if its file is damaged or incomplete.
    """
    file = path / "model.json"
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got a damaged file ({error})") from None
    keys = {"architecture", "arguments", "class-names", "mean", "std"}
    if not isinstance(card, dict) or not keys <= set(card):
        raise ValueError(f"{file}: expected {', '.join(sorted(keys))}, got others")
    return card
