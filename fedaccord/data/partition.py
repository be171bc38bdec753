"""Which client holds which samples: one array of indices per client.

``dirichlet`` and ``pathological`` give every client its own prior over classes,

    dirichlet      prior_i ~ Dir(alpha * 1_classes)
    pathological   prior_i = 1/c on c classes chosen uniformly

and then fill floor(n / num_clients) slots per client, one at a time over all clients:

    draw a client uniformly among those that are not full
    draw a class k from its prior
    hand out a sample of class k

This is the label skew of FedInit (arXiv:2306.05706), FedDyn (arXiv:2111.04263) and DisPFL
(arXiv:2206.00187). It is not the other split that goes by the name Dirichlet, which cuts every
class into proportions ~ Dir(alpha * 1_clients) and makes clients of unequal size.
``replacement`` decides which sample of the class is handed out:

    none     the next unused one; an exhausted class is skipped and the class drawn again
    cyclic   the next unused one; an exhausted class starts again from its first sample
    iid      any one, uniformly: several clients may hold it

``natural`` leaves every sample with the client that the data names.

These deal out a data set once. With ``samples_per_client`` every client draws so many samples for
itself, with replacement, from its own prior (for ``iid`` the shares of the classes in the data), as
pfl-research (arXiv:2404.06430) makes users from CIFAR-10. Clients then share samples, and there may
be more clients than samples. The samples of a client depend only on the seed and on its number, not
on the number of clients: they are drawn when they are used.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedaccord.core.options import did_you_mean
from fedaccord.data import partition_file
from fedaccord.data.parts import Cut, Drawn, Floats, Ints, Parts

SCHEMES = ("iid", "dirichlet", "pathological", "natural", "file")
BY_CLASS = ("dirichlet", "pathological")
REPLACEMENTS = ("none", "cyclic", "iid")
MAX_ALPHA = 1e6  # beyond it all priors are uniform and the gamma variates lose their meaning


def partition(
    labels: NDArray[Any],
    num_clients: int,
    scheme: str = "dirichlet",
    *,
    owners: NDArray[np.integer] | None = None,
    alpha: float = 0.3,
    replacement: str = "none",
    classes_per_client: int = 2,
    samples_per_client: int = 0,
    file: str = "",
    seed: int = 0,
) -> Sequence[Ints]:
    """The samples of every client, a pure function of the arguments (and of the file).

    labels: (n,) the class of every sample, integers from 0; of other targets, floats or several per
        sample, only their number is read, and schemes by class are refused.
    scheme: ``iid`` (shuffle and cut; sizes differ by at most 1), ``dirichlet``, ``pathological``,
        ``natural`` or ``file``.
    owners: of ``natural``: (n,) the client of each sample, 0 to num_clients - 1.
    alpha: of ``dirichlet``, in (0, 1e6]; small: one class per client, large: equal priors.
    replacement: of ``dirichlet`` and ``pathological``: ``none``, ``cyclic`` or ``iid``. With
        ``none``, if none of a client's classes is left, it takes from the remaining classes, each
        equally likely, so small alpha cannot keep every client pure.
    classes_per_client: of ``pathological``.
    samples_per_client: of ``iid``, ``dirichlet`` and ``pathological``: each client draws so many
        for itself, and ``replacement`` is not read; 0: floor(n / num_clients), dealt out.
    file: of ``file``: JSON, {"0": [indices], "1": [...]} or a list of lists.

    Raises ValueError for settings out of range and for a client without samples.
    """
    _known("partition", scheme, SCHEMES)
    _known("replacement", replacement, REPLACEMENTS)
    if scheme in BY_CLASS and not has_classes(labels):
        if labels.shape[1:] == (1,) and has_classes(labels[:, 0]):
            raise ValueError("dataset: expected labels (n,), got (n, 1): flatten them")
        raise ValueError(
            f"partition: expected iid, natural or file if targets are no class labels, got "
            f"{scheme}, which divides by class: set partition=iid"
        )
    labels = _classes_of(labels)
    if num_clients < 1:
        raise ValueError(f"num-clients: expected at least 1, got {num_clients}")
    if scheme == "natural":
        return _natural(owners, num_clients)
    if scheme == "file":
        return partition_file.read(file, num_clients, len(labels))
    if num_clients > len(labels) and not samples_per_client:
        raise ValueError(
            f"num-clients: expected at least one sample per client, got {len(labels)} samples for "
            f"{num_clients} clients; use fewer clients, or set samples-per-client, with which they "
            "share samples"
        )
    if samples_per_client > len(labels):
        raise ValueError(
            f"samples-per-client: expected at most the {len(labels)} training samples, got "
            f"{samples_per_client}; lower it"
        )

    rng = np.random.default_rng(seed)
    if scheme == "iid" and not samples_per_client:
        return Cut(rng.permutation(len(labels)), num_clients)
    classes, class_of = np.unique(labels, return_inverse=True)

    def priors(clients: int, rng: np.random.Generator) -> Floats:
        if scheme == "iid":
            return np.tile(np.bincount(class_of) / len(class_of), (clients, 1))
        if scheme == "dirichlet":
            return _dirichlet_priors(clients, len(classes), alpha, rng)
        return _pathological_priors(clients, len(classes), classes_per_client, rng)

    if samples_per_client:
        priors(1, rng)  # settings out of range show before a client is used
        each, own = samples_per_client, lambda rng: priors(1, rng)[0]
        return Drawn(class_of, num_clients, each, own, seed)
    return fill(class_of, priors(num_clients, rng), replacement, rng)


def has_classes(targets: NDArray[Any]) -> bool:
    """Whether targets are a class for each sample: integers, (n,)."""
    return targets.ndim == 1 and targets.dtype.kind in "iu"


def _natural(owners: NDArray[np.integer] | None, num_clients: int) -> Sequence[Ints]:
    if owners is None:
        raise ValueError(
            "partition: natural expects data that names a client for each training sample (npz: an "
            "array `client`; text: a column `client`; a function: a partitioner), got none: "
            "add it, or set partition=iid"
        )
    sizes = np.bincount(owners)
    if len(sizes) != num_clients:
        raise ValueError(
            f"num-clients: expected {len(sizes)}, as the data names with partition=natural, got "
            f"{num_clients}: set num-clients={len(sizes)}"
        )
    if not sizes.all():
        raise ValueError(
            f"partition: natural expects samples for every client, client {sizes.argmin()} has none"
        )
    return np.split(owners.argsort(kind="stable"), sizes.cumsum()[:-1])


def matching_share(
    own: NDArray[np.integer], labels: NDArray[np.integer], size: int, seed: int
) -> Ints:
    """About ``size`` samples with the class mixture of ``own``, sorted, none of them twice.

    own: (n,) the classes of a client's training samples; labels: (n_test,) those to draw from.
    An exhausted class gives all its samples; if no class is shared, the draw is from all.
    """
    rng = np.random.default_rng(seed)
    classes, counts = np.unique(own, return_counts=True)
    wanted = counts * (size / len(own))
    take = np.floor(wanted).astype(int)
    rest = np.argsort(take - wanted, kind="stable")[: round(size - take.sum())]
    take[rest] += 1  # largest remainders
    drawn = [
        rng.permutation(np.flatnonzero(labels == k))[:n] for k, n in zip(classes, take, strict=True)
    ]
    share = np.sort(np.concatenate(drawn))
    shared = own[np.isin(own, labels)]
    if not len(share) and 0 < len(shared) < len(own):  # the few places are of other classes
        return matching_share(shared, labels, size, seed)
    return share if len(share) else np.sort(rng.permutation(len(labels))[:size])


class Report(NamedTuple):
    """Statistics of a partition; ``print`` shows them as a table."""

    num_clients: int
    counts: Ints  # (clients, num_classes) samples held; of the first `LOOKED_AT` if they draw
    duplicated: int | None  # distinct samples held more than once, by several clients or twice by
    # one; None: clients draw their own
    unused: int | None  # samples that no client holds; likewise

    def __str__(self) -> str:
        sizes, present = self.counts.sum(axis=1), (self.counts > 0).sum(axis=1)
        classes = f"{present.min()} to {present.max()} of {self.counts.shape[1]} classes each"
        if self.counts.shape[1] == 1:
            classes = "no classes"
        if self.duplicated is None:
            first = f" (of the first {len(sizes)})" if len(sizes) < self.num_clients else ""
            text = f"{sizes[0]} samples that each draws for itself and {classes}{first}"
        else:
            text = (
                f"{sizes.min()} to {sizes.max()} samples and {classes}; "
                f"{self.duplicated} samples held more than once, {self.unused} unused"
            )
        lines = [f"{self.num_clients} clients, {text}", "client  samples  classes  largest class"]
        shown = 10
        for i, row in enumerate(self.counts[:shown]):
            share = row.max() / max(sizes[i], 1)
            lines.append(f"{i:6}  {sizes[i]:7}  {present[i]:7}  {row.argmax():5} ({share:.0%})")
        if self.num_clients > shown:
            lines.append(f"   ... and {self.num_clients - shown} more clients")
        return "\n".join(lines)


LOOKED_AT = 1000  # of the clients that draw their own samples


def report(parts: Sequence[Ints], labels: NDArray[Any]) -> Report:
    """The statistics of a partition. labels: as in ``partition``."""
    labels = _classes_of(labels)
    num_classes, drawn = int(labels.max(initial=-1)) + 1, isinstance(parts, Drawn)
    some = parts[:LOOKED_AT] if drawn else parts
    indices = some.samples if isinstance(some, Cut) else np.concatenate(some)
    sizes = [len(part) for part in some]
    cells = np.repeat(np.arange(len(sizes)) * num_classes, sizes) + labels[indices]
    counts = np.bincount(cells, minlength=len(sizes) * num_classes).reshape(-1, num_classes)
    if drawn:
        return Report(len(parts), counts, None, None)
    times = np.bincount(indices, minlength=len(labels))
    return Report(len(parts), counts, int((times > 1).sum()), int((times == 0).sum()))


def _dirichlet_priors(
    num_clients: int, num_classes: int, alpha: float, rng: np.random.Generator
) -> Floats:
    if not 0 < alpha <= MAX_ALPHA:
        raise ValueError(
            f"dirichlet-alpha: expected above 0 and at most {MAX_ALPHA:g}, got {alpha}; for equal "
            "class shares use the scheme 'iid'"
        )
    # Generator.dirichlet breaks sticks when alpha < 0.1: unlike the legacy np.random.dirichlet,
    # which normalises underflowed gamma variates, it gives no NaN rows however small alpha is.
    return rng.dirichlet(np.full(num_classes, alpha), size=num_clients)


def _pathological_priors(
    num_clients: int, num_classes: int, classes_per_client: int, rng: np.random.Generator
) -> Floats:
    if not 1 <= classes_per_client <= num_classes:
        raise ValueError(
            f"classes-per-client: expected 1 to {num_classes}, the number of classes in the "
            f"data, got {classes_per_client}"
        )
    row = (np.arange(num_classes) < classes_per_client) / classes_per_client
    return rng.permuted(np.tile(row, (num_clients, 1)), axis=1)


def fill(class_of: Ints, priors: Floats, replacement: str, rng: np.random.Generator) -> Parts:
    """The loop of the module's docstring, without the loop.

    class_of: (n,) in 0..classes-1, each present; priors: (num_clients, classes), rows sum to 1.

    For ``none`` the law is exactly the loop's. For ``cyclic`` it differs in one detail from the
    code of FedInit's authors: there, the draw that finds a class exhausted is thrown away before
    the class starts again, which bends the prior of one slot per restart. Theirs also gives the
    remainder n - num_clients * size to client 0; here no client has it and all sizes are equal.
    """
    num_clients, size = len(priors), len(class_of) // len(priors)
    # "A client uniformly among those not full": give each client a Poisson clock and let it ring
    # once per slot. Whose clock rings next is uniform among those that still ring.
    rings = rng.exponential(size=(num_clients, size)).cumsum(axis=1)
    client = rings.ravel().argsort() // size  # of every slot, in the order of the loop
    drawn = _draw(priors, client, rng)

    stock = np.bincount(class_of)
    if replacement == "none":
        _skip_exhausted(drawn, client, priors, stock, rng)
    rank = rng.integers(stock[drawn]) if replacement == "iid" else _rank(drawn) % stock[drawn]
    shuffled = rng.permutation(len(class_of))
    by_class = shuffled[class_of[shuffled].argsort(kind="stable")]
    first = stock.cumsum() - stock
    sample = by_class[first[drawn] + rank]
    return Cut(sample[client.argsort(kind="stable")], num_clients)


def _draw(priors: Floats, client: Ints, rng: np.random.Generator) -> Ints:
    """A class for every slot from the prior of its client; rows of priors need not sum to 1."""
    num_clients, num_classes = priors.shape
    cdf = priors.cumsum(axis=1)
    cdf /= cdf[:, -1:]
    # Client i's CDF moved to [i, i + 1], all in one sorted table. A float32 uniform is a multiple
    # of 2^-24, so client + u is exact and below i + 1: a class without mass is never drawn.
    table = (cdf + np.arange(num_clients)[:, None]).ravel()
    u = rng.random(len(client), dtype=np.float32)
    drawn: Ints = np.searchsorted(table, client + u, side="right") - client * num_classes
    return drawn


def _skip_exhausted(
    drawn: Ints, client: Ints, priors: Floats, stock: Ints, rng: np.random.Generator
) -> None:
    """Redraw, in place, the slots of ``drawn`` that find their class exhausted.

    Every pass takes the first such slot, closes its class, and redraws this and all later slots
    of the class from priors restricted to the open ones. A draw that is not of a closed class
    already follows the restricted prior, so this is the loop's law, in at most one pass per class.
    """
    is_open = np.ones(len(stock), dtype=bool)
    while (late := np.flatnonzero(_rank(drawn) >= stock[drawn])).size:
        exhausted = drawn[late[0]]
        is_open[exhausted] = False
        late = late[drawn[late] == exhausted]
        rest = priors * is_open
        rest[rest.sum(axis=1) == 0] = is_open  # nothing left of a client's classes: uniform
        drawn[late] = _draw(rest, client[late], rng)


def _rank(drawn: Ints) -> Ints:
    """How many earlier slots drew the same class, for every slot."""
    count = np.bincount(drawn)
    key = drawn.astype(np.min_scalar_type(len(count)))  # of 8 or 16 bits: NumPy sorts by radix
    rank = np.empty_like(drawn)
    rank[key.argsort(kind="stable")] = np.arange(len(drawn)) - np.repeat(
        count.cumsum() - count, count
    )
    return rank


def _classes_of(targets: NDArray[Any]) -> Ints:
    """(n,) the class of every sample; 0 if targets are no classes."""
    if not has_classes(targets):
        return np.zeros(len(targets), np.int64)
    if (targets < 0).any():
        raise ValueError(f"dataset: expected labels as integers from 0, got {targets.min()}")
    return targets.astype(np.int64)


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        hint = did_you_mean(name, names)
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {name!r}{hint}")
