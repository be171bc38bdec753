"""The keys of a node's config, a SuperNode's ``--node-config``, beside the run-config keys that it
may have."""

from collections.abc import Collection, Container, Iterable
from difflib import get_close_matches

PARTITION_ID, NUM_PARTITIONS = "partition-id", "num-partitions"
OWN_DATA = ("data-dir", "data-path")  # the second is Flower's own
STATE_DIR, STATE_DAYS = "state-dir", "state-days"
ALLOW, IMPORTS = "allow-server-data", "allowed-imports"
MAX_STEPS, MAX_THREADS = "max-local-steps", "max-threads"
NUMBERS = (PARTITION_ID, NUM_PARTITIONS)
LIMITS = (STATE_DIR, STATE_DAYS, ALLOW, IMPORTS, MAX_STEPS, MAX_THREADS)
KEYS = (*NUMBERS, *OWN_DATA, *LIMITS)
LONG = 8  # length of a key from which similar ones count as misspelt
SIMILAR = 0.88  # ratio of `difflib`


def is_unnumbered(node: Container[str]) -> bool:
    """Whether the server assigns the node's partition-id: it has data but no partition-id."""
    return PARTITION_ID not in node and any(key in node for key in OWN_DATA)


def check_spelling(node: Collection[str], options: Iterable[str]) -> None:
    """Raise ValueError, in one line, for a key that has no effect because it is misspelt.

    options: the run-config keys that a node may have. Other keys may be those of another app.
    """
    known = (*KEYS, *options)
    missing = [key for key in known if key not in node]
    for key in node:
        if key in known:
            continue
        plain = key.lower().replace("_", "-")
        similar = get_close_matches(plain, [k for k in missing if len(k) >= LONG], 1, SIMILAR)
        if near := [plain] if plain in missing else similar:
            raise ValueError(f"{key}: expected {near[0]} in this node's config: rename the key")
