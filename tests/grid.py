"""The in-process Grid: any ClientApp, C times in this process, for messages without a network.

It touches Flower's private parts: `TaskIdentity` (who writes a message), `Run` (the
type of ``Grid.run``) and ``metadata._message_id`` (which the SuperLink would set).
"""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedaccord.core.node_config import NUM_PARTITIONS, PARTITION_ID

RUN_ID = 1
IDENTITY = {"_run_id": RUN_ID, "_node_id": 1, "_task_id": 1}  # of the server, in `TaskIdentity`
FIRST_NODE = 1000  # node ids are not partition-ids, here as elsewhere


class InProcessGrid(Grid):
    """C clients in this process; each has a Context that lasts as long as the grid.

    Use it in a ``with`` block: messages need a sender, whom Flower keeps once per process; the grid
    names itself when the block begins, and whoever was named before when it ends. Messages pass by
    reference. A ClientApp that raises gives an error reply and leaves its client's state as it was,
    as in Flower's simulation.
    """

    def __init__(
        self, client_app: ClientApp, num_clients: int, run_config: Mapping[str, Any] | None = None
    ) -> None:
        self._run = Run.create_empty(RUN_ID)
        self._app = client_app
        self._replies: dict[str, Message] = {}
        self._before: list[dict[str, int | None]] = []  # who was named, a block each
        self.contexts = {
            FIRST_NODE + i: Context(
                run_id=RUN_ID,
                node_id=FIRST_NODE + i,
                node_config={PARTITION_ID: i, NUM_PARTITIONS: num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(num_clients)
        }

    def __enter__(self) -> "InProcessGrid":
        self._before.append({name: getattr(TaskIdentity, name) for name in IDENTITY})
        for name, value in IDENTITY.items():
            setattr(TaskIdentity, name, value)
        return self

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.pop().items():
            setattr(TaskIdentity, name, value)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            _stamp(message)
            self._replies[message.metadata.message_id] = self._call(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _call(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        before = dict(context.state)
        try:
            reply = self._app(message, context)
            if not isinstance(reply, Message):
                raise TypeError(f"expected a Message from the ClientApp, got {reply!r:.40}")
        except (Exception, SystemExit) as error:  # whatever a client raises, the server judges
            context.state = RecordDict(before)
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(code=2, reason=reason), reply_to=message)
        _stamp(reply)
        return reply


_numbers = count(1)


def _stamp(message: Message) -> None:
    message.metadata.__dict__["_message_id"] = str(next(_numbers))
