"""The roles of the arrays of a whole state_dict, for a server without the module."""

from collections.abc import Mapping

from flwr.app import ArrayRecord
from torch import Tensor

from fedaccord.core.options import listed
from fedaccord.core.request import ModelLayout, ModelSettings
from fedaccord.wire.tensor_array import to_tensor

OF_NORM_LAYERS = ("running_mean", "running_var", "num_batches_tracked")  # of PyTorch's norm layers


def layout_of(arrays: ArrayRecord, settings: ModelSettings) -> ModelLayout:
    """Buffers are integers, and arrays with a name of `OF_NORM_LAYERS`; all others are parameters.

    Before round 1 it is compared with the clients' models, which have the exact roles.
    Raises ValueError, in one line, if there are no parameters, or buffers that are refused.
    """
    tensors = {name: to_tensor(array) for name, array in arrays.items()}
    buffers = {name: x for name, x in tensors.items() if _is_buffer(name, x)}
    parameters = {name: x for name, x in tensors.items() if name not in buffers}
    frozen = settings.frozen_names(parameters)
    parameters = {name: x for name, x in parameters.items() if name not in frozen}
    if not parameters:
        kinds = [f"{name}: {x.dtype}" for name, x in tensors.items()]
        raise ValueError(
            "initial_arrays: expected the floating-point parameters of a model, got "
            f"{listed(kinds, 3)}"
        )
    if buffers and settings.buffers == "refuse":
        raise ValueError(
            f"initial_arrays: expected a model without buffers, got {listed(buffers, 1)}: choose "
            "buffers='mean' (average them over the clients), 'freeze' (keep their values) or "
            "'local' (each client its own) as an argument of the strategy, or replace BatchNorm by "
            "GroupNorm"
        )
    is_local = settings.local_names(parameters)
    return ModelLayout(
        shared=_shapes({name: x for name, x in parameters.items() if name not in is_local}),
        buffers=_shapes(buffers if settings.buffers == "mean" else {}),
        local=_shapes({name: x for name, x in parameters.items() if name in is_local}),
    )


def _is_buffer(name: str, tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or name.rpartition(".")[2] in OF_NORM_LAYERS


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tensors.items()}
