"""The model of a run directory, ready to use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedaccord.config import RunConfig
from fedaccord.core.client_half import has_personal, state_like
from fedaccord.core.vectors import fill
from fedaccord.data.transforms import normalise
from fedaccord.runs import load_model, logbook
from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.storage.files import read_json
from fedaccord.task import models
from fedaccord.task.flat_model import digest, flat_model
from fedaccord.task.tensors import cast


class SavedModel(nn.Module):
    """The model of a run with the preparation of its inputs.

    Called with images (n, channels, height, width) uint8 as in their files, float features
    (n, features) or token ids (n, max-length); returns the outputs (n, classes).
    """

    def __init__(self, module: nn.Module, card: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.shape: tuple[int, ...] = tuple(card["arguments"]["shape"])  # of one sample
        self.class_names: list[str] = card["class-names"]  # in the order of the outputs
        self.mean, self.std = tuple(card["mean"]), tuple(card["std"])  # per channel, of [0, 1]

    def forward(self, inputs: Tensor) -> Tensor:
        if not isinstance(inputs, Tensor):
            got = type(inputs).__name__
            raise ValueError(f"inputs: expected a tensor (token ids, if texts), got a {got}")
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


def load(run: str | Path, client: int | None = None) -> SavedModel:
    """The model of a run directory, ready to use: in evaluation mode, on the CPU.

    It prepares its inputs itself; see `SavedModel`. client: the number of one whose own model to
    return, that of `personal-accuracy`; None: the model that the run returns. Own models are in the
    last checkpoint of a run of this machine, not in those of Flower's simulation and of devices.
    Raises ValueError or OSError, in one line, if the directory has no model of a run, or of this
    client, or a damaged one.
    """
    path = Path(run).expanduser()
    if not (path / "model.safetensors").is_file():
        raise ValueError(f"{path}: expected a run directory with model.safetensors, found none")
    card, saved = read_card(path), load_model(path)
    arguments = card["arguments"] | {"shape": tuple(card["arguments"]["shape"])}
    module = models.build(card["architecture"], **arguments, seed=card.get("seed", 0))
    cast(module, None, next(x.dtype for x in saved.values() if x.is_floating_point()))
    _fill(module, saved, card)
    if client is not None:
        _fill_own(module, path, client)
    return SavedModel(module, card).eval()


def _fill(module: nn.Module, saved: Mapping[str, Tensor], card: Mapping[str, Any]) -> None:
    """Load the saved tensors into the module; frozen tensors, and those that stayed at clients,
    keep their built values. Raises ValueError, which names the first tensor, for another module."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    for name, tensor in saved.items():
        if shapes.get(name) != tensor.shape:
            raise ValueError(
                f"model: expected {name!r} of shape {tuple(tensor.shape)} in "
                f"{card['architecture']}, got {tuple(shapes.get(name, ())) or 'none'}"
            )
    built = dict(module.named_parameters()) | dict(module.named_buffers())  # tied ones once
    names = built.keys() & shapes.keys() - saved.keys() - {*card.get("local", [])}
    check_frozen({name: digest(built[name]) for name in names}, card)
    module.load_state_dict(saved, strict=False)


def _fill_own(module: nn.Module, path: Path, client: int) -> None:
    """Replace what a client has of its own: all parameters, or its local parts. Raises ValueError,
    in one line, for a run or a client without."""
    checkpoint = Checkpoints(path / logbook.FOLDER).load(client=client)
    method = RunConfig.make(checkpoint.facts["settings"]).strategy
    half = method.client_half()
    if not has_personal(half):
        raise ValueError(
            f"client: expected a run whose clients have models of their own, {path} has none: "
            f"{type(method).__name__} without local-parameters"
        )
    if client not in checkpoint.clients:
        raise ValueError(
            f"client: expected one whose state is in the checkpoint of {path}, got {client}, which "
            "has not trained, or keeps its state itself, as devices do"
        )
    like = state_like(half, tuple(map(tuple, checkpoint.facts["shapes"])))
    state = fill(like, checkpoint.clients[client][1])
    model, w = flat_model(module, method.model_settings, "cpu"), half.personal(state)
    if w is not None:
        model.w.copy_(w)
    if half.keeps_local:
        model.write_local(state.local)
    module.zero_grad()


def check_frozen(built: Mapping[str, str], card: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, if frozen tensors are not those of the run; built: digests."""
    for name in built:
        if built[name] != card.get("frozen", {}).get(name):
            raise ValueError(
                f"model: expected {name!r} with the frozen values of the run in "
                f"{card['architecture']}, got others: build it with the same version of PyTorch, "
                "or from the same file"
            )


def read_card(path: Path) -> dict[str, Any]:
    """How to build and feed the model in a run directory.

    Raises OSError if there is none, and ValueError if its file is damaged or incomplete.
    """
    file = path / "model.json"
    try:
        card = read_json(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    keys = {"architecture", "arguments", "class-names", "mean", "std"}
    if not isinstance(card, dict) or not keys <= set(card):
        raise ValueError(f"{file}: expected {', '.join(sorted(keys))}, got others")
    return card
