"""A rounded broadcast, as a plug-in of most methods with a server.

Stochastic rounding of the server's messages; for the clients' messages see compress.py.

    server  sends Q(w^t), and Q(v) for each other vector v of the broadcast
    client  steps from Q(w^t);  uploads, and remembers, from w_{i,K} - Q(w^t)
    server  reads w^t + (w_{i,K} - Q(w^t)) for w_{i,K}

    bf16    bfloat16
    int8    255 multiples of a power of two, the same for 512 numbers

Each number is rounded at random to one of its two neighbours, without bias; Q has no memory.
Random numbers come from (seed, round), and all clients of a round read the same broadcast.

When to use: if downloads are slow. The server keeps the exact w^t, so rounding errors do not
accumulate; clients start from a point near w^t, as with noise, and methods stay near the optimum
instead of at it. bf16 halves the download, int8 leaves a quarter.

Where we differ: there is no paper. Vectors that clients add to memory are sent exactly (the steps
that a client of A-FedPD missed, SCAFFOLD's c if uploads are one vector): mean(c_i) = c and
mean(lam_i) = lam_bar hold as without rounding. Clients whose memory begins at w^0 receive it
exactly, beside the rounded broadcast.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Generator

from fedaccord.core.method_settings import has_gossip
from fedaccord.core.options import argument, option
from fedaccord.core.plugin import PlugIn
from fedaccord.core.rule import Rounding
from fedaccord.core.topology import ServerHalf
from fedaccord.core.vectors import Vector, generator, nbytes
from fedaccord.plugins._compressors import BFloat16, Compressor, Grid, checked


@dataclass(frozen=True, kw_only=True)
class Broadcast(PlugIn):
    dtype: str = option(
        "bf16",
        "type to which the numbers of a broadcast are rounded, at random and without bias",
        choices=("float32", "bf16", "int8"),
        auto=True,
    )
    exact: str = argument("", "set by `fit`: the vectors that are not rounded", shown=False)

    @property
    def is_off(self) -> bool:
        return self.dtype == "float32"

    def fit(self, method: ServerHalf) -> "Broadcast":
        super().fit(method)
        wrong = f"broadcast.dtype: expected float32 with {type(method).__name__}, got {self.dtype}"
        if has_gossip(method):
            raise ValueError(f"{wrong}: under gossip no server broadcasts")
        if method.own_state() == "average":
            raise ValueError(f"{wrong}: optimizer-state=average sends the optimisers' vectors")
        if get_type_hints(method.rule().receives)["w"] is not Vector:
            raise ValueError(f"{wrong}: its clients also start from models of their own")
        return replace(self, exact=",".join(method.rule().exact))

    def rounding(self) -> Rounding:
        return self

    def _compressor(self, dtype: torch.dtype, drawn: bool) -> Compressor:
        return BFloat16(dtype, drawn) if self.dtype == "bf16" else Grid(drawn, dtype)

    def _is_rounded(self, name: str) -> bool:
        return name not in self.exact.split(",")

    def rounded(self, v: Vector, seed: int, round: int, name: str) -> Vector:
        compressor, own = self._compressor(v.dtype, True), f"broadcast {seed} {round} {name}"
        return compressor.unpack(compressor.pack(v, generator(own)), len(v))

    # on the wire

    def packed(self, kind: Any) -> Any:
        fields, parts = [], self._compressor(torch.float32, drawn=False).parts
        for name, hint in get_type_hints(kind).items():
            names = [f"{name}_{part}" for part in parts] if self._is_rounded(name) else [name]
            fields += [(each, hint) for each in names]
        return NamedTuple(f"Rounded{kind.__name__}", fields)

    def pack(self, down: Any) -> Any:
        vectors = list[Any]()
        for name, v in down._asdict().items():
            if not self._is_rounded(name):
                vectors.append(v)
                continue
            compressor = self._compressor(v.dtype, drawn=False)
            vectors += compressor.pack(v, Generator())  # on the grid already: exact
        return self.packed(type(down))(*vectors)

    def unpack(self, packed: Any, kind: Any, like: Vector) -> Any:
        compressor, parts, vectors = self._compressor(like.dtype, False), [*packed], list[Any]()
        for name in kind._fields:
            if not self._is_rounded(name):
                v = parts.pop(0)
                if v is not None and (v.shape, v.dtype) != (like.shape, like.dtype):
                    raise ValueError(
                        f"expected {name!r} of shape {tuple(like.shape)} and {like.dtype}, got "
                        f"{tuple(v.shape)} and {v.dtype}"
                    )
                vectors.append(v)
                continue
            size = len(compressor.parts)
            own, parts = parts[:size], parts[size:]
            vectors.append(compressor.unpack(checked(name, own, compressor, like), len(like)))
        return kind(*vectors)

    def nbytes(self, down: Any) -> int:
        total = 0
        for name, v in down._asdict().items():
            if v is not None and self._is_rounded(name):
                layout = self._compressor(v.dtype, False).layout(len(v), v.dtype)
                total += sum(part.numel * part.dtype.itemsize for part in layout)
            else:
                total += nbytes(v)
        return total
