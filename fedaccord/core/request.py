"""A client's part of a round as values: its instruction and its reply.

In process they are passed by reference; `wire/messages.py` turns them into Flower messages.
"""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fedaccord.core.client_half import ClientHalf
from fedaccord.core.options import did_you_mean, listed
from fedaccord.core.rule import LocalConfig, Shapes
from fedaccord.core.vectors import Number, Vector, nbytes

BUFFER_POLICIES = ("refuse", "freeze", "mean", "local")  # of a model's persistent buffers


class ModelSettings(NamedTuple):
    """How a module becomes the model of a run; see `task/flat_model.py`."""

    precision: str = "float32"
    buffers: str = "refuse"  # of BUFFER_POLICIES
    local_parameters: str = ""  # patterns of the names of parameters that stay at the client
    frozen_parameters: str = ""  # patterns of the names of parameters that keep their values

    @staticmethod
    def of(settings: Any) -> "ModelSettings":
        """These settings, selected from an object with more."""
        return ModelSettings(*(getattr(settings, name) for name in ModelSettings._fields))

    def local_names(self, names: Collection[str]) -> set[str]:
        """The names of trained parameters that match a pattern. Raises ValueError if a pattern
        matches none."""
        return _matched("local-parameters", self.local_parameters, "trained parameters", names)

    def frozen_names(self, names: Collection[str]) -> set[str]:
        """The names of parameters that match a pattern. Raises ValueError as above."""
        return _matched("frozen-parameters", self.frozen_parameters, "parameters", names)


def _matched(key: str, patterns: str, of: str, names: Collection[str]) -> set[str]:
    matched: set[str] = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(
                f"{key}: expected patterns of the names of {of}, "
                f"{pattern!r} matches none{did_you_mean(pattern, names)}; the model has "
                f"{', '.join([*names][:3])}{', ...' if len(names) > 3 else ''}"
            )
        matched |= matches
    return matched


DEFAULT = ModelSettings()


class ModelLayout(NamedTuple):
    """The tensors of a model by role, on which server and clients must agree."""

    shared: Mapping[str, tuple[int, ...]]  # shapes by name, in vector order
    buffers: Mapping[str, tuple[int, ...]] = {}  # those that are averaged
    local: Mapping[str, tuple[int, ...]] | None = None  # parameters that stay at the client
    frozen: Mapping[str, str] | None = None  # digests by name; None, as for local: unknown

    def difference(self, other: "ModelLayout") -> str | None:
        """The first tensor in which ``other`` differs, in one line; None: they agree."""
        for role in self._fields:
            ours, theirs = getattr(self, role), getattr(other, role)
            if ours is None or theirs is None:
                continue
            for name in {**ours, **theirs}:
                if ours.get(name) != theirs.get(name):
                    instead = next(
                        (r for r in self._fields if name in (getattr(other, r) or ())), ""
                    )
                    return _difference(role, name, ours.get(name), theirs.get(name), instead)
            if [*ours] != [*theirs]:
                return f"expected the {role} tensors in the order {listed(ours)}, got another"
        return None


def _difference(role: str, name: str, ours: Any, theirs: Any, instead: str) -> str:
    """instead: the tensor's role on the other side; empty: it does not exist there."""
    if ours is None:
        return f"expected no {role} tensor {name!r}, got one"
    if theirs is None:
        return f"expected a {role} tensor {name!r}, got {f'a {instead} one' if instead else 'none'}"
    if role == "frozen":
        return f"expected frozen tensor {name!r} of the same type, shape and values, got another"
    return f"expected {role} tensor {name!r} of shape {tuple(ours)}, got {tuple(theirs)}"


class TrainInstruction(NamedTuple):
    """A client's instruction for a round. All but three fields are the same for all clients."""

    round: int  # t, from 0
    rounds: int  # T
    half: ClientHalf
    shapes: Shapes  # of the parameters, in vector order
    lr: float  # eta_t
    weight_decay: float
    clip_norm: float  # 0: off
    local_epochs: int
    local_steps: int  # 0: count epochs
    batch_size: int  # 0: the whole client as one batch, in order
    seed: int
    precision: str
    federation: str = ""  # its name, the same after a server restart
    attempt: int = 0  # which start of the server this is; a later one has a larger number
    client: int = -1
    accepted: int = -1  # as of this client in `RoundState`, whose reply is a first one if below 0
    durable: int = -1  # `accepted` in the server's last checkpoint, which does not hold the state
    buffers: str = "refuse"
    local_parameters: str = ""
    frozen_parameters: str = ""

    @property
    def model_settings(self) -> ModelSettings:
        return ModelSettings.of(self)

    @property
    def config(self) -> LocalConfig:
        """The part that this client's local round reads."""
        return LocalConfig(
            round=self.round,
            rounds=self.rounds,
            lr=self.lr,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            client=self.client,
            seed=self.seed,
            shapes=self.shapes,
        )

    def steps(self, examples: int) -> int:
        """K_i of a client that holds so many samples."""
        batches = -(-examples // self.batch_size) if self.batch_size else 1
        return self.local_steps or self.local_epochs * batches


class TrainRequest(NamedTuple):
    """A training request to one client."""

    instruction: TrainInstruction
    down: Any  # NamedTuple of vectors (d,): the broadcast
    w_init: Vector | None = None  # (d,), w^0 with a first visit, if a client reads it
    buffers: Vector | None = None  # (d_b,), the mean of the clients' buffers; None: not averaged

    @property
    def nbytes(self) -> int:
        """The bytes of the vectors on the wire."""
        rounding = self.instruction.half.rounding
        down = nbytes(self.down) if rounding is None else rounding.nbytes(self.down)
        return down + nbytes(self.w_init) + nbytes(self.buffers)


class EvaluateRequest(NamedTuple):
    """A request to evaluate on the client's own held-out samples."""

    instruction: TrainInstruction
    w: Vector | None = None  # (d,), the output model; None: not needed
    buffers: Vector | None = None  # (d_b,), as of `TrainRequest`
    own_only: bool = False  # the client's own model alone


class TrainReply(NamedTuple):
    """A client's reply."""

    up: Any  # NamedTuple of vectors (d,), as the plug-ins encode it
    examples: int  # samples of the client
    steps: int  # K_i
    loss: Number  # mean over the steps of the loss before the step; maybe a 0-d GPU tensor
    more: Mapping[str, Any] = {}  # a foreign ClientApp's own metrics
    # wall clock of its local round; None: unknown, as on a GPU without synchronisation
    seconds: float | None = None
    buffers: Vector | None = None  # (d_b,), the buffers after the last step
    up_bytes: int | None = None  # of the upload, if ``up`` is not what the client sent


class StateLost(NamedTuple):
    """The reply of a client that lost the state which the server expects."""

    accepted: int  # of the request: the round whose state is lost, as of `RoundState.accepted`


def round_of(accepted: int) -> int:
    """The round t of a number of `RoundState.accepted`, also after a reset; -1: none yet."""
    return accepted if accepted >= -1 else -2 - accepted
