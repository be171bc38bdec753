"""Plug-ins: each replaces some hooks of any method, at the client and at the server."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast, get_type_hints

from torch import Tensor

from fedaccord.core.cohort import Cohort, Decoded
from fedaccord.core.options import options
from fedaccord.core.privacy import Guarantee, Masking, Privacy
from fedaccord.core.rule import (
    GradientAt,
    LocalResult,
    Registered,
    Rounding,
    Stateless,
)
from fedaccord.core.topology import ServerHalf, Topology
from fedaccord.core.vectors import Vector


@dataclass(frozen=True)
class PlugIn(Registered):
    """Replaces hooks of any method; a hook that it does not override stays the method's.

    A plug-in with a memory at the client puts its own NamedTuple, with a field ``base``, around the
    method's state. A plug-in whose `decode` does not restore what was encoded sets ``loses``:
    clients then remember what the server reads.

    Throughout, ``up`` is an upload and ``down`` the broadcast, NamedTuples of vectors (..., d) of
    which the field w is the model, ``base`` is the method's state in those of the plug-ins before,
    and ``state`` this plug-in's own around it. (...) is () of one client, (n,) of a cohort.
    """

    replaces: ClassVar[dict[str, str]] = {}  # options of a strategy without effect beside it -> why
    place: ClassVar[int] = 0  # in the order of `encode`, see CLIP, COMPRESS and MASK
    loses: ClassVar[bool] = False  # the encoding is lossy

    @classmethod
    def is_set(cls, values: Mapping[str, Any]) -> bool:
        """Whether run-config values, without those that are "auto", ask for it: whether its first
        option, its strength, is among them."""
        strength = options(cls)[0]
        if not strength.metadata["auto"]:
            raise TypeError(
                f"{cls.__name__}.{strength.name}: expected auto=True, as it is the first option: "
                "without it the plug-in would be on in every run"
            )
        return strength.name in values

    @property
    def is_off(self) -> bool:
        """Whether its settings leave the bare method."""
        return False

    def fit(self, method: ServerHalf) -> "PlugIn":
        """The plug-in, adapted to ``method`` (a server half). Raises ValueError if incompatible."""
        name, kind = type(method).__name__, type(self)
        if why := method.refuses.get(kind):
            raise ValueError(f"{name} does not support {kind.__name__}: {why}")
        return self

    def unread(self, method: ServerHalf) -> dict[str, str]:
        """Its options without effect beside ``method``, and why."""
        return {}

    def advice(self, method: ServerHalf, share: float) -> str:
        """A warning about the settings beside ``method``, shown before round 1; empty: none.

        share: of the clients in a step of the server; 1 under gossip.
        """
        return ""

    # the client half

    @property
    def needs_w_init(self) -> bool:
        """Whether `init` reads w^0."""
        return False

    @property
    def moves_start(self) -> bool:
        return type(self).start is not PlugIn.start

    @property
    def moves_anchor(self) -> bool:
        """Whether `received` replaces w^t by the client's own start."""
        return False

    def sends_start_to(self, method: ServerHalf) -> bool:
        """Whether it moves starts that ``method`` reads: clients then send them too."""
        reads_anchor = self.moves_anchor and method.reads_anchors
        return self.moves_start and (method.reads_starts or reads_anchor)

    def init(self, w: Vector, w_init: Vector, base: Any) -> Any:
        """Client state before the first visit, around the method's own, ``base``."""
        return base

    def base(self, state: Any) -> Any:
        """The state that this plug-in wraps; a plug-in with a memory overrides it."""
        return state

    def start(self, w_i0: Vector, state: Any) -> Vector:
        """w_{i,0} (..., d); the argument is the method's own start."""
        return w_i0

    def received(self, down: Any, w_i0: Vector) -> Any:
        """The broadcast that the method reads after `start`; its anchor is ``down.w``."""
        return down

    def gradient_init(self, w: Vector) -> Any:
        """The work vectors of `gradient`, for the whole round, as a NamedTuple; w: w_{i,0}."""
        return Stateless()

    def gradient(self, at: GradientAt, point: Vector, g: Vector, buffers: Any) -> Tensor:
        """Write the gradient that the method receives at ``point`` (..., d) into g (..., d), not
        clipped; return the loss (...) at ``point``. ``at`` does the same for the next plug-in, or
        the data; ``buffers``: of `gradient_init`."""
        return at(point)

    def encode(self, up: Any, down: Any, state: Any, result: LocalResult) -> tuple[Any, Any]:
        """The message in place of ``up``, and the plug-in's own memory, its state without ``base``.

        ``down``: the broadcast as it was received: up.w - down.w is the update that the server
        reads. A plug-in without a memory returns None in its place.
        """
        return up, None

    # the server half

    def sends(self, kind: Any) -> Any:
        """The NamedTuple type of an encoded ``kind``."""
        return kind

    def wire_share(self, like: Vector) -> float:
        """Bytes of an encoded vector, as a share of those of one like ``like`` (d,)."""
        return 1.0

    def decode(self, decoded: Decoded, kind: Any, down: Any, like: Vector) -> Decoded:
        """The reverse of `encode`: an upload of type ``kind``; down: as of `encode`.

        like: a vector (..., d) of which only the shape and the dtype are read.
        Raises ValueError, in one line, for a message that `encode` cannot make.
        """
        return decoded

    def mean(self, ups: Any, cohort: Cohort) -> tuple[Any, Cohort]:
        """The uploads that the method's server step averages, and their cohort; of a mean alone
        `Cohort.of_mean`."""
        return ups, cohort

    @property
    def replaces_mean(self) -> bool:
        return type(self).mean is not PlugIn.mean

    @property
    def sent_share(self) -> float:
        """The share of an update's numbers that is sent; the others are decoded as zero."""
        return 1.0

    @property
    def unmaskable(self) -> str:
        """Its setting that does not allow masked uploads, and why; empty: they are allowed. May be
        a class attribute."""
        return f"{type(self).__name__}, which reads single uploads" if self.replaces_mean else ""

    def guarantee(self) -> Guarantee | None:
        """The differential privacy that the run promises with it; None: none."""
        return None

    def masking(self) -> Masking | None:
        """How uploads are masked until they are summed; None: not masked."""
        return None

    def check_size(self, numbers: int) -> None:
        """Raise ValueError, in one line, if uploads of so many numbers do not fit."""

    def at(self, privacy: Privacy) -> "PlugIn":
        """The plug-in for a round that begins with this state of the privacy mechanism."""
        return self

    def rounding(self) -> Rounding | None:
        """What rounds the broadcast; None: it is sent as it is."""
        return None

    def graph(self, seed: int) -> Topology | None:
        """The topology that replaces the star; None: keep it."""
        return None


CLIP, COMPRESS, MASK = 1, 2, 3  # places of plug-ins that change uploads


@cache
def joined_type(kind: Any, more: Any) -> Any:
    """A message's type with the fields of another one after its own."""
    hints = [*get_type_hints(kind).items(), *get_type_hints(more).items()]
    return NamedTuple(f"{kind.__name__}And{more.__name__}", hints) if more._fields else kind


def joined(message: Any, more: Any) -> Any:
    """A message with the vectors of another one."""
    if not more:
        return message
    kind, other = cast(Any, type(message)), cast(Any, type(more))
    return joined_type(kind, other)(*message, *more)
