"""Compressed uploads, as a plug-in of most methods with a server.

Top-k: Stich, Cordonnier, Jaggi: Sparsified SGD with Memory. NeurIPS 2018, arXiv:1809.07599. Sign:
Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression
Schemes. ICML 2019, arXiv:1901.09847. QSGD: Alistarh, Grubic, Li, Tomioka, Vojnovic. NeurIPS 2017,
arXiv:1610.02132. Memories that follow the upload: SCALLION, arXiv:2308.08165, for SCAFFOLD.

    client  u_i = w_{i,K} - w^t for a model, the field itself for all else;   p = u_i (+ e_i)
            sends E(p);   e_i <- p - D(E(p))  with error feedback
            computes c_i, lam_i, ... from D(E(p)), which the server reads
    server  reads w^t + D(E(p)) for a model, D(E(p)) for all else

    topk    the share d numbers of largest magnitude
    randk   share d numbers at random places
    sign    a bit for each number, and their mean magnitude
    qsgd    `bits` bits for each number, rounded at random between two levels, without bias
    bf16    bfloat16
    int8    255 levels for each number, rounded to the nearest

qsgd and int8 have one scale for 512 numbers, their largest magnitude.

When to use: if uploads are slow or expensive. If the server sums up the clients' memories
(SCAFFOLD, FedDyn, A-FedPD), the optimum stays exact without error feedback: the memory lacks the
same part as the upload, and later rounds correct it. Error feedback would correct it twice, and
such methods diverge at small shares, so `auto` is off for them; it is on for other methods if the
compressor is biased. Error feedback costs a client one vector for each that it uploads.

Where we differ: the scale of qsgd is the largest magnitude; the paper's norm is larger, and its
rounding coarser. randk draws a lattice of places, start + j stride: each place has the paper's
probability, and the error the same mean square, but pairs of places are not independent. Its
numbers are scaled by d / k unless a memory corrects the error, or noise is added to the sum, whose
clip they would exceed. sign sends zero as positive.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import torch

from fedaccord.core.cohort import Decoded
from fedaccord.core.method_settings import OWN_STATES, expect, has_gossip, in_use
from fedaccord.core.options import argument, option
from fedaccord.core.plugin import COMPRESS, PlugIn
from fedaccord.core.privacy import has_noisy_sums
from fedaccord.core.rule import LocalResult
from fedaccord.core.topology import ServerHalf
from fedaccord.core.vectors import Vector, generator
from fedaccord.plugins._compressors import (
    BFloat16,
    Compressor,
    Levels,
    RandK,
    Sign,
    TopK,
    checked,
)

SPARSE = ("topk", "randk")  # methods that send a share of the numbers


class CompressState(NamedTuple):
    errors: Any  # e_i, a vector (..., d) for each uploaded one; empty: no error feedback
    base: Any  # the method's own client state


@cache
def named(title: str, fields: tuple[str, ...], kind: Any) -> Any:
    """A NamedTuple type with these fields, all of one type."""
    return NamedTuple(title, [(name, kind) for name in fields])


@cache
def packed_type(kind: Any, parts: tuple[str, ...]) -> Any:
    """An upload's type with packed tensors instead of its vectors."""
    hints = get_type_hints(kind)
    fields = [(f"{name}_{part}", hints[name]) for name in kind._fields for part in parts]
    return NamedTuple(f"Packed{kind.__name__}", fields)


