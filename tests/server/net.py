"""A grid whose nodes come and go and whose answers get lost or come late; a clock to go with it."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo

from fedaccord.wire.handshake import answer_handshake
from fedaccord.wire.instruction import is_handshake
from tests.grid import InProcessGrid

introducing = ClientApp()


@introducing.train()
def _answer(message: Message, context: Context) -> Message:
    return answer_handshake(message, context)


class Clock:
    """Seconds that pass in `sleep` alone; what is planned for a moment happens then."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], object]) -> None:
        self._plans.append((when, what))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [plan for plan in self._plans if plan[0] <= self.now]
        for plan in due:
            self._plans.remove(plan)
            plan[1]()


class Net(InProcessGrid):
    """Nodes with a config each."""

    def __init__(self, app: ClientApp = introducing) -> None:
        super().__init__(app, 0)
        self.lost: set[int] = set()  # nodes whose answers get lost
        self.late: set[int] = set()  # nodes whose answers have not come yet
        self.hellos: list[int] = []  # nodes that were asked who they are, in order
        self._node_of: dict[str, int] = {}  # message id -> node
        self._starts: dict[int, int] = {}  # of each node

    def join(self, node: int, client: Any = None, num_clients: Any = None) -> None:
        self._starts[node] = self._starts.get(node, 0) + 1
        config = {"partition-id": client, "num-partitions": num_clients}
        self.contexts[node] = Context(
            run_id=1,
            node_id=node,
            node_config={key: value for key, value in config.items() if value is not None},
            state=RecordDict(),
            run_config={},
        )

    def leave(self, node: int) -> None:
        del self.contexts[node]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, last_activated_at=str(self._starts.get(node)))
            for node in self.get_node_ids()
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        nodes = [message.metadata.dst_node_id for message in messages]
        self.hellos += [
            n for n, message in zip(nodes, messages, strict=True) if is_handshake(message)
        ]
        ids = list(super().push_messages(messages))
        self._node_of |= zip(ids, nodes, strict=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = [i for i in message_ids if self._node_of[i] not in self.late]
        replies = super().pull_messages(ids)
        return [
            r for r in replies if self._node_of[r.metadata.reply_to_message_id] not in self.lost
        ]


def through(
    change: Callable[[list[Message], list[Message]], Iterable[Message]],
) -> type[InProcessGrid]:
    """A grid that makes other replies of (messages, their replies), of handshakes the same."""

    class Changed(InProcessGrid):
        messages: tuple[Message, ...] = ()

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self.messages = (*messages,)
            return super().push_messages(self.messages)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = [*super().pull_messages(message_ids)]
            unchanged = not replies or is_handshake(self.messages[0])
            return replies if unchanged else change([*self.messages], replies)

    return Changed
