"""A client's part of the four stages: values in, values out.

Memory and payloads are dicts of numbers, bytes and lists of them, as a Flower ConfigRecord holds.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from fedaccord.compat.crypto import create_shares, decrypt, encrypt
from fedaccord.secure.masks import (
    SEED,
    WORDS,
    check_public,
    digest,
    expand,
    new_key,
    pair_mask,
    public_key,
    shared_key,
)

SETUP, SHARE, MASKED, UNMASK = "setup", "share", "masked", "unmask"
SHARE_SIZE = 52  # bytes of a share of 32 bytes: its index and three blocks
LEAST_NEIGHBOURS = 2
OPENED = "opened-shares"  # beside a masked upload: the neighbours whose shares were readable
NONCE = 16  # bytes of the identifier of a round's protocol
HEADER = f">{NONCE}sII"

Payload = Mapping[str, Any]


@contextmanager
def _complete() -> Iterator[None]:
    """A block, or a function, that reads a message of which parts may be missing."""
    try:
        yield
    except (KeyError, TypeError, struct.error) as error:
        raise ValueError(f"secure-sum: expected a complete message, got none: {error}") from error


@_complete()
def answer(payload: Payload, memory: Payload) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reply to a stage other than the masked upload, and the client's memory.

    Raises ValueError, in one line, for a stage out of order, or one that would reveal too much.
    """
    stages = {SETUP: _setup, SHARE: _share, UNMASK: _unmask}
    stage = payload.get("stage")
    if stage not in stages:
        raise ValueError(f"secure-sum: expected one of {', '.join(stages)}, got {stage!r:.40}")
    if stage != SETUP:
        check_order(payload, memory, stage)
    return stages[stage](payload, memory)


def check_order(payload: Payload, memory: Payload, stage: str) -> None:
    """Raise ValueError, in one line, if the stage is not the next one of the client's round."""
    if memory.get("next") != stage or memory.get("nonce") != payload.get("nonce"):
        raise ValueError(
            f"secure-sum: expected the stage {memory.get('next', SETUP)!r} of the client's current "
            f"round, got {stage!r}: its process restarted, or a message arrived twice"
        )


def _setup(payload: Payload, memory: Payload) -> tuple[dict[str, Any], dict[str, Any]]:
    nonce, own = payload["nonce"], payload["client"]
    if not isinstance(nonce, bytes) or len(nonce) != NONCE:
        raise ValueError(f"secure-sum: expected a nonce of {NONCE} bytes")
    cipher, mask = new_key(), new_key()
    next_memory = {"next": SHARE, "nonce": nonce, "client": own, "cipher": cipher, "mask": mask}
    return {"cipher-key": public_key(cipher), "mask-key": public_key(mask)}, next_memory


def _share(payload: Payload, memory: Payload) -> tuple[dict[str, Any], dict[str, Any]]:
    own, neighbours, threshold = memory["client"], [*payload["neighbours"]], payload["threshold"]
    holders = [own, *neighbours]
    if len({*holders}) < len(holders) or not len(holders) < 2 * threshold <= 2 * len(holders):
        raise ValueError(
            "secure-sum: expected other clients as neighbours, and a threshold of more than half "
            f"of {len(holders)} and at most all, got {threshold}"
        )
    if len(neighbours) < LEAST_NEIGHBOURS:
        raise ValueError(
            f"secure-sum: expected at least {LEAST_NEIGHBOURS} neighbours, got {len(neighbours)}: "
            "their masks hide the upload"
        )
    keys = [*payload["cipher-keys"], *payload["mask-keys"]]
    for key in keys:
        check_public(key)
    if len({*keys}) < 2 * len(neighbours) or len(keys) != 2 * len(neighbours):
        raise ValueError("secure-sum: expected two distinct keys from each neighbour")
    seed = os.urandom(SEED)
    parts = [create_shares(secret, threshold, len(holders)) for secret in (seed, memory["mask"])]
    own_shares, *others = (a + b for a, b in zip(*parts, strict=True))
    sealed = [
        encrypt(
            shared_key(memory["cipher"], key), struct.pack(HEADER, memory["nonce"], own, i) + shares
        )
        for i, key, shares in zip(neighbours, payload["cipher-keys"], others, strict=True)
    ]
    own_memory = {"next": MASKED, "seed": seed, "shares": [own_shares], "threshold": threshold}
    lists = {name: [*payload[name]] for name in ("neighbours", "cipher-keys", "mask-keys")}
    reply = {"receivers": neighbours, "sealed": sealed, "digest": digest(seed)}
    return reply, {**memory, **own_memory, **lists}


