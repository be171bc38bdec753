"""The server's part: the graph of neighbours, and the sum without the masks."""

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedaccord.compat.crypto import combine_shares
from fedaccord.secure.client import MASKED, NONCE, SETUP, SHARE, SHARE_SIZE, UNMASK, Payload
from fedaccord.secure.masks import SEED, WORDS, check_public, digest, expand, pair_mask, public_key


class SumFailedError(ValueError):
    """Why a round has no sum, in one line."""


def regular_graph(clients: Sequence[int], degree: int) -> dict[int, list[int]]:
    """The neighbours of each client: the nearest ``degree`` on a circle in random order.

    An odd degree counts as the next even one; all other clients if there are not more.
    """
    if len(clients) - 1 <= degree + degree % 2:
        return {i: [j for j in clients if j != i] for i in clients}
    circle = random.SystemRandom().sample([*clients], len(clients))
    steps = [s for k in range(1, (degree + 1) // 2 + 1) for s in (k, -k)]
    n = len(circle)
    return {i: sorted(circle[(at + s) % n] for s in steps) for at, i in enumerate(circle)}


@dataclass
class SecureRound:
    """The protocol of one round; each method makes the payloads of a stage from the last replies.

    An invalid reply counts as none. Raises SumFailedError if too few clients remain.
    """

    clients: Sequence[int]
    bits: int  # of an upload's integers
    degree: int  # neighbours of a client
    share: float  # share of a neighbourhood that must remain
    least: int  # clients of a sum
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE))
    graph: dict[int, list[int]] = field(default_factory=dict)
    keys: dict[int, Payload] = field(default_factory=dict)  # public ones
    digests: dict[int, Any] = field(default_factory=dict)  # of the seeds
    senders: dict[int, list[int]] = field(default_factory=dict)  # of a client's shares

    @property
    def word(self) -> int:
        """Bits of the integers that are summed."""
        return 32 if self.bits + math.ceil(math.log2(max(2, len(self.clients)))) <= 32 else 64

    def threshold(self, i: int) -> int:
        """The number of holders of a client's shares, including itself, that must remain."""
        holders = len(self.graph[i]) + 1
        return max(holders // 2 + 1, math.ceil(self.share * holders - 1e-9))

    def setup(self) -> dict[int, Payload]:
        return {i: self._payload(SETUP, client=i) for i in self.clients}

    def shares(self, answers: Mapping[int, Any]) -> dict[int, Payload]:
        for i, answer in answers.items():
            if isinstance(answer, Mapping) and {*answer} == {"cipher-key", "mask-key"}:
                try:
                    check_public(answer["cipher-key"])
                    check_public(answer["mask-key"])
                except ValueError:
                    continue
                self.keys[i] = answer
        self._need(self.keys, SETUP)
        self.graph = regular_graph([*self.keys], self.degree)
        return {
            i: self._payload(
                SHARE,
                neighbours=near,
                threshold=self.threshold(i),
                **{f"{name}s": [self.keys[j][name] for j in near] for name in self.keys[i]},
            )
            for i, near in self.graph.items()
        }

    def masked(self, answers: Mapping[int, Any]) -> dict[int, Payload]:
        sealed: dict[int, dict[int, bytes]] = {}
        for i, answer in answers.items():
            if isinstance(answer, Mapping) and answer.get("receivers") == self.graph[i]:
                texts, shown = answer.get("sealed"), answer.get("digest")
                if not isinstance(texts, list) or len(texts) != len(self.graph[i]):
                    continue
                if all(isinstance(text, bytes) for text in (*texts, shown)):
                    sealed[i] = dict(zip(self.graph[i], texts, strict=True))
                    self.digests[i] = shown
        self._need(sealed, SHARE)
        self.senders = {i: [j for j in self.graph[i] if j in sealed] for i in sealed}
        short = [i for i, near in self.senders.items() if len(near) + 1 < self.threshold(i)]
        if len(self.senders) - len(short) < self.least:  # short ones will not upload
            raise self._lost(short[0], len(self.senders[short[0]]) + 1, SHARE)
        return {
            i: self._payload(
                MASKED, senders=near, sealed=[sealed[j][i] for j in near], word=self.word
            )
            for i, near in self.senders.items()
        }

    def has_enough(self, i: int, opened: Sequence[int]) -> bool:
        """Whether client i could read enough neighbours' shares to upload. If not, the client is
        dropped, not the neighbours with shares that it reports as unreadable."""
        return len({*opened} & {*self.senders[i]}) + 1 >= self.threshold(i)

    def unmask(self, opened: Mapping[int, Sequence[int]]) -> dict[int, Payload]:
        """The payloads of the clients that are summed.

        opened: for each client whose masked upload came the neighbours whose shares it could read,
        and with whom it shares masks. A client whose shares one of them could not read is not
        summed: masks that it adds for that neighbour stay.
        """
        unread = set[int]()
        for i, readable in opened.items():
            unread |= {*self.senders[i]} - {*readable}
            self.senders[i] = [j for j in self.senders[i] if j in readable]
        active = [i for i in opened if i not in unread]
        self._need(active, MASKED)
        self._check_connected(active)
        survivors, payloads = {*active}, dict[int, Payload]()
        for i in active:
            group = [i, *self.senders[i]]
            near = [j for j in group if j in survivors]
            lost = [j for j in group if j not in survivors]
            if len(near) < self.threshold(i):  # its seed has fewer shares than that
                raise self._lost(i, len(near), MASKED)
            payloads[i] = self._payload(UNMASK, active=near, lost=lost)
        return payloads

    def total(self, uploads: Mapping[int, Any], answers: Mapping[int, Any]) -> Any:
        """The sum (n,) of the clients' integers, in 64 bits; uploads: those of `unmask`."""
        seeds: dict[int, list[bytes]] = {i: [] for i in uploads}
        lost = {j for i in uploads for j in self.senders[i] if j not in uploads}
        keys: dict[int, list[bytes]] = {j: [] for j in lost}
        for i, answer in answers.items():
            group = [i, *self.senders[i]]
            for name, into in (("seeds", seeds), ("keys", keys)):
                of = [j for j in group if (j in uploads) == (name == "seeds")]
                parts = answer.get(name) if isinstance(answer, Mapping) else None
                if isinstance(parts, list) and len(parts) == len(of):
                    for j, part in zip(of, parts, strict=True):
                        if isinstance(part, bytes) and len(part) == SHARE_SIZE:
                            into[j].append(part)
        first = next(iter(uploads.values()))
        total = np.zeros(len(first), WORDS[self.word])
        for y in uploads.values():
            total += y
        for i in uploads:
            seed = self._secret(i, seeds[i], digest, self.digests[i])
            total -= expand(seed, len(first), self.word)
        for j in sorted(lost):
            private = self._secret(j, keys[j], public_key, self.keys[j]["mask-key"])
            for i in uploads:
                if j in self.senders[i]:  # the mask that j would have added cancels i's
                    other = self.keys[i]["mask-key"]
                    total += pair_mask(private, other, j, i, len(first), self.word)
        if total.max(initial=0) > len(uploads) * (2**self.bits - 1):
            raise SumFailedError(
                "secure-sum: the sum is outside its range: a client sent a wrong upload or share"
            )
        return total.astype(np.int64)

    def _secret(
        self, i: int, shares: Sequence[bytes], shown: Callable[[bytes], bytes], expected: Any
    ) -> bytes:
        """The secret of which client i showed ``expected``, from those shares, as many as needed
        and next to each other, that give it: one wrong share is left out if there is one to spare.
        """
        needed = self.threshold(i)
        if len(shares) < needed:
            raise SumFailedError(
                f"secure-sum: expected {needed} of the {len(self.graph[i]) + 1} shares of client "
                f"{i} at the stage unmask, got {len(shares)}: too many clients were lost"
            )
        for k in range(len(shares) if len(shares) > needed else 1):
            with suppress(ValueError):
                secret = combine_shares([*shares, *shares][k : k + needed])
                if len(secret) == SEED and shown(secret) == expected:
                    return secret
        raise SumFailedError(f"secure-sum: the shares of client {i} do not give its secret")

    def _need(self, remaining: Any, stage: str) -> None:
        if len(remaining) < self.least:
            raise SumFailedError(
                f"secure-sum: expected at least {self.least} clients after the stage {stage}, got "
                f"{len(remaining)}: a sum of fewer would reveal uploads"
            )

    def _lost(self, i: int, remaining: int, stage: str) -> SumFailedError:
        holders = len(self.graph[i]) + 1
        return SumFailedError(
            f"secure-sum: expected at least {self.threshold(i)} of the {holders} clients of a "
            f"neighbourhood after the stage {stage}, got {remaining}: too many were lost"
        )

    def _check_connected(self, active: Sequence[int]) -> None:
        """Whether the graph is connected; if not, the server would learn the sum of each part."""
        survivors, reached, last = {*active}, {active[0]}, [active[0]]
        while last:
            near = {j for i in last for j in self.senders[i]} & survivors - reached
            reached |= near
            last = [*near]
        if reached != survivors:
            raise SumFailedError(
                "secure-sum: too many clients were lost: the others are no longer connected; raise "
                "secure-sum.neighbours"
            )

    def _payload(self, stage: str, **values: Any) -> dict[str, Any]:
        return {"stage": stage, "nonce": self.nonce, **values}
