"""The samples of each client, computed on access, without a list of all clients."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DRAWN = 2  # of the generators of `Drawn`, beside the seed


class Parts(Sequence[Ints]):
    """For every client the indices of its samples, (n_i,)."""

    num_clients: int

    def __len__(self) -> int:
        return self.num_clients

    @overload
    def __getitem__(self, client: int) -> Ints: ...
    @overload
    def __getitem__(self, client: slice) -> list[Ints]: ...
    def __getitem__(self, client: int | slice) -> Ints | list[Ints]:
        if isinstance(client, slice):
            return [self.of(i) for i in range(len(self))[client]]
        return self.of(range(len(self))[client])

    @abstractmethod
    def of(self, client: int) -> Ints: ...

    @abstractmethod
    def size(self, client: int) -> int: ...

    @property
    @abstractmethod
    def total(self) -> int:
        """Over all clients."""


class Cut(Parts):
    """``samples`` (n,) cut into pieces whose sizes differ by at most 1, the larger ones first."""

    def __init__(self, samples: Ints, num_clients: int) -> None:
        self.samples, self.num_clients = samples, num_clients
        self._least, self._larger = divmod(len(samples), num_clients)

    def of(self, client: int) -> Ints:
        first = client * self._least + min(client, self._larger)
        return self.samples[first : first + self.size(client)]

    def size(self, client: int) -> int:
        return self._least + (client < self._larger)

    @property
    def total(self) -> int:
        return len(self.samples)


class Drawn(Parts):
    """Each client draws ``each`` samples for itself, with replacement, from (seed, client) alone:
    a class from its prior, then any sample of the class.

    class_of: (n,) in 0..classes-1, each present. prior: the first draw from a client's generator,
    (classes,), not negative, with a positive sum.
    """

    def __init__(
        self,
        class_of: Ints,
        num_clients: int,
        each: int,
        prior: Callable[[np.random.Generator], Floats],
        seed: int,
    ) -> None:
        self.num_clients, self.each = num_clients, each
        self._prior, self._seed = prior, seed
        self._by_class = class_of.argsort(kind="stable")
        self._stock = np.bincount(class_of)
        self._first = self._stock.cumsum() - self._stock

    def of(self, client: int) -> Ints:
        rng = np.random.default_rng([self._seed, DRAWN, client])
        cdf = self._prior(rng).cumsum()
        drawn = np.searchsorted(cdf, cdf[-1] * rng.random(self.each, np.float32), side="right")
        samples: Ints = self._by_class[self._first[drawn] + rng.integers(self._stock[drawn])]
        return samples

    def size(self, client: int) -> int:
        return self.each

    @property
    def total(self) -> int:
        return self.num_clients * self.each
