"""Client-level differential privacy of the sums that a server step reads, or of each upload.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR
2018, arXiv:1710.06963, with the fixed denominator of its section 3.1. The adaptive clip: Andrew,
Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping. NeurIPS 2021,
arXiv:1905.03871, Algorithm 1.

    client  u_i, all fields of the upload together: w_{i,K} - w^t of a model, the rest as it is
            u_i <- u_i min(1, S / ||u_i||)
    server  u = (sum_i u_i + N(0, (z S)^2)) / (q C)                 each field with its own noise
            S <- S exp(-0.2 (b - 0.5)),  b: noised share of the clients with ||u_i|| <= S

The noise of b has the deviation q C / 20, and that of the sums is raised to
z' = (z^-2 - (q C / 10)^-2)^(-1/2): both releases together then cost as much as z alone.

Local privacy, for a server that is not trusted, has no noise there:

    client  sends u_i + N(0, (z S)^2), each field with noise of its own
"""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.core.cohort import Reply
from fedaccord.core.vectors import Vector, sum_dtype

RATE, QUANTILE = 0.2, 0.5  # of the adaptive clip
COUNT_DEVIATION = 1 / 20  # noise of the count within the clip, as a share of q C
ROUNDING = 1e-5  # a client's own clip ends this close to S, as a share of it
CHUNK = 1 << 20  # numbers that are drawn at a time

Normal = Callable[[int], Tensor]
"""n -> n independent standard normal numbers, (n,) float64 on the CPU."""


class Guarantee(NamedTuple):
    """The privacy guarantee of a run; see `plugins/dp.py`."""

    clip: float  # S of the first round
    multiplier: float  # z; -1: computed from epsilon
    epsilon: float
    delta: float
    max_epsilon: float  # 0: no bound
    adaptive: bool
    writes_clients: bool  # numbers of single clients and their means may be written
    local: bool = False  # clients add the noise, each to its own upload
    least: int = 0  # clients of a round that has a sum; rounds with fewer fail, as all can see

    @property
    def hides_numbers(self) -> bool:
        """Whether clients do not send numbers such as their losses."""
        return self.local and not self.writes_clients


def guarantee_of(plugins: Sequence[Any]) -> Guarantee | None:
    """The guarantee of one of these plug-ins, on the sums of another; None: none has one."""
    guarantees = (plugin.guarantee() for plugin in plugins)
    guarantee = next((guarantee for guarantee in guarantees if guarantee is not None), None)
    maskings = (plugin.masking() for plugin in plugins)
    least = next((masking.least for masking in maskings if masking is not None), 0)
    return guarantee and guarantee._replace(least=least)


def has_noisy_sums(plugins: Sequence[Any]) -> bool:
    """Whether the server adds noise to the sums that it reads."""
    guarantee = guarantee_of(plugins)
    return guarantee is not None and not guarantee.local


class Masking(NamedTuple):
    """The masking of a round's uploads, of which the server then reads only the sum."""

    bits: int  # of each number that is summed
    neighbours: int  # of a client
    threshold: float  # share of a neighbourhood that must remain
    least: int = 3  # clients of a sum: of two, each would know the other's upload


class Privacy(NamedTuple):
    """The state of the mechanism between two rounds."""

    releases: int  # rounds whose noise was drawn, failed ones too
    multiplier: float  # z
    clip: float  # S
    share: float  # q
    adaptive: bool
    local: bool = False  # as in `Guarantee`

    def spent(self) -> "Privacy":
        """After one more release."""
        return self._replace(releases=self.releases + 1)


def seeded(seed: int, t: int, client: int | None = None) -> Normal:
    """The noise of round t of a simulation, the same in every process; None: at the server."""
    key = f"noise {seed} {t}" if client is None else f"noise {seed} {t} {client}"
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return lambda n: torch.randn(n, generator=generator, dtype=torch.float64)


