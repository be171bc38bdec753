"""A module whose trained parameters are stored in one flat vector, and the roles of its tensors."""

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaccord.core.request import ModelLayout, ModelSettings
from fedaccord.core.vectors import dtype_of
from fedaccord.task import tensors
from fedaccord.task.batches import Forward, describe
from fedaccord.task.tensors import storage_of
from fedaccord.task.unsaved import Unsaved, warn_of_views

LARGE_MODEL_BYTES = 2**24  # bytes of a model above which a visit saves memory


class FlatModel:
    """A module with its flat parameter vector w and flat gradient g.

    Each tensor of the module's state has one role:

    * *shared* parameters are trained and exchanged: w (d,), in the order of
      ``module.parameters()``, a tied one once;
    * *local* parameters are trained and stay at the client: `local`, beside w;
    * *frozen* ones (``requires_grad=False``, or frozen_parameters, which sets that) keep their
      values and are never sent;
    * persistent *buffers*, such as running statistics, follow ``buffers``: ``refuse``, ``freeze``
      (as frozen parameters; their modules are in evaluation mode in training too), ``mean``
      (averaged over the clients: `read_buffers`), ``local`` (each client's own, in `local`); a
      tensor that a forward pass puts in a buffer's place is copied into it;
    * values outside the state dict, such as other buffers, are reset before a visit: `unsaved`.

    The shared parameters are views into ``w`` and their gradients views into ``g``: a step on w is
    a step of the model, and a backward pass writes into g. Nothing is copied between the two.

    w, g: (d,) of one dtype on one device. local_parameters, frozen_parameters: patterns of names
    as in a shell, separated by commas, as ``"head.*"``. forward: as of `BatchFormat`.

    Raises ValueError for a model without shared parameters, with buffers that are refused, or
    without a parameter that a pattern matches.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        buffers: str = "refuse",
        local_parameters: str = "",
        frozen_parameters: str = "",
        forward: Forward | None = None,
    ) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                "model: expected a module in Python, got TorchScript: use the module that it was "
                "made from"
            )
        self.forward = forward
        self.by_sample: bool | None = None  # whether predictions depend on their own sample alone
        self.in_stacks: bool | None = None  # whether a stack of clients has each one's gradient
        self.graphs: dict[Any, Any] = {}  # of `cuda_graphs.graphs_of`
        self.policy = buffers
        state = tensors.buffers_of(module, buffers)
        tensors.check_values(module, buffers, state, dtype)
        self.module = tensors.cast(module, device, dtype)
        every = dict(self.module.named_parameters(remove_duplicate=False))  # all names of tied ones
        named = dict(self.module.named_parameters())
        roles = ModelSettings(
            local_parameters=local_parameters, frozen_parameters=frozen_parameters
        )
        for name in roles.frozen_names(every):
            every[name].requires_grad_(False)
        tensors.check_dense(self.module)
        trained = {n: p for n, p in named.items() if p.requires_grad}
        names = [n for n, p in every.items() if p.requires_grad]
        is_local = {id(every[name]) for name in roles.local_names(names)}
        shared = {n: p for n, p in trained.items() if id(p) not in is_local}
        own = {n: p for n, p in trained.items() if id(p) in is_local}
        if not shared:
            beside_local = f" beside local-parameters={local_parameters!r}" if own else ""
            beside_frozen = (
                f" beside frozen-parameters={frozen_parameters!r}" if frozen_parameters else ""
            )
            raise ValueError(
                f"model: expected parameters to train and exchange, {type(module).__name__} has "
                f"none{beside_local}{beside_frozen}"
            )
        self.names = [*shared]
        self.shapes = [p.shape for p in shared.values()]
        self.parameters = [*shared.values(), *own.values()]  # all that gets a gradient
        self.local_names = [*own]
        self.local_shapes = [p.shape for p in own.values()]
        hidden = tensors.hidden_matrices(self.module)
        self.hidden, self.local_hidden = (
            [i for i, p in enumerate(some.values()) if id(p) in hidden] for some in (shared, own)
        )
        self.is_tied = len(every) > len(named)
        self._uses = [*tensors.uses(self.module, shared.values())]
        warn_of_views(self.module, self.parameters)
        self._hold(torch.cat([p.detach().reshape(-1) for p in self.parameters]))
        own_buffers = {n: b for n, b in self.module.named_buffers() if n in state}
        self.frozen: dict[str, Tensor] = {n: p for n, p in named.items() if not p.requires_grad} | (
            own_buffers if buffers == "freeze" else {}
        )
        owners = {n: self.module.get_submodule(n.rpartition(".")[0]) for n in own_buffers}
        self._held = [(n, owners[n], b) for n, b in own_buffers.items()]
        self._mean = own_buffers if buffers == "mean" else {}
        self._local = own_buffers if buffers == "local" else {}
        self._still = [
            m
            for m in self.module.modules()
            if buffers == "freeze"
            and any(any(b is own for own in own_buffers.values()) for b in m.buffers(recurse=False))
        ]
        tensors.begin_training(self.module, self.train)
        self.unsaved = Unsaved(self.module)
        self._versions = {name: tensor._version for name, tensor in self.frozen.items()}
        self._kept = {name: tensor.detach() for name, tensor in self.frozen.items()}
        self.initial_local = self.read_local()
        self.initial_buffers = self.read_buffers()

    def __call__(self, inputs: Any) -> Tensor:
        """The predictions. Raises ValueError if they are not a tensor."""
        if self.forward is None:
            return predictions(self.module(inputs))
        own = dict(inputs) if isinstance(inputs, dict) else inputs  # it may take keys out
        return predictions(self.forward(self.module, own))

    def with_parameters(self, parameters: Iterable[Tensor], inputs: Any) -> Any:
        """The module's result with these shared parameters instead of its own."""
        values = [*parameters]
        named = {name: values[i] for name, i in self._uses}
        return functional_call(self.module, named, (inputs,), tie_weights=False)

    def _hold(self, theta: Tensor) -> None:
        """Set the module's shared and local parameters to views of theta, with a zero gradient."""
        gradient = torch.zeros_like(theta)
        d = sum(shape.numel() for shape in self.shapes)
        self.w, self.g = theta[:d], gradient[:d]
        self.w_local, self.g_local = theta[d:], gradient[d:]
        self._point(self.w)
        own = self.parameters[len(self.shapes) :]
        for p, view in zip(own, _views(self.w_local, own), strict=True):
            p.data = view
        self.gradients = self.views(self.g) + _views(self.g_local, own)
        for p, g_p in zip(self.parameters, self.gradients, strict=True):
            p.grad = g_p

    @property
    def is_large(self) -> bool:
        """Whether a visit's memory is mostly vectors, of which `take` then saves two."""
        return self.w.is_cpu and self.w.nbytes >= LARGE_MODEL_BYTES and self.is_plain

    def load(self, w: Tensor) -> None:
        """Begin a visit or an evaluation at ``w`` (d,), with the `unsaved` values as at first.

        Raises ValueError as `check_kept`.
        """
        self.unsaved.reset()
        self._settle()
        self.check_kept()
        if not len(self.g):
            self._hold(torch.empty_like(self.w))
        self.w.copy_(w)

    def check_kept(self, checksums: Mapping[str, int] | None = None) -> None:
        """Raise ValueError if a forward pass has changed a frozen tensor, or has put another one
        in the place of a parameter's data. checksums: of the frozen tensors before that pass,
        which also show changes through ``.data``."""
        changed = [
            name
            for name, tensor in self.frozen.items()
            if tensor._version != self._versions[name]
            or storage_of(tensor) != storage_of(self._kept[name])
        ]
        if checksums is not None:
            after = self.frozen_checksums()
            changed += [name for name in after if after[name] != checksums[name]]
        if changed:
            raise ValueError(
                f"model: expected the frozen {changed[0]} to keep its values, a forward pass "
                "changed it: make it a buffer, with buffers=local (each client its own) or mean"
            )
        home = storage_of(self.w)
        for name, p in zip([*self.names, *self.local_names], self.parameters, strict=True):
            if storage_of(p) != home:
                raise ValueError(
                    f"model: expected {name} to keep its storage, a forward pass replaced its "
                    "data: write into it instead, by data.copy_(...)"
                )

    def take(self) -> Tensor:
        """The parameters (d,) as a tensor that is no longer changed.

        A large model hands over its own without a copy, and frees its gradient; the next `load`
        allocates both. Raises ValueError as `check_kept`.
        """
        self.check_kept()
        if not self.is_large:
            return self.w.clone()
        self.g, self.gradients = self.g.new_empty(0), []
        for p in self.parameters:
            p.grad = None
        self.g_local = self.g
        return self.w

    @property
    def is_plain(self) -> bool:
        """Whether training changes only the shared parameters."""
        return not (len(self.w_local) or self._mean or self._local)

    def train(self) -> None:
        """Training mode, except for modules with frozen statistics."""
        self.module.train()
        for module in self._still:
            module.eval()

    @contextmanager
    def at(self, point: Tensor) -> Iterator[None]:
        """The module at ``point`` (d,) instead of w, without a copy; gradients are written to g."""
        if point is self.w:
            yield
            return
        self._point(point)
        try:
            yield
        finally:
            self._point(self.w)

    def _point(self, vector: Tensor) -> None:
        for p, view in zip(self.parameters, self.views(vector), strict=False):
            p.data = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector (..., d) as one tensor per shared parameter, without copying."""
        pieces = torch.split(vector, [shape.numel() for shape in self.shapes], dim=-1)
        stack = vector.shape[:-1]
        return [p.view((*stack, *shape)) for p, shape in zip(pieces, self.shapes, strict=True)]

    def state_dict(self) -> dict[str, Tensor]:
        """The current w under the names of the shared parameters."""
        return dict(zip(self.names, self.views(self.w), strict=True))

    @property
    def layout(self) -> ModelLayout:
        """Names and shapes, and digests of frozen tensors."""
        return ModelLayout(
            shared=dict(zip(self.names, map(tuple, self.shapes), strict=True)),
            buffers={name: tuple(b.shape) for name, b in self._mean.items()},
            local=dict(zip(self.local_names, map(tuple, self.local_shapes), strict=True)),
            frozen=self.frozen_hashes(),
        )

    # tensors beside w

    @property
    def buffer_names(self) -> list[str]:
        """The buffers that the server averages."""
        return [*self._mean]

    @torch.no_grad()
    def _settle(self) -> None:
        """Copy tensors that a forward pass has put in the place of buffers into these. Raises
        ValueError if one does not fit."""
        for name, owner, buffer in self._held:
            key = name.rpartition(".")[2]
            current, owner._buffers[key] = owner._buffers[key], buffer
            if current is buffer or self.policy == "freeze":
                continue
            if current is None or current.shape != buffer.shape:
                shape = None if current is None else tuple(current.shape)
                raise ValueError(
                    f"model: expected the buffer {name} to keep its shape {tuple(buffer.shape)} in "
                    f"training, got {shape}; register it with persistent=False"
                )
            buffer.copy_(current)

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers that the server averages, by name."""
        self._settle()
        return {name: b.detach() for name, b in self._mean.items()}

    def read_buffers(self) -> Tensor:
        """The buffers that the server averages, (d_b,) in w's dtype."""
        self._settle()
        return _flatten(self._mean.values(), self.w)

    def write_buffers(self, vector: Tensor) -> None:
        """The reverse of `read_buffers`; integer buffers are rounded."""
        self._settle()
        _unflatten(vector, self._mean.values())

    @property
    def statistics(self) -> list[Tensor]:
        """The buffers that forward passes may change."""
        self._settle()
        return [*self._mean.values(), *self._local.values()]

    def read_local(self) -> Tensor:
        """The client's own parameters, then its own buffers, (d_l,) in w's dtype."""
        self._settle()
        return _flatten([self.w_local, *self._local.values()], self.w)

    def write_local(self, vector: Tensor) -> None:
        """The reverse of `read_local`; integer buffers are rounded."""
        self._settle()
        _unflatten(vector, [self.w_local, *self._local.values()])

    @property
    def all_local_names(self) -> list[str]:
        """The client's own parameters, then its own buffers."""
        return [*self.local_names, *self._local]

    def frozen_checksums(self) -> dict[str, int]:
        """Checksums of frozen tensors by name; faster than `frozen_hashes`."""
        return {name: zlib.crc32(_bytes(tensor)) for name, tensor in self.frozen.items()}

    def frozen_hashes(self) -> dict[str, str]:
        """A digest of each frozen tensor's dtype, shape and values, by name."""
        return {name: digest(tensor) for name, tensor in self.frozen.items()}


