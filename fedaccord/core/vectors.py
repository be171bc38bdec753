"""Vectors, and NamedTuples of vectors, which every method computes with, keeps and exchanges."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from fedaccord.core.options import listed

SIDE_STREAM_BYTES = 2**20  # above this size a copy on a side stream is worth its kernel launches
PIECE = 2**17  # elements; several pieces of this size fit into a core's cache
Vector = Tensor  # (..., d): all parameters of a model, of one client (d,) or of a cohort (n, d)
Number = float | Tensor  # a tensor () may be on a device that has not computed it yet


def norm(v: Vector) -> Tensor:
    """The L2 norm of each vector; v (..., d) gives (..., 1), which broadcasts against v."""
    length: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return length


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over many numbers: float64 if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def clip_(g: Vector, bound: float) -> Vector:
    """Scale each vector of g down to a norm of at most ``bound``, in place; 0: leave it.

    A vector whose norm overflows becomes NaN, as it diverged.
    """
    if not bound:
        return g
    length = norm(g)
    scale = (bound / length).add_(length - length).clamp_(max=1.0)  # bound / inf would be 0
    if g.is_cpu and float(scale.min()) == 1.0:  # saves a pass over g; on a GPU it would synchronise
        return g
    return g.mul_(scale)


def length(v: Vector) -> Tensor:
    """The L2 norm (), of all numbers of v."""
    total: Tensor = torch.linalg.vector_norm(v)
    return total


def is_finite(v: Vector, total: float | None = None) -> bool:
    """Whether v holds neither NaN nor Inf, in one pass without a temporary vector.

    total: its `length`, if that is known already.
    """
    total = float(length(v)) if total is None else total  # may overflow although v is finite
    return math.isfinite(total) or bool(torch.isfinite(v).all())


def distances(xs: Sequence[Vector], centre: Vector) -> Tensor:
    """(n,), the L2 distance of each vector (d,) from a centre (d,), without temporary vectors.

    On a CPU it works piece by piece, which stays in the caches.
    """
    if not centre.is_cpu or len(centre) <= PIECE:
        return torch.stack([torch.linalg.vector_norm(x - centre) for x in xs])
    pieces = zip(*(torch.split(v, PIECE) for v in (centre, *xs)), strict=True)
    parts = [distances(some, c) for c, *some in pieces]
    lengths: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return lengths


def each(x: Tensor) -> list[Number]:
    """The numbers of x (n,), those on a device as tensors ()."""
    return x.tolist() if x.is_cpu else [*x.unbind()]


def fetch(numbers: Iterable[Number]) -> list[float]:
    """The numbers as floats. Those on a device are fetched together, which synchronises once and
    also completes earlier copies from it (see `to_device`)."""
    values = [*numbers]
    on_device = {i: x for i, x in enumerate(values) if isinstance(x, Tensor) and not x.is_cpu}
    if on_device:
        kinds = {
            x.dtype: [i for i in on_device if on_device[i].dtype == x.dtype]
            for x in on_device.values()
        }
        stacks = [torch.stack([on_device[i] for i in kind]) for kind in kinds.values()]
        for i, value in zip(chain(*kinds.values()), torch.cat(stacks).cpu().tolist(), strict=True):
            values[i] = value
    return [float(x) if isinstance(x, Tensor) else x for x in values]


def to_device(v: Vector, device: torch.device | str) -> Vector:
    """``v`` on ``device``; unchanged if already there; does not synchronise.

    A copy to a GPU starts from pinned memory, after the queued work or `beside` it: from pageable
    memory it would synchronise. A copy from a GPU ends in pinned memory and is complete after the
    next synchronisation, such as `fetch`.
    """
    device = torch.device(device) if isinstance(device, str) else device
    if v.device == device:
        return v
    if v.is_cpu and device.type == "cuda":
        pinned = v.pin_memory()
        is_large = v.nbytes > SIDE_STREAM_BYTES
        return beside(pinned, device) if is_large else pinned.to(device, non_blocking=True)
    return v.to(device, non_blocking=v.is_cuda)


def index_rows(samples: Tensor, rows: Tensor) -> Tensor:
    """samples[rows] (n, ...), rows (n,) from 0; for images 20 times as fast."""
    return samples.index_select(0, to_device(rows, samples.device))


def all_to_device(vectors: Any, device: torch.device | str) -> Any:
    """A NamedTuple of vectors on ``device``, as `to_device`."""
    return map_vectors(lambda v: to_device(v, device), vectors)


def beside(pinned: Vector, device: torch.device) -> Vector:
    """Copy to the GPU on a side stream: the next client's state is copied while this client's steps
    are computed. Later work on the GPU waits for the copy."""
    here, lane = torch.cuda.current_stream(device), _lane(device)
    with torch.cuda.stream(lane):
        copy = pinned.to(device, non_blocking=True)
    here.wait_stream(lane)
    copy.record_stream(here)  # its memory is not reused before that stream is done
    return copy


@cache
def _lane(device: torch.device) -> Any:
    return cast(Any, torch.cuda.Stream)(device)  # its constructor is not annotated


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of vectors; the precision bfloat16 affects forward passes only.

    Raises ValueError if this version does not know the precision.
    """
    if precision not in DTYPES:
        raise ValueError(
            f"precision: expected one of {', '.join(DTYPES)}, got {precision!r:.40}: install the "
            "same version on server and clients"
        )
    return DTYPES[precision]