def secret(n: int) -> Tensor:
    """Noise from the operating system's cryptographic generator, a `Normal`.

    Box-Muller: two uniform numbers of 53 bits each, u in (0, 1] and v in [0, 1), give
    sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v); the largest possible value is 8.6.
    """
    half = (n + 1) // 2
    words = torch.frombuffer(bytearray(os.urandom(16 * half)), dtype=torch.int64)
    u, v = ((words >> 11) & (2**53 - 1)).double().mul_(2.0**-53).view(2, half)
    radius, angle = (1 - u).log_().mul_(-2).sqrt_(), v.mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]


def clipped(up: Any, w: Vector, models: Sequence[str], S: float) -> Any:
    """The upload, a NamedTuple of vectors (..., d), with a joint norm of at most S as updates.

    An upload within S is returned bit for bit. w: (..., d), w^t.
    """
    scale = _scale(up, w, models, S)

    def shorter(name: str, v: Vector) -> Vector:
        centre = w if name in models else torch.zeros_like(v)
        return torch.where(scale < 1, centre + (v - centre) * scale.to(v.dtype), v)

    return up._replace(
        **{name: shorter(name, v) for name, v in up._asdict().items() if v is not None}
    )


def _scale(up: Any, w: Vector, models: Sequence[str], S: float) -> Tensor:
    """min(1, S / ||u||) (..., 1), float64 if the device has it."""
    wide = sum_dtype(w.device)
    norms = [
        torch.linalg.vector_norm(v - w if name in models else v, dim=-1, keepdim=True, dtype=wide)
        for name, v in up._asdict().items()
        if v is not None
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return torch.where(norm > S, S / norm, torch.ones_like(norm))


def release(
    privacy: Privacy,
    replies: Sequence[Reply],
    w: Vector,
    kind: Any,
    models: Sequence[str],
    num_clients: int,
    normal: Normal,
) -> tuple[Any, Privacy]:
    """The noised mean of the uploads, of type ``kind``, and the next state; replies may be empty.

    Every upload is clipped again here, as a client may send anything.
    """
    z, S, size = privacy.multiplier, privacy.clip, privacy.share * num_clients
    if privacy.adaptive:
        b = _share_within(replies, w, models, S, size, normal)
        z = raised(z, size)
        privacy = privacy._replace(clip=S * math.exp(-RATE * (b - QUANTILE)))
    total = {name: torch.zeros_like(w) for name in kind._fields}
    for reply in replies:
        scale = _scale(reply.up, w, models, S).to(w.dtype)
        for name, v in reply.up._asdict().items():
            total[name].add_((v - w if name in models else v) * scale)
    for v in total.values():
        add_noise_(v, z * S, normal)
        v.div_(size)
    mean = kind(*(v.add_(w) if name in models else v for name, v in total.items()))
    return mean, privacy.spent()


def add_noise_(v: Vector, deviation: float, normal: Normal) -> None:
    """v + N(0, deviation^2), v (d,) in place."""
    if deviation:
        for first in range(0, len(v), CHUNK):
            part = v[first : first + CHUNK]
            part.add_((normal(len(part)) * deviation).to(part))


def raised(z: float, size: float) -> float:
    """z' of the sums if the share within the clip is released too; size: q C."""
    if z == 0:
        return 0.0
    if z >= 2 * COUNT_DEVIATION * size:
        raise ValueError(
            f"dp.adaptive-clip: expected more than {z / (2 * COUNT_DEVIATION):.4g} clients a round "
            f"on average with a noise multiplier of {z:.4g}, got {size:.4g}: raise fraction-train, "
            "or leave the clip fixed"
        )
    return 1 / math.sqrt(1 / z**2 - 1 / (2 * COUNT_DEVIATION * size) ** 2)


def _share_within(
    replies: Sequence[Reply],
    w: Vector,
    models: Sequence[str],
    S: float,
    size: float,
    normal: Normal,
) -> float:
    """b: a client counts +1/2 if its norm is below S, else -1/2: its sensitivity is 1/2."""
    scales = [_scale(reply.up, w, models, S * (1 - ROUNDING)) for reply in replies]
    votes = sum(0.5 if float(scale) == 1 else -0.5 for scale in scales)
    return votes / size + float(normal(1)) * COUNT_DEVIATION + 0.5
