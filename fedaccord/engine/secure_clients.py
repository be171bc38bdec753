"""The clients' part of secure sums in this process: the same functions as on devices."""

from collections.abc import Callable, Mapping, Sequence

from fedaccord.core.request import TrainReply, TrainRequest
from fedaccord.core.vectors import leaves
from fedaccord.federation.fleet import Reading, TrainReplies
from fedaccord.secure import client
from fedaccord.secure.client import Payload


class SecureClients:
    """Clients in one round of secure sums, as `SecureChannel`; train: as `Fleet.train`."""

    def __init__(self, train: Callable[[Sequence[TrainRequest], float], TrainReplies]) -> None:
        self._train = train
        self._memories: dict[int, Payload] = {}

    def stage(self, payloads: Mapping[int, Payload], timeout: float) -> dict[int, Payload | str]:
        answers: dict[int, Payload | str] = {}
        for i, payload in payloads.items():
            try:
                answers[i], self._memories[i] = client.answer(payload, self._memories.get(i, {}))
            except ValueError as error:
                answers[i] = str(error)
        return answers

    def train(
        self, requests: Sequence[TrainRequest], timeout: float, payloads: Mapping[int, Payload]
    ) -> TrainReplies:
        opened: dict[int, Payload] = {}
        replies: dict[int, Reading] = {}
        for i, payload in payloads.items():
            try:
                opened[i] = client.open_shares(payload, self._memories[i])
            except ValueError as error:
                replies[i] = str(error)
        some = [request for request in requests if request.instruction.client in opened]
        for i, reply in self._train(some, timeout):
            if isinstance(reply, TrainReply):
                self._memories[i] = opened[i]
                masked = client.mask_vectors(dict(leaves(reply.up)), opened[i])
                more = {**reply.more, client.OPENED: opened[i]["senders"]}
                reply = reply._replace(up=reply.up._replace(**masked), more=more)
            replies[i] = reply
        return replies.items()
