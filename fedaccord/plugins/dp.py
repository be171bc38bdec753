"""Client-level differential privacy: clipped uploads, Gaussian noise on their sums or on each.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR
2018, arXiv:1710.06963. The adaptive clip: Andrew, Thakkar, McMahan, Ramaswamy: Differentially
Private Learning with Adaptive Clipping. NeurIPS 2021, arXiv:1905.03871. Formulas: core/privacy.py.

    cohort  each client by itself with probability q = fraction-train        sampling=bernoulli
    client  u_i <- u_i min(1, S / ||u_i||),  u_i all fields of the upload as updates
    server  mean of a field: (sum_i u_i + N(0, (z S)^2)) / (q C)

The server then reads only these means, so the models, the broadcasts and their metrics are
(epsilon, delta)-private for every method whose server step reads uploads through sums. A client's
memory (c_i, lam_i) is computed from its clipped upload, as the server's.

With `dp.where=client` each client adds the noise to its own upload, and no server needs to be
trusted:

    client  sends u_i + N(0, (z S)^2), each field with noise of its own
    server  the method's bare step

Two uploads differ by at most 2 S, so a round costs as much as noise of the multiplier z / 2 without
sampling, because the server sees who takes part. Memories are computed from the noised upload.

When to use: if the model is published and must not reveal whether a client took part. Noise of
the sums hurts less with more clients a round: use as many as possible. By default the server is
trusted to add the noise; without that trust the same budget needs noise on every upload, about
sqrt(P) times as much on their mean. [What the guarantee covers](../privacy.md).

Where we differ: weights are uniform, and the denominator q C is the paper's first estimator. The
server clips every upload again, as a client may send anything, unless it is noised already.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fedaccord.core.cohort import Decoded
from fedaccord.core.method_settings import PER_CLIENT, expect, has_gossip, in_use
from fedaccord.core.options import argument, option, options
from fedaccord.core.plugin import CLIP, COMPRESS, PlugIn
from fedaccord.core.privacy import Guarantee, Privacy, add_noise_, clipped, secret, seeded
from fedaccord.core.rule import LocalConfig, LocalResult
from fedaccord.core.topology import ServerHalf
from fedaccord.core.vectors import Vector


@dataclass(frozen=True, kw_only=True)
class DP(PlugIn):
    place: ClassVar[int] = CLIP
    loses: ClassVar[bool] = True

    clip: float = option(
        1.0, "S, largest L2 norm of a client's upload, all fields as updates", above=0, auto=True
    )
    epsilon: float = option(
        0.0, "privacy budget of all rounds, which sets the noise; 0: see noise-multiplier",
        low=0,
    )  # fmt: skip
    noise_multiplier: float = option(
        -1.0,
        "z: the noise, on a sum or on each upload, has deviation z S; -1: see epsilon",
        low=0,
        besides=-1,
    )
    where: str = option(
        "server",
        "who adds the noise: the server to the sums, or each client to its upload, if the server "
        "is not trusted",
        choices=("server", "client"),
    )
    delta: float = option(1e-5, "delta of the guarantee, below 1 / C", above=0, high=0.1)
    max_epsilon: float = option(
        0.0,
        "the run ends before a round that would exceed it; 0: epsilon, if set",
        low=0,
        affects="rounds",
    )
    adaptive_clip: bool = option(
        False, "S follows the median norm of the uploads, which costs a part of the budget"
    )
    write_client_metrics: bool = option(
        False,
        "send and write numbers of single clients and their means (losses, examples), which the "
        "guarantee does not cover",
        affects="records",
    )
    models: str = argument(
        "w", "set by `fit`: the fields of the upload that are models, with commas", shown=False
    )

    @classmethod
    def is_set(cls, values: Mapping[str, Any]) -> bool:
        """True if any of its options is set: an incomplete setting is refused, never ignored."""
        return any(values.get(f.name, f.default) != f.default for f in options(cls)) or (
            "clip" in values
        )

    def fit(self, method: ServerHalf) -> "DP":
        super().fit(method)
        if (self.epsilon > 0) == (self.noise_multiplier >= 0):
            raise ValueError(
                "dp: expected one of dp.epsilon and dp.noise-multiplier, got "
                f"{'both' if self.epsilon else 'none'}; set dp.epsilon=4 for a budget, or "
                "dp.noise-multiplier=0 for clipped uploads without noise"
            )
        name = type(method).__name__
        if has_gossip(method):
            raise ValueError(f"dp: expected none with gossip in {name}: it has no server")
        if self.where == "client":
            self._check_local(method)
        else:
            self._check_sums(method)
        for plugin in in_use(method):
            if plugin.sends_start_to(method):
                raise ValueError(
                    f"dp: expected no {type(plugin).__name__} with {name}, for which clients send "
                    "their starts too"
                )
        for key, values in PER_CLIENT.items():
            expect(method, key, values, "with dp")
        return replace(self, models=",".join(method.rule().models))

    def _check_sums(self, method: ServerHalf) -> None:
        """Raise ValueError, in one line, if noise on sums does not make the method private."""
        name = type(method).__name__
        if method.beyond_sums:
            raise ValueError(
                f"dp: expected none with {name}, whose server step reads {method.beyond_sums}: "
                "noise is on sums; use fedavg, scaffold or another method that reads sums alone, "
                "or dp.where=client"
            )
        why = ": the guarantee assumes that clients are drawn independently"
        if method.all_clients:  # which are not drawn
            why += f", and {name} needs all in every round"
        expect(method, "sampling", ["bernoulli"], "with dp", why)
        for plugin in in_use(method):
            kind = type(plugin).__name__
            if plugin.replaces_mean:
                raise ValueError(f"dp: expected no {kind}: noise is on sums, not on other means")
            if plugin.place == COMPRESS and self.adaptive_clip:
                raise ValueError(
                    f"dp.adaptive-clip: expected false with {kind}, got true: the clip follows the "
                    "norms that the server reads, and compression changes them"
                )
        why = ": dp.clip bounds every upload already"
        expect(method, "max-client-norm", [0], "with dp", why)
        expect(method, "min-replies", [1], "with dp", ": an empty cohort is a round too")

    def _check_local(self, method: ServerHalf) -> None:
        """Raise ValueError, in one line, if a client would send more than its noised upload."""
        if self.adaptive_clip:
            raise ValueError(
                "dp.adaptive-clip: expected false with dp.where=client, got true: the norm of an "
                "upload is private too"
            )
        if not method.steps_of_round(0) and not self.write_client_metrics:
            raise ValueError(
                "local-steps: expected a fixed number with dp.where=client, got 0: with "
                "local-epochs a client's number of steps reveals how many samples it has; set "
                "local-steps=10, or dp.write-client-metrics=true to send such numbers"
            )

    def guarantee(self) -> Guarantee:
        return Guarantee(
            clip=self.clip,
            multiplier=self.noise_multiplier,
            epsilon=self.epsilon,
            delta=self.delta,
            max_epsilon=self.max_epsilon or self.epsilon,
            adaptive=self.adaptive_clip,
            writes_clients=self.write_client_metrics,
            local=self.where == "client",
        )

    @property
    def unmaskable(self) -> str:
        if self.where == "client":
            return "dp.where=client, whose single uploads are private already"
        return "dp.adaptive-clip, which counts single uploads" if self.adaptive_clip else ""

    def at(self, privacy: Privacy) -> "DP":
        z = privacy.multiplier if privacy.local else self.noise_multiplier
        return replace(self, clip=privacy.clip, noise_multiplier=z)

    # the messages

    def encode(self, up: Any, down: Any, state: Any, result: LocalResult) -> tuple[Any, Any]:
        up = self._clipped(up, down)
        if self.where == "client":
            self._add_noise_(up, result.config)
        return up, None

    def _add_noise_(self, up: Any, config: LocalConfig) -> None:
        """Add noise to every vector of an upload, (d,) or (n, d) of a cohort, in place."""
        vectors = [v for v in up if v is not None]
        if self.noise_multiplier < 0:
            raise ValueError("dp: expected a noise multiplier from the server, got none")
        if not all(bool(torch.isfinite(v).all()) for v in vectors):
            raise ValueError("dp: the upload holds NaN or Inf; lower lr or clip-norm")
        one = isinstance(config.client, int)
        for j, i in enumerate(config.clients):
            normal = secret if config.secret else seeded(config.seed, config.round, i)
            for v in vectors:
                add_noise_(v if one else v[j], self.noise_multiplier * self.clip, normal)

    def decode(self, decoded: Decoded, kind: Any, down: Any, like: Vector) -> Decoded:
        vectors = [*decoded.up]
        if self.where == "client" or any(
            v is None or (v.shape, v.dtype) != (like.shape, like.dtype) for v in vectors
        ):
            return decoded  # noised already, or refused later
        return decoded._replace(up=self._clipped(decoded.up, down))

    def _clipped(self, up: Any, down: Any) -> Any:
        return clipped(up, down.w, self.models.split(","), self.clip)