@dataclass(frozen=True, kw_only=True)
class Compress(PlugIn):
    place = COMPRESS
    loses = True
    unmaskable = "compress.method: masked numbers are not compressible"

    method: str = option(
        "topk",
        "how the vectors of an upload are compressed",
        choices=("none", "topk", "randk", "sign", "qsgd", "bf16", "int8"),
        auto=True,
    )
    share: float = option(
        0.1,
        "share of a vector's numbers that is sent",
        above=0,
        high=1,
        only={"method": SPARSE},
    )
    bits: int = option(4, "bits of a number: 2, 4 or 8", low=2, high=8, only={"method": ["qsgd"]})
    error_feedback: str = option(
        "auto",
        "clients add the error of the last upload to the next; auto: with biased compressors, for "
        "methods whose server does not sum up the clients' memories, without dp",
        choices=("auto", "true", "false"),
    )
    fields: str = argument("", "set by `fit`: the names of the vectors of an upload", shown=False)
    models: str = argument("", "set by `fit`: the names of the models among them", shown=False)
    scaled: bool = argument(False, "set by `fit`: randk sends its numbers times d / k", shown=False)

    @property
    def is_off(self) -> bool:
        return self.method == "none" or (self.method in SPARSE and self.share == 1)

    @property
    def sent_share(self) -> float:
        return self.share if self.method in SPARSE else 1.0

    def fit(self, method: ServerHalf) -> "Compress":
        super().fit(method)
        if self.method == "qsgd" and self.bits not in (2, 4, 8):
            raise ValueError(f"compress.bits: expected 2, 4 or 8, got {self.bits}")
        if has_gossip(method):
            raise ValueError(
                f"compress.method: expected none with gossip, got {self.method!r}: a node would "
                "need a memory for each neighbour"
            )
        why = ": the optimisers' vectors are uploaded whole"
        beside = f"with compress.method={self.method}"
        expect(method, "optimizer-state", OWN_STATES, beside, why)
        kind, rule = method.rule().sends, method.rule()
        for plugin in in_use(method):
            if plugin.place < self.place:
                kind = plugin.fit(method).sends(kind)
        models = {*rule.models, *(name for name in kind._fields if name not in rule.sends._fields)}
        feedback, follows = self.error_feedback, method.tied and not rule.is_stateless
        private = has_noisy_sums(in_use(method))
        if private and feedback == "true":
            raise ValueError(
                "compress.error-feedback: expected auto or false with dp, got 'true': an upload "
                "with the last error is longer than the clip, and what the server cuts off is in "
                "no memory"
            )
        if feedback == "auto":
            off = follows or private or self.method == "qsgd"
            feedback = "false" if off else "true"
        return replace(
            self,
            error_feedback=feedback,
            scaled=feedback == "false" and not follows and not private,
            fields=",".join(kind._fields),
            models=",".join(name for name in kind._fields if name in models),
        )

    @property
    def has_errors(self) -> bool:
        """Whether clients add the error of the last upload to the next."""
        return self.error_feedback == "true"

    def compressor(self, dtype: torch.dtype) -> Compressor:
        compressors: dict[str, Compressor] = {
            "topk": TopK(self.share),
            "randk": RandK(self.share, self.scaled),
            "sign": Sign(),
            "qsgd": Levels(self.bits, drawn=True),
            "bf16": BFloat16(dtype),
            "int8": Levels(8, drawn=False),
        }
        return compressors[self.method]

    # the client half

    def init(self, w: Vector, w_init: Vector, base: Any) -> CompressState:
        names = tuple(self.fields.split(",")) if self.has_errors else ()
        kind = named("Errors", names, Vector)
        return CompressState(kind(*(torch.zeros_like(w) for _ in names)), base)

    def base(self, state: CompressState) -> Any:
        return state.base

    def encode(
        self, up: Any, down: Any, state: CompressState, result: LocalResult
    ) -> tuple[Any, CompressState]:
        config, sent = result.config, list[Any]()
        compressor, errors = self.compressor(result.w_K.dtype), dict[str, Vector]()
        one, seed, t = isinstance(config.client, int), config.seed, config.round
        generators = [generator(f"compress {seed} {t} {i}") for i in config.clients]
        for name, vector in up._asdict().items():
            if vector is None:
                sent += [None] * len(compressor.parts)
                continue
            p = vector - down.w if self._is_update(name, down) else vector
            if self.has_errors:
                p = p + getattr(state.errors, name)
            rows = [p] if one else [*p]
            packed = [compressor.pack(x, g) for x, g in zip(rows, generators, strict=True)]
            if self.has_errors:
                read = [compressor.unpack(parts, p.shape[-1]) for parts in packed]
                errors[name] = p - (read[0] if one else torch.stack(read))
            sent += packed[0] if one else map(torch.stack, zip(*packed, strict=True))
        kind = self.sends(type(up))
        return kind(*sent), CompressState(state.errors._replace(**errors), None)

    def _is_update(self, name: str, down: Any) -> bool:
        """Whether a vector is sent as its change from w^t."""
        return name in self.models.split(",") and down.w is not None

    # the server half

    def sends(self, kind: Any) -> Any:
        return packed_type(kind, tuple(self.compressor(torch.float32).parts))

    def wire_share(self, like: Vector) -> float:
        layout = self.compressor(like.dtype).layout(len(like), like.dtype)
        return sum(part.numel * part.dtype.itemsize for part in layout) / like.nbytes

    def decode(self, decoded: Decoded, kind: Any, down: Any, like: Vector) -> Decoded:
        compressor, d, vectors = self.compressor(like.dtype), like.shape[-1], list[Any]()
        size = len(compressor.parts)
        for j, name in enumerate(kind._fields):
            parts = decoded.up[j * size : (j + 1) * size]
            if all(part is None for part in parts):
                vectors.append(None)
                continue
            parts = checked(name, parts, compressor, like)
            try:
                if like.ndim == 1:
                    vector = compressor.unpack(parts, d)
                else:
                    rows = zip(*parts, strict=True)
                    vector = torch.stack([compressor.unpack(row, d) for row in rows])
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
            vectors.append(vector.add_(down.w) if self._is_update(name, down) else vector)
        return decoded._replace(up=kind(*vectors))
