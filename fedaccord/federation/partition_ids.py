"""The partition-ids that the server assigns to nodes which have data and no partition-id.

A node is identified by its node id, which belongs to its registered key. (A node without a key gets
another id at every start.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class PartitionIds:
    """The server's assignment of nodes to clients."""

    num_clients: int = 0  # C if nodes do not report it; 0: they must report it
    client_of: dict[int, int] = field(default_factory=dict)  # by node id
    save: Callable[[Mapping[int, int]], None] = lambda client_of: None

    def assign(self, waiting: Iterable[int], taken: Iterable[int], num_clients: int) -> None:
        """Assign ids to the waiting nodes once there is one for every free partition-id, in order
        of node ids: it does not depend on the order of arrival."""
        free = sorted(set(range(num_clients)) - {*self.client_of.values(), *taken})
        nodes = sorted(waiting)
        if free and len(nodes) >= len(free):
            self.client_of |= zip(nodes, free, strict=False)
            self.save(self.client_of)
