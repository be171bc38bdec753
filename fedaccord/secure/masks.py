"""Keys, and masks that are uniform over 32 or 64 bits."""

import base64
import hashlib
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedaccord.compat.crypto import generate_shared_key

SEED = 32  # bytes of a seed and of a private key
WORDS: dict[int, Any] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}  # bits -> unsigned integers
CURVE = ec.SECP256R1()
INFO = b"fedaccord secure sum mask"


def expand(seed: bytes, size: int, word: int) -> Any:
    """``size`` unsigned integers of ``word`` bits from 32 bytes: HKDF-SHA256, then AES-256-CTR.

    Raises ValueError for a seed of another length.
    """
    if len(seed) != SEED:
        raise ValueError(f"expected a seed of {SEED} bytes, got {len(seed)}")
    material = HKDF(algorithm=hashes.SHA256(), length=48, salt=None, info=INFO).derive(seed)
    stream = Cipher(algorithms.AES(material[:32]), modes.CTR(material[32:])).encryptor()
    return np.frombuffer(stream.update(bytes(size * word // 8)), WORDS[word])


def digest(seed: bytes) -> bytes:
    """A digest by which the server recognises a seed; it reveals nothing of 32 random bytes."""
    return hashlib.sha256(seed).digest()


def new_key() -> bytes:
    """A private key of the curve P-256."""
    return private_bytes(ec.generate_private_key(CURVE))


def private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_numbers().private_value.to_bytes(SEED, "big")


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(key, "big"), CURVE)


def public_key(private: bytes) -> bytes:
    """The public key of a private one, a compressed point."""
    point = _private(private).public_key()
    return point.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def check_public(key: Any) -> None:
    """Raise ValueError if this is not a public key."""
    if not isinstance(key, bytes):
        raise ValueError(f"expected a public key, got a {type(key).__name__}")
    ec.EllipticCurvePublicKey.from_encoded_point(CURVE, key)


def shared_key(private: bytes, public: bytes) -> bytes:
    """The common key of the owners of two key pairs, in Fernet's form."""
    other = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    return generate_shared_key(_private(private), other)


def pair_mask(private: bytes, public: bytes, own: int, other: int, size: int, word: int) -> Any:
    """The mask that client ``own`` adds for client ``other``; both add up to 0 modulo 2^word."""
    mask = expand(base64.urlsafe_b64decode(shared_key(private, public)), size, word)
    return mask if own < other else np.negative(mask)
