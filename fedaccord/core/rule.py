"""The client half of a method: its direction, its gradient, its messages and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from torch import Tensor

from fedaccord.core.options import check_dataclass
from fedaccord.core.vectors import Vector, clip_

Shapes = Sequence[Sequence[int]]  # of a model's parameters, in vector order
GradientAt = Callable[[Vector], Tensor]
"""Leaves the gradient of the step's batch at a point (..., d) in the buffer g; returns the loss."""


class Model(NamedTuple):
    """A message of one model: what is broadcast, or the local model after the last step."""

    w: Vector


class Stateless(NamedTuple):
    """The state of a method without memory."""


class Direction(NamedTuple):
    """w <- w - lr (scale g(w) + shift + rho (w - anchor) + decay wd w), constant over the round.

    With ``along`` a step is w <- w - lr ((1 - mix) p + mix along), where p is the optimiser's step
    along the rest.
    """

    scale: float = 1.0
    shift: Vector | None = None  # (..., d); None: zero
    rho: float = 0.0
    anchor: Vector | None = None  # (..., d)
    decay: float = 1.0  # factor on the run's weight decay wd
    mix: float = 0.0
    along: Vector | None = None  # (..., d)


class LocalConfig(NamedTuple):
    """The settings of a client's local round."""

    round: int  # t, from 0
    rounds: int  # T
    lr: float  # eta_t
    weight_decay: float
    clip_norm: float  # bound on the norm of the data gradient; 0: off
    client: int | Sequence[int]  # i; one for each row of a cohort
    seed: int
    shapes: Shapes
    steps: Any = 0  # K_i: an int, or (n, 1) for a cohort; 0: the batches have no length
    hidden: Sequence[int] = ()  # indices of the hidden matrices among the parameters, for Muon
    secret: bool = False  # noise comes from the operating system, not from the seed

    @property
    def clients(self) -> Sequence[int]:
        return [self.client] if isinstance(self.client, int) else self.client


class LocalResult(NamedTuple):
    """The local steps that were taken."""

    w_i0: Vector  # (..., d), w_{i,0}
    w_K: Vector  # (..., d), w_{i,K}
    steps: Any  # K_i: an int, or (n, 1) for a cohort
    loss: Tensor  # (...), mean over the steps of the loss before the step
    gradient: Any  # the result of `gradient_result`
    config: LocalConfig
    length: Any  # SGD: sum of the steps' rates, K_i lr if they are constant: a float, or (n, 1)
    moments: Any = Stateless()  # the optimiser's vectors after the last step
    mean: Vector | None = None  # (..., d), see `mean_direction`; None: the steps were SGD's

    def mean_direction(self) -> Vector:
        """The mean over the steps of their directions d_k, a fresh vector.

        Under SGD it is the displacement over the sum of rates, which includes weight decay, and
        weighs each step by its rate if these fall within the round. For other optimisers it is
        not; there the directions are summed up if the rule sets `reads_mean_direction`. Raises
        TypeError if it does not.
        """
        if self.mean is not None:
            return self.mean.clone()
        if self.length is None:
            raise TypeError("mean_direction: expected a rule with reads_mean_direction = True")
        return (self.w_i0 - self.w_K).div_(self.length)


