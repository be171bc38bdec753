"""Compressors of `compress.py`: vectors as fewer bytes, and back.

Each is a pair of functions of one vector x (d,): `pack` makes the tensors of a message, `unpack`
the vector that the server reads. `layout` describes the tensors: a reply with others is refused
before it is used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from fedaccord.core.vectors import PIECE, Vector

BUCKET = 512  # numbers with one scale; a divisor of PIECE
BLOCK = 2**16  # values of 16 bits
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an integer -> its type
SAMPLES = 2**14  # from which the threshold of the largest numbers is estimated


class Part(NamedTuple):
    """One tensor of a packed vector."""

    dtype: torch.dtype
    numel: int


class Compressor(Protocol):
    """A way to pack vectors; server and client must agree on its fields."""

    @property
    def parts(self) -> Sequence[str]:
        """The names of the tensors of a packed vector."""

    def layout(self, d: int, dtype: torch.dtype) -> Sequence[Part]:
        """The form of each of `parts` for a vector (d,); empty ones are omitted."""

    def pack(self, x: Vector, generator: Generator) -> Sequence[Tensor]:
        """The tensors of x (d,), which is not changed; random numbers come from ``generator``."""

    def unpack(self, packed: Sequence[Tensor], d: int) -> Vector:
        """The vector (d,) that the server reads.

        packed: tensors of the `layout`; raises ValueError for values that `pack` cannot make.
        """


@dataclass(frozen=True)
class TopK:
    """The k = share d numbers of largest magnitude, and their places.

    The places are a bit for each number, or 16 bits for each number sent and a count for each
    block of 2^16, whichever is smaller.
    """

    share: float
    parts = "values", "places", "counts"

    def _is_mask(self, d: int) -> bool:
        return math.ceil(d / 8) <= 2 * size(self.share, d) + 4 * math.ceil(d / BLOCK)

    def layout(self, d: int, dtype: torch.dtype) -> Sequence[Part]:
        k = size(self.share, d)
        if self._is_mask(d):
            places, counts = Part(torch.uint8, math.ceil(d / 8)), Part(torch.int32, 0)
        else:
            places, counts = Part(torch.int16, k), Part(torch.int32, math.ceil(d / BLOCK))
        return Part(dtype, k), places, counts

    def pack(self, x: Vector, generator: Generator) -> Sequence[Tensor]:
        d = len(x)
        at = largest(x, size(self.share, d))
        if self._is_mask(d):
            mask = torch.zeros(d, dtype=torch.uint8, device=x.device).index_fill_(0, at, 1)
            places, counts = pack_bits(mask, 1), at.new_empty(0)
        else:
            places = (at % BLOCK - BLOCK // 2).to(torch.int16)
            counts = torch.bincount(at // BLOCK, minlength=math.ceil(d / BLOCK))
        return x.index_select(0, at), places, counts.to(torch.int32)

    def unpack(self, packed: Sequence[Tensor], d: int) -> Vector:
        values, places, counts = packed
        if self._is_mask(d):
            at = unpack_bits(places, 1, d).nonzero().squeeze(1)
        else:
            at = self._places(places, counts, len(values))
        ordered = len(at) == len(values) and bool((at.diff() > 0).all())
        if not ordered or (len(at) and int(at[-1]) >= d):
            raise ValueError(
                f"expected {len(values)} places in rising order from 0 to {d - 1}, got others"
            )
        return values.new_zeros(d).index_put_((at,), values)

    def _places(self, places: Tensor, counts: Tensor, k: int) -> Tensor:
        if bool((counts < 0).any()) or int(counts.sum()) != k:
            raise ValueError(f"expected counts of {k} places in all, got {int(counts.sum())}")
        blocks = torch.arange(len(counts), device=counts.device)
        return blocks.repeat_interleave(counts) * BLOCK + (places.long() + BLOCK // 2)


@dataclass(frozen=True)
class RandK:
    """k = share d numbers at the places start + j stride (mod d).

    Start and stride are drawn; stride and d are coprime. Each place has the probability k / d, and
    two numbers determine all places.

    scaled: times d / k, which makes it unbiased.
    """

    share: float
    scaled: bool
    parts = "values", "lattice"

    def layout(self, d: int, dtype: torch.dtype) -> Sequence[Part]:
        return Part(dtype, size(self.share, d)), Part(torch.int64, 2)

    def pack(self, x: Vector, generator: Generator) -> Sequence[Tensor]:
        d = stride = len(x)
        while math.gcd(stride, d) != 1:
            stride = int(torch.randint(1, max(2, d), (), generator=generator))
        start = int(torch.randint(d, (), generator=generator))
        k = size(self.share, d)
        values = x[lattice(start, stride, k, d).to(x.device)]
        if self.scaled:
            values *= d / k
        return values, torch.tensor([start, stride], device=x.device)

    def unpack(self, packed: Sequence[Tensor], d: int) -> Vector:
        values, (start, stride) = packed[0], packed[1].tolist()
        if not (0 <= start < d and 1 <= stride < max(2, d) and math.gcd(stride, d) == 1):
            raise ValueError(f"expected a start and a stride of {d} places, got {start}, {stride}")
        at = lattice(start, stride, len(values), d).to(values.device)
        return values.new_zeros(d).index_put_((at,), values)


@dataclass(frozen=True)
class Sign:
    """A bit for each number, and the mean magnitude; zero counts as positive."""

    parts = "signs", "scale"

    def layout(self, d: int, dtype: torch.dtype) -> Sequence[Part]:
        return Part(torch.uint8, math.ceil(d / 8)), Part(dtype, 1)

    def pack(self, x: Vector, generator: Generator) -> Sequence[Tensor]:
        scale = torch.linalg.vector_norm(x, 1).div_(len(x))
        return pack_bits((x >= 0).view(torch.uint8), 1), scale[None]

    def unpack(self, packed: Sequence[Tensor], d: int) -> Vector:
        signs, scale = packed
        x = unpack_bits(signs, 1, d).to(scale.dtype)
        return x.mul_(2).sub_(1).mul_(scale)


@dataclass(frozen=True)
class Levels:
    """2^bits - 1 levels between plus and minus the largest magnitude of each bucket.

    drawn: each number is rounded at random to one of its two neighbours, without bias (QSGD); else
    to the nearer one.
    """

    bits: int
    drawn: bool
    parts = "levels", "scales"

    @property
    def steps(self) -> int:
        """The number of levels from zero to the largest magnitude."""
        return (1 << (self.bits - 1)) - 1

    def layout(self, d: int, dtype: torch.dtype) -> Sequence[Part]:
        levels = Part(torch.uint8, math.ceil(d * self.bits / 8))
        return levels, Part(dtype, math.ceil(d / BUCKET))

    def pack(self, x: Vector, generator: Generator) -> Sequence[Tensor]:
        levels, scales = [], []
        for piece in torch.split(x, PIECE):
            buckets = _buckets(piece)
            scale = buckets.abs().amax(1).div_(self.steps)
            inverse = (1 / scale).nan_to_num_(nan=0, posinf=0)
            scaled = (buckets * inverse[:, None]).view(-1)[: len(piece)]
            scaled.add_(uniform(len(piece), generator).to(x) if self.drawn else 0.5)
            scaled.floor_().add_(self.steps)
            levels.append(pack_bits(scaled.to(torch.uint8), self.bits))
            scales.append(scale)
        return torch.cat(levels), torch.cat(scales)

    def unpack(self, packed: Sequence[Tensor], d: int) -> Vector:
        levels, scales = packed
        x = scales.new_empty(d)
        pieces = zip(
            torch.split(x, PIECE),
            torch.split(levels, PIECE * self.bits // 8),
            torch.split(scales, PIECE // BUCKET),
            strict=True,
        )
        for piece, some, scale in pieces:
            signed = unpack_bits(some, self.bits, len(piece)).to(x.dtype).sub_(self.steps)
            buckets = _buckets(signed)
            piece.copy_(buckets.mul_(scale[:, None]).view(-1)[: len(piece)])
        return x


@dataclass(frozen=True)
class Grid:
    """8 bits for each number: multiples of a power of two, the same for each bucket.

    Numbers on the grid are packed without loss; a broadcast is packed last of all. drawn: as in
    `Levels`.
    """

    drawn: bool
    dtype: torch.dtype  # of the vectors
    parts = "levels", "exponents"

    def layout(self, d: int, dtype: torch.dtype) -> Sequence[Part]:
        return Part(torch.int8, d), Part(torch.int8, math.ceil(d / BUCKET))

    def pack(self, x: Vector, generator: Generator) -> Sequence[Tensor]:
        levels, exponents = [], []
        for piece in torch.split(x, PIECE):
            buckets = _buckets(piece)
            half, exponent = torch.frexp(buckets.abs().amax(1).div_(127))
            exponent = (exponent - (half == 0.5).int()).clamp_(-126, 127)  # the next power of two
            scaled = (buckets / two_to(exponent, x.dtype)[:, None]).view(-1)[: len(piece)]
            scaled.add_(uniform(len(piece), generator).to(x) if self.drawn else 0.5)
            levels.append(scaled.floor_().clamp_(-127, 127).to(torch.int8))
            exponents.append(exponent.to(torch.int8))
        return torch.cat(levels), torch.cat(exponents)

    def unpack(self, packed: Sequence[Tensor], d: int) -> Vector:
        levels, exponents = packed
        x = levels.to(self.dtype)
        for piece, some in zip(
            torch.split(x, PIECE), torch.split(exponents, PIECE // BUCKET), strict=True
        ):
            scales = two_to(some, x.dtype).repeat_interleave(BUCKET)[: len(piece)]
            piece.mul_(scales)
        return x


def two_to(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=dtype), exponents.int())


@dataclass(frozen=True)
class BFloat16:
    """bfloat16, sent as int16. drawn: rounded at random to one of the two neighbours, without bias
    in float32; else to the nearest."""

    dtype: torch.dtype  # of the vectors
    drawn: bool = False
    parts = ("halves",)

    def layout(self, d: int, dtype: torch.dtype) -> Sequence[Part]:
        return (Part(torch.int16, d),)

    def pack(self, x: Vector, generator: Generator) -> Sequence[Tensor]:
        if self.drawn:
            words = torch.empty(len(x), dtype=torch.int32).random_(0, 2**16, generator=generator)
            words = words.to(x.device).add_(x.to(torch.float32).view(torch.int32))
            return ((words >> 16).to(torch.int16),)
        return (x.to(torch.bfloat16).view(torch.int16),)

    def unpack(self, packed: Sequence[Tensor], d: int) -> Vector:
        return packed[0].view(torch.bfloat16).to(self.dtype)


def checked(name: str, parts: Any, compressor: Compressor, like: Vector) -> Sequence[Tensor]:
    """The tensors of a packed vector like ``like``. Raises ValueError if they have another form."""
    rows = like.shape[:-1]
    layout = compressor.layout(like.shape[-1], like.dtype)
    for part, tensor, form in zip(compressor.parts, parts, layout, strict=True):
        shape = (*rows, form.numel)
        if tensor is None or tensor.shape != shape or tensor.dtype != form.dtype:
            got = "none" if tensor is None else f"{tuple(tensor.shape)} and {tensor.dtype}"
            raise ValueError(
                f"expected '{name}_{part}' of shape {shape} and {form.dtype}, got {got}"
            )
    whole: Sequence[Tensor] = parts
    return whole


def _buckets(x: Vector) -> Tensor:
    """(n, BUCKET), filled up with zeros."""
    return pad(x, (0, -len(x) % BUCKET)).view(-1, BUCKET)


def size(share: float, d: int) -> int:
    """k of d numbers, at least one."""
    return max(1, math.floor(share * d + 1e-9))


def largest(x: Vector, k: int) -> Tensor:
    """The places of the k largest magnitudes of x (d,), in rising order; ties: the first ones.

    A threshold below the k-th, estimated from a sample, leaves few candidates after one pass; the
    rest is exact. If it leaves fewer than k, all are candidates.
    """
    sample = x[:: max(1, len(x) // SAMPLES)].abs()
    rank = math.ceil(k * len(sample) / len(x) * 1.1) + 32
    at = magnitudes = None
    if rank < len(sample):
        bound = float(sample.topk(rank).values[-1])
        at = _above(x, bound)
        magnitudes = x.index_select(0, at).abs()
    if at is None or magnitudes is None or len(at) < k:
        at, magnitudes = torch.arange(len(x), device=x.device), x.abs()
    kth = magnitudes.kthvalue(len(at) - k + 1).values
    chosen = magnitudes >= kth
    if (more := int(chosen.count_nonzero()) - k) > 0:
        ties = (magnitudes == kth).nonzero().squeeze(1)
        chosen[ties[-more:]] = False
    indices = at.index_select(0, chosen.nonzero().squeeze(1))
    return indices if len(indices) == k else at[-k:]  # NaN: the reply is refused later


def _above(x: Vector, bound: float) -> Tensor:
    """The places of the numbers of at least this magnitude; a piece stays in the CPU's cache."""
    mask = torch.empty_like(x, dtype=torch.bool)
    for piece, part in zip(torch.split(x, PIECE), torch.split(mask, PIECE), strict=True):
        torch.ge(piece.abs(), bound, out=part)
    return mask.nonzero().squeeze(1)


def lattice(start: int, stride: int, k: int, d: int) -> Tensor:
    """The places start + j stride (mod d), j < k."""
    return torch.arange(k).mul_(stride).add_(start).remainder_(d)


def uniform(n: int, generator: Generator) -> Tensor:
    """(n,), uniform over the midpoints of 2^16 equal parts of (0, 1)."""
    words = torch.empty(math.ceil(n / 4), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:n].to(torch.float32).add_(2**15 + 0.5).div_(2**16)


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits (n,), uint8, as bytes; bits: 1, 2, 4 or 8."""
    per = 8 // bits
    if per == 1:
        return numbers
    words = pad(numbers, (0, -len(numbers) % per)).view(WORDS[per])  # each number is a byte
    top = 8 * (per - 1)  # the product has number j, shifted by bits j, in its highest byte
    factor = sum(1 << (top - (8 - bits) * j) for j in range(per))
    return (words * factor >> top).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """The n numbers that `pack_bits` packed."""
    per = 8 // bits
    if per == 1:
        return packed
    numbers = packed.new_empty(len(packed) * per)
    for j in range(per):
        numbers[j::per] = (packed >> (bits * j)) & (2**bits - 1)
    return numbers[:n]