DTYPES = {"float64": torch.float64} | dict.fromkeys(("float32", "bfloat16", "tf32"), torch.float32)


# --- NamedTuples of vectors, nested, with None and with dicts of vectors by round -----------------


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Vector]]:
    """(name, vector) of every vector in ``value``; nested ones have dotted names."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif value is not None:
        for name, part in _parts(value):
            path = f"{prefix}.{name}" if prefix else str(name)
            if isinstance(part, Tensor):  # the usual case, without another generator
                yield path, part
            else:
                yield from leaves(part, path)


def versions(*values: Any) -> list[int]:
    """How often each vector in ``values`` was changed in place."""
    return [v._version for value in values for _, v in leaves(value)]


def map_vectors(change: Callable[..., Vector], value: Any, *others: Any) -> Any:
    """``value`` with ``change(v)`` for every vector v, or ``change(v, v_1, ...)`` with the vectors
    of ``others``, which have the same structure."""
    if isinstance(value, Tensor):
        return change(value, *others)
    if value is None:
        return None
    if isinstance(value, dict):
        return {k: map_vectors(change, v, *(o[k] for o in others)) for k, v in value.items()}
    return type(value)(
        *(map_vectors(change, part, *rest) for part, *rest in zip(value, *others, strict=True))
    )


def fill(like: Any, vectors: Mapping[str, Vector]) -> Any:
    """A value with the structure of ``like`` from the vectors that `leaves` named.

    A field that is None in ``like`` is filled if ``vectors`` has it. Raises ValueError, in one
    line, if a vector of ``like`` is missing, or one of ``vectors`` has no place in it.
    """
    value = _filled(like, vectors)
    present, required = dict(leaves(value)).keys(), dict(leaves(like)).keys()
    if present != vectors.keys() or not required <= present:
        raise ValueError(
            f"expected a state of the vectors {listed(sorted(required))}, got "
            f"{listed(sorted(vectors))}"
        )
    return value


def _filled(like: Any, vectors: Mapping[str, Vector], prefix: str = "") -> Any:
    if isinstance(like, Tensor) or like is None:
        return vectors.get(prefix)
    if isinstance(like, dict):  # of vectors by round
        start = f"{prefix}."
        by_round = {n.removeprefix(start): v for n, v in vectors.items() if n.startswith(start)}
        return {int(name): v for name, v in by_round.items()}
    return type(like)(
        *(
            _filled(part, vectors, f"{prefix}.{name}" if prefix else name)
            for name, part in _parts(like)
        )
    )


def nbytes(value: Any) -> int:
    """The bytes of all vectors in ``value``."""
    return sum(v.nbytes for _, v in leaves(value))


def stack(values: Sequence[Any]) -> Any:
    """Values of n clients, of one structure, as one value with vectors (n, d), not to be changed.

    Raises ValueError if a field is None for some clients and a vector for others.
    """
    first = values[0]
    if isinstance(first, Tensor):
        if all(v is first for v in values):  # a vector that all share is not copied
            return first.expand(len(values), *first.shape)
        if all(isinstance(v, Tensor) for v in values):
            return torch.stack(tuple(values))
    elif first is None:
        if all(v is None for v in values):
            return None
    else:
        return type(first)(*map(stack, zip(*values, strict=True)))
    raise ValueError("stack: expected a field that all clients have or none, got a mixture")


def row(value: Any, i: int) -> Any:
    """Client i of a stack."""
    return map_vectors(lambda v: v[i], value)


def generator(key: str) -> torch.Generator:
    """An independent generator for each key, such as "compress", seed, round and client."""
    return torch.Generator().manual_seed(random.Random(key).getrandbits(63))


def each_client(
    client: int | Sequence[int], of_one: Callable[..., Vector], *vectors: Vector
) -> Vector:
    """``of_one(i, *vectors)`` (d,) of one client; (n, d) of a cohort, whose vectors have rows."""
    if isinstance(client, int):
        return of_one(client, *vectors)
    return torch.stack([of_one(i, *rows) for i, *rows in zip(client, *vectors, strict=True)])


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return zip(value._fields, value, strict=True)
