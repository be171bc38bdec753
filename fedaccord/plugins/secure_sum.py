"""Secure sums: the server reads the sum of a round's uploads, but no single upload.

SecAgg+: Bell, Bonawitz, Gascon, Lepoint, Raykova: Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead. CCS 2020, eprint 2020/704. The protocol: fedaccord/secure.

    client  u_i, each field of the upload as an update, each number clipped to [-R, R]
            q_i = (u_i + R) / h rounded up or down at random, unbiased,  h = 2 R / (2^bits - 1)
            sent: q_i + masks                          uniform over 32 or 64 bits
    server  mean of a field: h (sum_i q_i) / P - R     exact: the masks cancel

A client's memory (c_i, lam_i) is computed from its own h q_i - R: sums over the clients' memories
still equal the server's memory.

When to use: if the server may know the sum of a round's uploads, but no single upload.
[What the server sees, and what is not covered](../secure-sums.md).

With dp a client scales its upload of n numbers, before the rounding, to a norm of at most
S - h sqrt(n); after it the norm is at most S. The server adds noise to the sum.

Where we differ: the graph of neighbours is drawn among the clients that replied to the first stage;
weights are uniform.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch

from fedaccord.core.cohort import Decoded
from fedaccord.core.method_settings import PER_CLIENT, expect, has_gossip, in_use
from fedaccord.core.options import argument, option
from fedaccord.core.plugin import MASK, PlugIn
from fedaccord.core.privacy import Masking, Privacy, clipped
from fedaccord.core.rule import LocalResult
from fedaccord.core.topology import ServerHalf
from fedaccord.core.vectors import Vector, each_client, generator, leaves

log = logging.getLogger("flwr")

CLIPPED = 0.01  # share of an upload's numbers outside of [-R, R], above which a client warns


@cache
def _warn_once(bound: float) -> None:
    log.warning(
        "secure-sum.range: more than %.0f%% of an upload's numbers were clipped to %g: raise it",
        100 * CLIPPED,
        bound,
    )


@dataclass(frozen=True, kw_only=True)
class SecureSum(PlugIn):
    place: ClassVar[int] = MASK
    loses: ClassVar[bool] = True

    method: str = option(
        "secagg+",
        "whether the server reads only sums of uploads",
        choices=("off", "secagg+"),
        auto=True,
    )
    range: float = option(
        8.0, "R: each number of an upload, as an update, is clipped to [-R, R]", above=0
    )
    bits: int = option(24, "bits of each number", low=2, high=48)
    neighbours: int = option(
        20, "clients with which a client shares masks and secrets; all if there are fewer", low=2
    )
    threshold: float = option(
        0.6,
        "share of a client and its neighbours that must remain until the end of a round, always "
        "more than half of them",
        low=0.5,
        high=1,
        affects="rounds",
    )
    models: str = argument("", "set by `fit`: the fields of an upload that are models", shown=False)
    clip: float = argument(
        0.0, "set by `at`: S of dp, which a rounded upload does not exceed; 0: no dp", shown=False
    )

    @property
    def is_off(self) -> bool:
        return self.method == "off"

    def fit(self, method: ServerHalf) -> "SecureSum":
        super().fit(method)
        name, off = type(method).__name__, "secure-sum.method: expected off with"
        if has_gossip(method):
            raise ValueError(f"{off} gossip in {name}: no server takes a sum")
        if method.beyond_sums:
            raise ValueError(
                f"{off} {name}, whose server step reads {method.beyond_sums}: use fedavg, "
                "scaffold or another method that reads sums alone"
            )
        for plugin in in_use(method):
            if plugin.unmaskable:
                raise ValueError(f"{off} {plugin.unmaskable}")
            if plugin.sends_start_to(method):
                raise ValueError(f"{off} {name}, for which clients send their starts too")
        beside = "with secure-sum"
        for key, values in (PER_CLIENT | {"schedule": ["synchronous"]}).items():
            expect(method, key, values, beside)
        why = "whose stages are not simulated"
        expect(method, "device-profile", ["none"], f"{beside}, {why}")
        beside += ", whose server sees no client's upload"
        why = "; max-update-norm bounds the round's step"
        expect(method, "max-client-norm", [0], beside, why)
        return replace(self, models=",".join(method.rule().models))

    def advice(self, method: ServerHalf, share: float) -> str:
        _warn_once.cache_clear()  # of an earlier run in this process
        return ""

    def masking(self) -> Masking:
        return Masking(bits=self.bits, neighbours=self.neighbours, threshold=self.threshold)

    def at(self, privacy: Privacy) -> "SecureSum":
        return replace(self, clip=privacy.clip)

    def check_size(self, numbers: int) -> None:
        if self.clip:
            self.bound(numbers)

    @property
    def step(self) -> float:
        """h, the rounding step."""
        return 2 * self.range / float(2**self.bits - 1)

    # the messages

    def encode(self, up: Any, down: Any, state: Any, result: LocalResult) -> tuple[Any, Any]:
        config, models = result.config, self.models.split(",")
        seed, t = config.seed, config.round
        own = {i: generator(f"secure sum {seed} {t} {i}") for i in config.clients}
        updates = {n: v - down.w if n in models else v for n, v in leaves(up)}
        if self.clip:
            bound = self.bound(sum(u.shape[-1] for u in updates.values()))
            updates = dict(leaves(clipped(up._replace(**updates), down.w, (), bound)))
        sent: dict[str, Any] = {}
        for name, u in updates.items():
            sent[name] = each_client(config.client, lambda i, x: self.quantised(x, own[i]), u)
        return up._replace(**sent), None

    def bound(self, size: int) -> float:
        """The largest norm of ``size`` numbers whose rounded form has a norm of at most S.

        Raises ValueError if the rounding alone may exceed S.
        """
        error = self.step * math.sqrt(size)
        if error >= self.clip:
            raise ValueError(
                f"secure-sum: expected rounding of {size:,} numbers within dp.clip={self.clip:g}, "
                f"got {error:.3g}: raise secure-sum.bits, or lower secure-sum.range"
            )
        return self.clip - error

    def quantised(self, u: Vector, generator: torch.Generator) -> Vector:
        """q (d,) int64 in [0, 2^bits), whose mean over the random numbers is (u + R) / h for u in
        [-R, R]. Raises ValueError for numbers that are not finite."""
        if not bool(torch.isfinite(u).all()):
            raise ValueError("secure-sum: the upload holds NaN or Inf; lower lr or clip-norm")
        beyond = int((u.abs() > self.range).sum()) / len(u)
        if beyond > CLIPPED:
            _warn_once(self.range)
        x = _wide(u).clamp(-self.range, self.range).add_(self.range).div_(self.step)
        draws = torch.rand(len(u), generator=generator, dtype=torch.float64).to(x.device)
        return (x + draws).floor_().to(torch.int64).clamp_(0, 2**self.bits - 1)

    def decode(self, decoded: Decoded, kind: Any, down: Any, like: Vector) -> Decoded:
        """The upload from a client's own integers, or from their mean over a round's clients."""

        def read(name: str, q: Vector) -> Vector:
            if q.shape != like.shape:
                raise ValueError(
                    f"expected {name!r} of shape {tuple(like.shape)}, got {tuple(q.shape)}"
                )
            u = (_wide(q) * self.step - self.range).to(like.dtype).to(down.w.device)
            return u.add_(down.w) if name in self.models.split(",") else u

        up = decoded.up
        vectors = {name: read(name, q) for name, q in leaves(up)}
        return decoded._replace(up=up._replace(**vectors))


def _wide(v: torch.Tensor) -> torch.Tensor:
    """float64, on the host if the device has none."""
    return (v.cpu() if v.device.type == "mps" else v).double()