@_complete()
def open_shares(payload: Payload, memory: Payload) -> dict[str, Any]:
    """The client's memory after it received its neighbours' shares, before training; "senders":
    those neighbours whose shares it could read.

    The other neighbours count as absent, as if the server had not passed on their shares, and the
    same number must remain: a server that corrupts shares learns no more than one that withholds
    them. Raises ValueError, in one line, if too few remain.
    """
    check_order(payload, memory, MASKED)
    own, senders, word = memory["client"], [*payload["senders"]], payload["word"]
    key_of = dict(zip(memory["neighbours"], memory["cipher-keys"], strict=True))
    if not {*senders} <= {*key_of} or len({*senders}) < len(senders) or word not in WORDS:
        raise ValueError("secure-sum: expected shares of neighbours, each once")
    share_of = {own: memory["shares"][0]}
    for i, sealed in zip(senders, payload["sealed"], strict=True):
        with suppress(Exception):  # the library's exceptions
            text = decrypt(shared_key(memory["cipher"], key_of[i]), sealed)
            header = struct.pack(HEADER, memory["nonce"], i, own)
            if text.startswith(header) and len(text) == len(header) + 2 * SHARE_SIZE:
                share_of[i] = text[len(header) :]
    if len(share_of) < memory["threshold"]:
        raise ValueError(
            f"secure-sum: expected shares of at least {memory['threshold'] - 1} neighbours, got "
            f"{len(share_of) - 1}"
        )
    opened = {"senders": [*share_of][1:], "shares": [*share_of.values()]}
    return {**memory, **opened, "next": UNMASK, "word": word}


def add_masks(values: Any, memory: Payload) -> Any:
    """y_i, unsigned integers of the round's word; values: (n,) q_i, integers of 64 bits."""
    own, word = memory["client"], memory["word"]
    key_of = dict(zip(memory["neighbours"], memory["mask-keys"], strict=True))
    total = values.astype(WORDS[word]) + expand(memory["seed"], len(values), word)
    for i in memory["senders"]:
        total += pair_mask(memory["mask"], key_of[i], own, i, len(values), word)
    return total


def _unmask(payload: Payload, memory: Payload) -> tuple[dict[str, Any], dict[str, Any]]:
    own, senders = memory["client"], memory["senders"]
    active, lost = [*payload["active"]], [*payload["lost"]]
    share_of = dict(zip([own, *senders], memory["shares"], strict=True))
    if sorted(active + lost) != sorted(share_of) or own not in active:
        raise ValueError(
            "secure-sum: expected each neighbour to be either active or lost: both shares of one "
            "would reveal its upload"
        )
    if len(active) < memory["threshold"]:
        raise ValueError(
            f"secure-sum: expected at least {memory['threshold']} active clients in a "
            f"neighbourhood, got {len(active)}"
        )
    reply = {
        "seeds": [share_of[i][:SHARE_SIZE] for i in active],
        "keys": [share_of[i][SHARE_SIZE:] for i in lost],
    }
    return reply, {"next": SETUP, "nonce": memory["nonce"]}


def nbytes(value: Any) -> int:
    """Bytes of a payload or a reply; a number counts as 8."""
    if isinstance(value, Mapping):
        return nbytes([*value.values()])
    if isinstance(value, list):
        return sum(map(nbytes, value))
    return len(value) if isinstance(value, bytes) else 8


def mask_vectors(vectors: Mapping[str, Tensor], memory: Payload) -> dict[str, Tensor]:
    """Named vectors of 64-bit integers, masked as one vector: integers of the round's word."""
    values = torch.cat([*vectors.values()]).cpu().numpy()
    signed = torch.from_numpy(add_masks(values, memory).view(f"<i{memory['word'] // 8}"))
    parts = torch.split(signed, [len(v) for v in vectors.values()])
    return dict(zip(vectors, parts, strict=True))
