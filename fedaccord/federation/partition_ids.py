"""The partition-ids of clients whose nodes have data and no partition-id: the server assigns them.

A node is known by its node id, which stays that of its registered key. (A node without a key gets
another id with every start.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class PartitionIds:
    """Which node is which client, if the server decides it."""

    num_clients: int = 0  # C if nodes do not report it; 0: they must
    client_of: dict[int, int] = field(default_factory=dict)  # by node id
    save: Callable[[Mapping[int, int]], None] = lambda client_of: None

    def assign(self, waiting: Iterable[int], taken: Iterable[int], num_clients: int) -> None:
        """Number the waiting nodes once there is one for every free partition-id, in the order of
        their node ids: it does not depend on which node replies first."""
        free = sorted(set(range(num_clients)) - {*self.client_of.values(), *taken})
        nodes = sorted(waiting)
        if free and len(nodes) >= len(free):
            self.client_of |= zip(nodes, free, strict=False)
            self.save(self.client_of)
