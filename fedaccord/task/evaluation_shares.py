"""The test samples that each client evaluates on, if they are not its own."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedaccord.data.partition import matching_share
from fedaccord.task.clients import Clients
from fedaccord.task.sources import SourceClients, labels_of

DEAL = 2  # of the draw of the shares, beside the seed


@dataclass(eq=False)
class EvaluationShares:
    """Each client's share of the test samples is as large as its share of the training samples. It
    has the client's class mixture if the classes are known; otherwise shares are disjoint."""

    clients: Clients | SourceClients
    test: Any  # (x, y), or a source
    total: int  # test samples
    seed: int
    _drawn: dict[int, Tensor] = field(default_factory=dict)  # about a row per sample in all

    def rows(self, client: int) -> Tensor:
        """A client's rows of the test samples, sorted; they are drawn once."""
        if client not in self._drawn:
            self._drawn[client] = torch.from_numpy(self._draw(client))
        return self._drawn[client]

    def _draw(self, client: int) -> NDArray[Any]:
        if self._labels is None:
            order, ends = self._deal
            return np.sort(order[ends[client] : ends[client + 1]])
        labels = self.clients.labels(client)
        assert labels is not None
        size = max(1, round(self.total * len(labels) / self.clients.total))
        seed = np.random.SeedSequence([self.seed, client]).generate_state(1)[0]
        return matching_share(labels, self._labels, size, int(seed))

    @cached_property
    def _labels(self) -> NDArray[Any] | None:
        """The classes of the test samples, if those of all clients are known too."""
        some = range(len(self.clients) if self.clients.parts is None else 1)
        all_labelled = all(self.clients.labels(i) is not None for i in some)
        return labels_of(self.test) if all_labelled else None

    @cached_property
    def _deal(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The test samples in a random order, and the ends of the clients' shares, from 0 on."""
        sizes = np.cumsum([0, *(self.clients.size(i) for i in range(len(self.clients)))])
        ends = np.rint(sizes / sizes[-1] * self.total).astype(np.int64)
        return np.random.default_rng([self.seed, DEAL]).permutation(self.total), ends