def predictions(output: Any) -> Tensor:
    """A module's result. Raises ValueError if it is not a tensor."""
    if isinstance(output, Tensor):
        return output
    raise ValueError(
        f"model: expected predictions in a tensor, got {describe(output)}; "
        "return a tensor in the module's forward, or, with simulate(clients=) or train_locally, in "
        "forward=lambda model, batch: ..."
    )


def flat_model(
    module: nn.Module,
    settings: ModelSettings,
    device: torch.device | str | None = None,
    forward: Forward | None = None,
) -> FlatModel:
    """``module`` with the roles of these settings."""
    return FlatModel(
        module,
        dtype=dtype_of(settings.precision),
        device=device,
        buffers=settings.buffers,
        local_parameters=settings.local_parameters,
        frozen_parameters=settings.frozen_parameters,
        forward=forward,
    )


def digest(tensor: Tensor) -> str:
    """16 hexadecimal digits of a hash of dtype, shape and values."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.blake2b(head + _bytes(tensor).tobytes(), digest_size=8).hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """Its values as a NumPy array of bytes, without a copy on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _views(vector: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    like = [*like]
    pieces = torch.split(vector, [p.numel() for p in like])
    return [piece.view(p.shape) for piece, p in zip(pieces, like, strict=True)]


def _flatten(tensors: Iterable[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like[:0], *(t.detach().reshape(-1).to(like.dtype) for t in tensors)])


@torch.no_grad()
def _unflatten(vector: Tensor, tensors: Iterable[Tensor]) -> None:
    tensors = [*tensors]
    if len(vector) != sum(t.numel() for t in tensors):
        raise ValueError(
            f"expected {sum(t.numel() for t in tensors)} values of tensors beside the model, got "
            f"{len(vector)}: build the same model as before, and on server and clients"
        )
    for tensor, piece in zip(tensors, _views(vector, tensors), strict=True):
        tensor.copy_(piece if tensor.is_floating_point() else piece.round())