class Registered:
    """A class whose objects travel with messages, by a short name and their fields.

    A class registers itself when it is defined. A message that names an unknown class is refused;
    a message never causes an import.
    """

    registry: ClassVar[dict[str, type["Registered"]]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        """Raises TypeError, in one line, if another class has the same short name."""
        super().__init_subclass__(**more)
        name = cls.registered_name()
        one, other = (
            f"{k.__module__}:{k.__qualname__}" for k in (Registered.registry.get(name, cls), cls)
        )
        if one != other:  # the same class may be defined again, e.g. in a notebook
            raise TypeError(
                f"{other}: expected a class with a unique short name, got {name!r}, also "
                f"that of {one}; rename one of them"
            )
        Registered.registry[name] = cls

    def __new__(cls, *positional: Any, **named: Any) -> Self:
        check_dataclass(cls)
        return super().__new__(cls)

    @classmethod
    def registered_name(cls) -> str:
        """The class's name in lower case without "Client" at its end: "scaffold", "sam"."""
        return (cls.__name__.removesuffix("Client") or cls.__name__).lower()

    def own_fields(self) -> dict[str, Any]:
        """The fields by name. Raises ValueError, in one line, if one is not a plain value."""
        kind: Any = type(self)  # a dataclass
        own = {field.name: getattr(self, field.name) for field in fields(kind)}
        for name, value in own.items():
            if not isinstance(value, bool | int | float | str | None):
                raise ValueError(
                    f"expected numbers, strings and booleans as fields of {kind.__name__}, "
                    f"which travels with messages, got {name}={value!r}"
                )
        return own


@dataclass(frozen=True)
class LocalRule(Registered):
    """The client half of a method: a frozen dataclass of its hyper-parameters.

    Its fields are numbers, strings and booleans, which travel with messages. State is an argument
    and a result; a rule keeps none. Every method works for one client, vectors (d,), and for a
    cohort, vectors (n, d). Returned vectors may be passed on by reference: do not change them in
    place afterwards.

    Throughout, ``down`` is the broadcast, of the type `receives`, ``state`` the client's own, of
    the type that `init` returns, and ``config`` the settings of the round. Vectors have the dtype
    of the run's precision and the device of the model, and the shape (..., d) unless `init` or the
    server made another.
    """

    receives: ClassVar[Any] = Model  # NamedTuple type of the broadcast; its field w is the model
    sends: ClassVar[Any] = Model  # NamedTuple type of the reply; a field w is w_{i,K}
    exact: ClassVar[tuple[str, ...]] = ()  # fields of `receives` that the client's memory sums up
    reads_mean_direction: ClassVar[bool] = False  # `upload` calls LocalResult.mean_direction

    @property
    def models(self) -> tuple[str, ...]:
        """The fields of `sends` that are models, by default w if there is one; the others are
        changes, duals or the like."""
        return tuple(name for name in ("w",) if name in self.sends._fields)

    @property
    def needs_w_init(self) -> bool:
        """Whether `init` reads w^0, which the server then sends with a client's first message."""
        return False

    def is_silent(self, t: int) -> bool:
        """Whether the clients of round t send no vector."""
        return False

    @property
    def is_stateless(self) -> bool:
        """Whether clients have no state between two rounds."""
        return type(self).init is LocalRule.init

    @property
    def takes_one_gradient(self) -> bool:
        """Whether a step requests one gradient, and `gradient_result` none; False if unknown."""
        own = type(self)
        is_default = own.gradient is LocalRule.gradient
        return is_default and own.gradient_result is LocalRule.gradient_result

    @property
    def reads_broadcast(self) -> bool:
        """Whether a hook after `start` may read the broadcast; True if unknown."""
        hooks = ("direction", "gradient_init", "upload", "remember")
        return any(getattr(type(self), hook) is not getattr(LocalRule, hook) for hook in hooks)

    def init(self, w: Vector, w_init: Vector, config: LocalConfig) -> Any:
        """Client state before the first visit, a NamedTuple of vectors.

        w: the model received, w_init: w^0 if `needs_w_init`, else None.
        """
        return Stateless()

    def start(self, down: Any, state: Any, config: LocalConfig) -> Vector:
        """w_{i,0} (..., d), where the local steps start."""
        w: Vector = down.w
        return w

    def direction(self, down: Any, state: Any, config: LocalConfig) -> Direction:
        """The terms of a step besides the gradient."""
        return Direction()

    # The gradient hook: the gradient that a step uses. Its buffers belong to the caller.

    def gradient_init(self, w: Vector, down: Any, state: Any, config: LocalConfig) -> Any:
        """The work vectors of the hook, for the whole round, as a NamedTuple; w: w_{i,0}.

        For a cohort, (n, d), `gradient` is called with fewer rows as clients finish; a tensor of
        one dimension is shared by all clients.
        """
        return Stateless()

    def gradient(
        self, w: Vector, g: Vector, buffers: Any, at: GradientAt, config: LocalConfig
    ) -> Tensor:
        """Write the clipped gradient of a step into g (..., d); returns the loss (...) at w.

        ``at`` may be called at any points; ``w`` must not change. Values that outlast the step are
        stored in ``buffers``, in place.
        """
        loss = at(w)
        clip_(g, config.clip_norm)
        return loss

    def gradient_result(
        self, w: Vector, g: Vector, buffers: Any, at: GradientAt, config: LocalConfig
    ) -> Any:
        """The result of the hook after the last step, `LocalResult.gradient`.

        w: w_{i,K}, ``at``: the last step's batch.
        """
        return None

    def upload(self, w_K: Vector, down: Any, state: Any, result: LocalResult) -> Any:
        """The reply, of the type `sends`; w_K: w_{i,K} (..., d)."""
        return Model(w_K)

    def remember(self, read: Any, down: Any, state: Any, result: LocalResult) -> Any:
        """The client's next state, of the type of ``state``.

        ``read``: the upload as the server will read it, which is the result of `upload` unless a
        plug-in is lossy. Compute from ``read`` what the server sums up over the clients (c_i,
        lam_i): then mean(c_i) = c holds with any plug-in; compute from ``result`` what belongs to
        the client alone (its own model).
        """
        return state

    def dual(self, down: Any, state: Any) -> Vector | None:
        """The client's dual variable lam_i^t (..., d) as a visit begins; None: it has none."""
        return None

    def personal(self, state: Any) -> Vector | None:
        """The client's own model (..., d), evaluated on its own test samples; None: it has none."""
        return None


class Rounding(Protocol):
    """Rounds the broadcast to numbers of fewer bytes."""

    def rounded(self, v: Vector, seed: int, round: int, name: str) -> Vector:
        """A vector (d,) of the broadcast, by its name, as clients read it."""

    def packed(self, kind: Any) -> Any:
        """The NamedTuple type of a packed broadcast of type ``kind``."""

    def pack(self, down: Any) -> Any:
        """A rounded broadcast in its packed form."""

    def unpack(self, packed: Any, kind: Any, like: Vector) -> Any:
        """The reverse of `pack`. Raises ValueError, in one line, for anything else."""

    def nbytes(self, down: Any) -> int:
        """The bytes of a packed broadcast."""
