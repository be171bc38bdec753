"""The batches of many clients, cut together; each client's samples and their order are those of its
own batches."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from fedaccord.core.vectors import index_rows
from fedaccord.task.cohort_solver import Stack
from fedaccord.task.solver import AHEAD

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # raw inputs (n, ...) and targets


def cut(
    x: Tensor,
    y: Tensor,
    rows_of: Sequence[Tensor],
    generators: Sequence[torch.Generator],
    batch_size: int,
    epochs: int,
    steps: int,
    prepare: Prepare,
) -> Iterator[Stack]:
    """A stack for each step of n clients, which are sorted by falling numbers of steps.

    rows_of: the rows of x and y that each client has, at least one each. A client takes ``epochs``
    passes over them, shuffled each time by its generator, or ``steps`` steps if that is not 0.
    ``batch_size=0``: each step uses the whole client, in order. Raises ValueError for a client
    without samples, and if a client takes more steps than the one before it.
    """
    n = torch.tensor([len(rows) for rows in rows_of])
    if not n.all():
        raise ValueError("expected at least one batch of training data, got none")
    rows, first = torch.cat([*rows_of]), n.cumsum(0) - n  # of each client in ``rows``
    if batch_size == 0:
        whole = Stack(*_cut(x, y, rows[_each(first, n)], prepare), n)
        yield from [whole] * (steps or epochs)
        return
    per_pass = (n + batch_size - 1) // batch_size
    passes = (steps + per_pass - 1) // per_pass if steps else torch.full_like(n, epochs)
    K = torch.full_like(n, steps) if steps else passes * per_pass
    if (K.diff() > 0).any():
        raise ValueError("expected clients in the order of falling numbers of steps")
    clients = zip(n.tolist(), passes.tolist(), generators, strict=True)
    orders = [torch.randperm(n_i, generator=g) for n_i, count, g in clients for _ in range(count)]
    counts = passes * n
    rows = rows[torch.cat(orders) + first.repeat_interleave(counts)]
    first = counts.cumsum(0) - counts
    ahead = max(1, AHEAD // max(1, len(n) * batch_size * x[0].numel()))
    for begin in range(0, int(K[0]), ahead):
        k = torch.arange(begin, min(begin + ahead, int(K[0])))[:, None]  # (s, 1)
        number, batch = k // per_pass, k % per_pass
        sizes = (n - batch * batch_size).clamp(max=batch_size) * (k < K)  # (s, n)
        starts = first + number * n + batch * batch_size
        forms = zip((sizes > 0).sum(1).tolist(), sizes.amax(1).tolist(), strict=True)
        i = 0
        for (m, _), alike in groupby(forms):  # clients that take part, and the longest batch
            several = slice(i, i := i + len([*alike]))
            mine = rows[_each(starts[several, :m], sizes[several, :m])]  # (s, m, b)
            yield from map(Stack, *_cut(x, y, mine, prepare), sizes[several, :m])


def _each(first: Tensor, sizes: Tensor) -> Tensor:
    """first, first + 1, ... (..., b); shorter ones are padded with their last value."""
    return first[..., None] + torch.arange(int(sizes.max())).clamp(max=sizes[..., None] - 1)


def _cut(x: Tensor, y: Tensor, rows: Tensor, prepare: Prepare) -> tuple[Tensor, Tensor]:
    """The prepared samples of these rows, (*rows, ...)."""
    some = rows.flatten()
    parts = prepare(index_rows(x, some), index_rows(y, some))
    inputs, targets = (part.view(*rows.shape, *part.shape[1:]) for part in parts)
    return inputs, targets
