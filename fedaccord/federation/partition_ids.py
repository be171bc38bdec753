"""The numbers of clients whose nodes bring data and no number: the server gives them, once.

A node is known again by its node id, which stays that of its registered key. (A node without a key
gets another id with every start.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class PartitionIds:
    """Which node is which client, as far as the server decides it."""

    num_clients: int = 0  # C where a node does not say it; 0: nodes must say
    of: dict[int, int] = field(default_factory=dict)  # node id -> client
    keep: Callable[[Mapping[int, int]], None] = lambda of: None  # writes `of` down

    def give(self, waiting: Iterable[int], taken: Iterable[int], num_clients: int) -> None:
        """Number the waiting nodes as soon as there is one for every free number: in the order of
        their ids, so that it does not depend on who answers first."""
        free = sorted(set(range(num_clients)) - {*self.of.values(), *taken})
        nodes = sorted(waiting)
        if free and len(nodes) >= len(free):
            self.of |= zip(nodes, free, strict=False)
            self.keep(self.of)
