"""Vectors, and NamedTuples of vectors: what every method computes with, keeps and exchanges."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

LARGE = 2**20  # bytes from which a copy of its own is worth its launches
PIECE = 2**17  # numbers of a vector that a core's cache holds several times
Vector = Tensor  # (..., d): all parameters of a model, of one client (d,) or of a cohort (n, d)
Number = float | Tensor  # a tensor () possibly on a device whose work is not finished


def norm(v: Vector) -> Tensor:
    """The L2 norm of each vector; v (..., d) gives (..., 1), which broadcasts against v."""
    length: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return length


def clip_(g: Vector, bound: float) -> Vector:
    """Scale each vector of g down to a norm of at most ``bound``, in place; 0: leave it."""
    if not bound:
        return g
    scale = (bound / norm(g)).clamp_(max=1.0)
    if g.is_cpu and float(scale.min()) == 1.0:  # saves a pass over g; a GPU would have to wait
        return g
    return g.mul_(scale)


def length(v: Vector) -> Tensor:
    """The L2 norm (), of all numbers of v."""
    total: Tensor = torch.linalg.vector_norm(v)
    return total


def is_finite(v: Vector, total: float | None = None) -> bool:
    """Whether v holds neither NaN nor Inf, in one pass without a vector of answers.

    total: its `length`, where that is known already.
    """
    total = float(length(v)) if total is None else total  # may overflow where v is finite
    return math.isfinite(total) or bool(torch.isfinite(v).all())


def distances(xs: Sequence[Vector], centre: Vector) -> Tensor:
    """(n,), the L2 distance of each vector (d,) from a centre (d,), without one of differences.

    On a CPU piece by piece: what is read and written stays in its caches.
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
    """The numbers as floats. Those on a device are fetched together: it is waited for once, and
    whatever was copied from it before (see `to_device`) is there too."""
    found = [*numbers]
    there = {i: x for i, x in enumerate(found) if isinstance(x, Tensor) and not x.is_cpu}
    if there:
        kinds = {x.dtype: [i for i in there if there[i].dtype == x.dtype] for x in there.values()}
        stacks = [torch.stack([there[i] for i in kind]) for kind in kinds.values()]
        for i, value in zip(chain(*kinds.values()), torch.cat(stacks).cpu().tolist(), strict=True):
            found[i] = value
    return [float(x) if isinstance(x, Tensor) else x for x in found]


def to_device(v: Vector, device: torch.device | str) -> Vector:
    """``v`` on ``device``, or as it is where it lies there; a GPU is not waited for.

    To a GPU it goes from pinned memory, behind the work that waits there or `beside` it: from other
    memory the copy would wait for all of it. From a GPU it goes into pinned memory, and has its
    values once somebody has waited, as `fetch` does.
    """
    device = torch.device(device) if isinstance(device, str) else device
    if v.device == device:
        return v
    if v.is_cpu and device.type == "cuda":
        pinned = v.pin_memory()
        return beside(pinned, device) if v.nbytes > LARGE else pinned.to(device, non_blocking=True)
    return v.to(device, non_blocking=v.is_cuda)


def all_to_device(vectors: Any, device: torch.device | str) -> Any:
    """A NamedTuple of vectors on ``device``, as `to_device`."""
    return map_vectors(lambda v: to_device(v, device), vectors)


def beside(pinned: Vector, device: torch.device) -> Vector:
    """A copy on a GPU that does not wait for the work before it: the state of the next client goes
    there while the steps of this one are taken. The work after it waits for the copy."""
    here, lane = torch.cuda.current_stream(device), _lane(device)
    with torch.cuda.stream(lane):
        there = pinned.to(device, non_blocking=True)
    here.wait_stream(lane)
    there.record_stream(here)  # its memory is used there, and not to be reused before
    return there


@cache
def _lane(device: torch.device) -> Any:
    return cast(Any, torch.cuda.Stream)(device)  # its constructor is not annotated


def dtype_of(precision: str) -> torch.dtype:
    """What vectors are kept in; with bfloat16 only forward passes are.

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
    """(name, vector) of everything in ``value``; a nested one under dotted names, None left out."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif value is not None:
        for name, part in _parts(value):
            path = f"{prefix}.{name}" if prefix else str(name)
            if isinstance(part, Tensor):  # most are: an iterator for each would cost more
                yield path, part
            else:
                yield from leaves(part, path)


def map_vectors(change: Callable[..., Vector], value: Any, *others: Any) -> Any:
    """``value`` with ``change(v)`` for every vector v, or ``change(v, v_1, ...)`` where ``others``
    of the same structure are given."""
    if isinstance(value, Tensor):
        return change(value, *others)
    if value is None:
        return None
    if isinstance(value, dict):
        return {k: map_vectors(change, v, *(o[k] for o in others)) for k, v in value.items()}
    return type(value)(
        *(map_vectors(change, part, *rest) for part, *rest in zip(value, *others, strict=True))
    )


def fill(like: Any, vectors: Mapping[str, Vector], prefix: str = "") -> Any:
    """A value with the structure of ``like`` from the vectors that `leaves` named.

    A field that ``like`` has and ``vectors`` lacks becomes None; one that is None in ``like`` is
    taken where it is there. Raises ValueError where nothing of a nested field is there.
    """
    if isinstance(like, Tensor) or like is None:
        return vectors.get(prefix)
    if isinstance(like, dict):  # of vectors by round
        start = f"{prefix}."
        found = {n.removeprefix(start): v for n, v in vectors.items() if n.startswith(start)}
        return {int(name): v for name, v in found.items()}
    return type(like)(
        *(
            fill(part, vectors, f"{prefix}.{name}" if prefix else name)
            for name, part in _parts(like)
        )
    )


def nbytes(value: Any) -> int:
    """Of all vectors in ``value``."""
    return sum(v.nbytes for _, v in leaves(value))


def stack(values: Sequence[Any]) -> Any:
    """Values of one structure, a client each, as one whose vectors are (n, d), not to be changed.

    Raises ValueError where a field is None for some and a vector for others.
    """
    first = values[0]
    if isinstance(first, Tensor):
        if all(v is first for v in values):  # one that all share is not copied
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


def each_client(client: int | Sequence[int], draw: Callable[[int], Vector]) -> Vector:
    """``draw(i)`` (d,) of one client, or (n, d) of a cohort."""
    return draw(client) if isinstance(client, int) else torch.stack([draw(i) for i in client])


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return zip(value._fields, value, strict=True)
