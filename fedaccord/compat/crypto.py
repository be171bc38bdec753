"""Flower's primitives of secure aggregation: Shamir's shares, key agreement, encryption.

They are not documented, but a copy here would be cryptography that nobody else maintains. Flower's
`pseudo_rand_gen`, which reduces every seed to 32 bits, and its quantiser are not used.
"""

from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)

__all__ = ["combine_shares", "create_shares", "decrypt", "encrypt", "generate_shared_key"]
