"""Suggestions for an unknown key of a run configuration."""

import difflib
from collections.abc import Collection, Iterable, Sequence

from fedaccord.core.options import key_of

SYNONYMS = {  # other names of these settings -> our keys
    **dict.fromkeys(("learning-rate", "eta", "client-lr", "local-lr"), ("lr",)),
    **dict.fromkeys(("epochs", "num-epochs", "local-epoch"), ("local-epochs",)),
    **dict.fromkeys(("batch", "local-batch-size"), ("batch-size",)),
    **dict.fromkeys(("rounds", "num-rounds"), ("num-server-rounds",)),
    **dict.fromkeys(("clients", "num-nodes", "num-supernodes"), ("num-clients",)),
    **dict.fromkeys(("participation", "fraction", "fraction-fit"), ("fraction-train",)),
    **dict.fromkeys(("method", "algorithm", "strategy"), ("algo",)),
    **dict.fromkeys(("max-grad-norm", "grad-clip"), ("clip-norm",)),
    **dict.fromkeys(
        ("momentum", "server-momentum"), ("momentum.mu", "fedavgm.beta", "dfedavgm.momentum")
    ),
    "l2": ("weight-decay",),
    "graph": ("gossip.topology",),
    **dict.fromkeys(("optimiser", "local-optimizer"), ("optimizer",)),
    "gpu": ("device",),
    "output-dir": ("out-dir",),
}
# keys of earlier versions
RENAMED = {"alpha": "dirichlet-alpha", "relaxed-init.server": "fedinit.server"}


class UnknownKey(ValueError):
    """near: the nearest known keys, at most three."""

    def __init__(self, message: str, near: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.near = near


def unknown(
    key: str, chosen: Collection[object], parts: Iterable[str], keys: Collection[str]
) -> ValueError:
    """The error for an unknown key; it names the key with this meaning, or the nearest three.

    chosen: the method and the optimiser; a key of another of the ``parts`` is suggested last.
    """

    def last(key: str) -> str:
        return key_of(key.rpartition(".")[2]).lower()

    others = {f"{name}." for name in parts if name not in chosen}
    read = [k for k in keys if not k.startswith(tuple(others))]  # by this method
    as_ours = [k for k in keys if k == key_of(key).lower()]
    for among in (as_ours, read, [*keys]):  # a key of a table, typed without it
        if same := [k for k in among if last(k) == last(key)]:
            break
    if key in RENAMED:
        if not any(k.partition(".")[0] in chosen and k != RENAMED[key] for k in same):
            return ValueError(f"{key}: this key is now called {RENAMED[key]!r}")
        same.append(RENAMED[key])
    if not {*same} & {*read}:
        meant = SYNONYMS.get(last(key), ())
        same = [k for k in meant if k in read] or [*meant] or same
        if not as_ours:
            table, dot, _ = key.partition(".")
            own = [k for k in keys if dot and k.startswith(f"{table}.")]
            near = difflib.get_close_matches(key, own, n=2, cutoff=0)
            same = [*dict.fromkeys([*(k for k in same if k in own), *near, *same])]
    near = same or difflib.get_close_matches(key, read, n=3, cutoff=0.45)
    if not near:
        return UnknownKey(f"unknown key {key!r}; `fedaccord run --list-keys` lists the known ones")
    *first, final = map(repr, near[:3])
    words = f"{', '.join(first)} or {final}" if first else final
    return UnknownKey(f"unknown key {key!r} (did you mean {words}?)", near[:3])
