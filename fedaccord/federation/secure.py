"""A round of secure sums: the four stages over any fleet, in process or by messages.

Every reply whose upload is in the sum is read as the mean of the round's uploads: a method that
reads means and sums alone takes the same step as from the uploads themselves.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedaccord.core.privacy import Masking
from fedaccord.core.request import TrainReply, TrainRequest
from fedaccord.federation.fleet import LATE, Fleet, MessageFleet, Reading, TrainReplies
from fedaccord.secure import client
from fedaccord.secure.client import Payload
from fedaccord.secure.masks import WORDS
from fedaccord.secure.server import SecureRound, SumFailedError

log = logging.getLogger("flwr")

STAGE_SECONDS = 120.0  # to wait for the answers of a stage without training
Check = Callable[[TrainRequest, TrainReply], None]  # raises ValueError for wrong numbers


class NotSummed(str):
    """Why an upload was not read, in one line; the reason was logged once for all."""


def train(
    fleet: Fleet,
    requests: Sequence[TrainRequest],
    timeout: float,
    masking: Masking,
    check: Check,
) -> TrainReplies:
    """The replies, those in the sum with the mean of the uploads, in float64, in its place.

    check: of a reply's numbers, before its upload is added.
    """
    if not requests:
        return []
    end = time.monotonic() + timeout
    asked = {request.instruction.client: request for request in requests}
    lines: dict[int, Reading] = dict.fromkeys(asked, LATE)
    sent: Counter[int] = Counter()
    protocol = SecureRound([*asked], *masking)
    channel = _Messages(fleet) if isinstance(fleet, MessageFleet) else _InProcess(fleet)

    def ask(payloads: Mapping[int, Payload]) -> Mapping[int, Any]:
        left = max(0.0, end - time.monotonic())
        answers = channel.ask(payloads, min(left, STAGE_SECONDS))
        for i, found in answers.items():
            if isinstance(found, str):
                lines[i] = found
            else:
                sent[i] += client.lengths([*found.values()])
        return answers

    try:
        shares = protocol.shares(ask(protocol.setup()))
        payloads = protocol.masked(ask(shares))
        some = [asked[i] for i in payloads]
        replies = dict(channel.train(some, payloads, max(0.0, end - time.monotonic())))
        forms = {i: _form(it) for i, it in replies.items() if isinstance(it, TrainReply)}
        usual = Counter(forms.values()).most_common(1)
        uploads = {}
        for i, reply in replies.items():
            lines[i] = reply
            if isinstance(reply, TrainReply):
                try:
                    reply = reply._replace(loss=float(reply.loss))
                    check(asked[i], reply)
                    uploads[i] = _integers(reply, protocol.word, len(asked[i].down.w))
                    if forms[i] != usual[0][0]:
                        raise ValueError("expected the vectors that the other replies have")
                except (ValueError, TypeError) as error:
                    uploads.pop(i, None)
                    lines[i] = str(error)
                    continue
                replies[i] = reply
        answers = ask(protocol.unmask([*uploads]))
        total = protocol.total(uploads, answers)
    except SumFailedError as error:
        log.warning("round %d: %s", requests[0].instruction.round + 1, error)
        why = NotSummed(error)
        return [(i, line if isinstance(line, str) and line != LATE else why)
                for i, line in lines.items()]  # fmt: skip
    first = replies[next(iter(uploads))]
    assert isinstance(first, TrainReply)
    mean = _split(torch.from_numpy(total).double().div_(len(uploads)), first.up, fleet.home)
    for i in uploads:
        reply = replies[i]
        assert isinstance(reply, TrainReply)
        size = uploads[i].nbytes + sent[i]
        lines[i] = reply._replace(up=mean, up_bytes=size)
    return lines.items()


def _form(reply: TrainReply) -> tuple[str, ...]:
    return tuple(name for name, v in reply.up._asdict().items() if v is not None)


def _integers(reply: TrainReply, word: int, d: int) -> Any:
    """A masked upload, all fields as one array. Raises ValueError if it is none."""
    parts = [v for v in reply.up if v is not None]
    dtype = {32: torch.int32, 64: torch.int64}[word]
    if not parts or any(v.shape != (d,) or v.dtype != dtype for v in parts):
        raise ValueError(f"expected masked vectors of shape {(d,)} and {dtype}")
    return np.concatenate([v.numpy() for v in parts]).view(WORDS[word])


def _split(values: torch.Tensor, up: Any, home: torch.device) -> Any:
    """One vector as the fields of an upload."""
    names = [name for name, v in up._asdict().items() if v is not None]
    home = torch.device("cpu") if home.type == "mps" else home
    parts = values.to(home).chunk(len(names)) if names else ()
    return up._replace(**dict(zip(names, parts, strict=True)))


class _InProcess:
    """The clients' part in this process: the same functions as on devices."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.memories: dict[int, Payload] = {}

    def ask(self, payloads: Mapping[int, Payload], timeout: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for i, payload in payloads.items():
            try:
                answers[i], self.memories[i] = client.answer(payload, self.memories.get(i, {}))
            except ValueError as error:
                answers[i] = str(error)
        return answers

    def train(
        self, requests: Sequence[TrainRequest], payloads: Mapping[int, Payload], timeout: float
    ) -> list[tuple[int, Reading]]:
        opened: dict[int, Payload] = {}
        replies: dict[int, Reading] = {}
        for i, payload in payloads.items():
            try:
                opened[i] = client.opened(payload, self.memories[i])
            except ValueError as error:
                replies[i] = str(error)
        some = [request for request in requests if request.instruction.client in opened]
        for i, reply in self.fleet.train(some, timeout):
            if isinstance(reply, TrainReply):
                self.memories[i] = opened[i]
                reply = reply._replace(up=client.mask_upload(reply.up, opened[i]))
            replies[i] = reply
        return [*replies.items()]


class _Messages:
    """The clients behind a Flower grid."""

    def __init__(self, fleet: MessageFleet) -> None:
        self.fleet = fleet

    def ask(self, payloads: Mapping[int, Payload], timeout: float) -> Mapping[int, Any]:
        return self.fleet.stage(payloads, timeout)

    def train(
        self, requests: Sequence[TrainRequest], payloads: Mapping[int, Payload], timeout: float
    ) -> TrainReplies:
        return self.fleet.train(requests, timeout, payloads)
