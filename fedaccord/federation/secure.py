"""A round of secure sums: the four stages over any fleet, in process or by messages.

Every reply with an upload in the sum is read as the mean of the round's uploads: a method that
reads only means and sums takes the same step as from the uploads themselves.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedaccord.core.privacy import Masking
from fedaccord.core.request import StateLost, TrainReply, TrainRequest
from fedaccord.core.vectors import leaves
from fedaccord.federation.fleet import IN_PROCESS, LATE, Fleet, Reading, TrainReplies
from fedaccord.federation.replies import unusual
from fedaccord.secure import client
from fedaccord.secure.client import Payload
from fedaccord.secure.masks import WORDS
from fedaccord.secure.server import SecureRound, SumFailedError

# largest wait for the replies of a stage without training, 5 kB a client with 20 neighbours, 27 kB
# with 99; a ClientApp may need 30 s to start on a slow device
STAGE_SECONDS = 120.0
STAGE_SHARE = 1 / 5  # it is at most this share of a round: a lost client leaves time for all stages
INVALID = "secure-sum: expected keys, then shares for its neighbours, got others"
UNREAD = "secure-sum: expected shares that its neighbours can read, got others"
Check = Callable[[TrainRequest, TrainReply], None]  # raises ValueError for wrong numbers


class NotSummed(str):
    """Why an upload was not read, in one line: the sum failed, not because of this client."""


def train(
    fleet: Fleet,
    requests: Sequence[TrainRequest],
    timeout: float,
    masking: Masking,
    check: Check,
) -> TrainReplies:
    """The replies; those in the sum have the mean of the uploads, in float64, as their upload.

    check: of a reply's numbers, before its upload is added.
    """
    if not requests:
        return []
    request_of = {request.instruction.client: request for request in requests}
    protocol = SecureRound(
        [*request_of],
        bits=masking.bits,
        degree=masking.neighbours,
        share=masking.threshold,
        least=masking.least,
    )
    channel = fleet.secure_channel()
    pause = min(STAGE_SECONDS, STAGE_SHARE * timeout)
    end = time.monotonic() + timeout - pause  # the end of training; the last stage has its own time
    readings: dict[int, Reading] = {}
    sent: Counter[int] = Counter()

    def ask(payloads: Mapping[int, Payload]) -> Mapping[int, Any]:
        answers = channel.stage(payloads, pause)
        for i, answer in answers.items():
            if isinstance(answer, str):
                readings[i] = answer
            else:
                sent[i] += client.nbytes(answer)
        return answers

    try:
        answers = ask(protocol.setup())
        shares = protocol.shares(answers)
        readings |= dict.fromkeys(_replied(answers) - shares.keys(), INVALID)
        answers = ask(shares)
        payloads = protocol.masked(answers)
        readings |= dict.fromkeys(_replied(answers) - payloads.keys(), INVALID)
        some = [request_of[i] for i in payloads]
        left = timeout if fleet.place == IN_PROCESS else max(0.0, end - time.monotonic())
        readings |= channel.train(some, left, payloads)
        good = _good(readings, request_of, protocol, check)
        unmasking = protocol.unmask({i: reply.more[client.OPENED] for i, reply in good.items()})
        readings |= dict.fromkeys(good.keys() - unmasking, UNREAD)
        good = {i: good[i] for i in unmasking}
        uploads = {i: _integers(reply.up, protocol.word) for i, reply in good.items()}
        total = protocol.total(uploads, ask(unmasking))
    except SumFailedError as error:
        others = NotSummed(error)
        lost = {i: it for i, it in readings.items() if isinstance(it, (str, StateLost))}
        return [(i, lost.get(i, others)) for i in request_of]
    up = next(iter(good.values())).up
    mean = _split(torch.from_numpy(total).double().div_(len(good)), up, fleet.home)
    for i, reply in good.items():
        readings[i] = reply._replace(up=mean, up_bytes=uploads[i].nbytes + sent[i])
    return [(i, readings.get(i, LATE)) for i in request_of]


def _replied(answers: Mapping[int, Any]) -> set[int]:
    return {i for i, answer in answers.items() if not isinstance(answer, str)}


def _good(
    readings: dict[int, Reading],
    request_of: Mapping[int, TrainRequest],
    protocol: SecureRound,
    check: Check,
) -> dict[int, TrainReply]:
    """The replies with uploads that can be summed; other readings are replaced by the reason."""
    replies = {i: it for i, it in readings.items() if isinstance(it, TrainReply)}
    odd = unusual("the vectors", {i: tuple(dict(leaves(it.up))) for i, it in replies.items()})
    good = {}
    for i, reply in replies.items():
        try:
            if i in odd:
                raise ValueError(odd[i])
            reply = reply._replace(loss=float(reply.loss))
            check(request_of[i], reply)
            opened = reply.more.get(client.OPENED)
            if not isinstance(opened, list) or not protocol.has_enough(i, opened):
                raise ValueError(
                    "secure-sum: expected the clients whose shares it read, as many as an upload "
                    f"needs, got {opened!r:.40}"
                )
            _check_masked(reply.up, protocol.word, len(request_of[i].down.w))
            good[i] = reply
        except (ValueError, TypeError) as error:
            readings[i] = str(error)
    return good


def _check_masked(up: Any, word: int, d: int) -> None:
    dtype, vectors = {32: torch.int32, 64: torch.int64}[word], [v for _, v in leaves(up)]
    if not vectors or any(v.shape != (d,) or v.dtype != dtype for v in vectors):
        raise ValueError(f"expected masked vectors of shape {(d,)} and {dtype}")


def _integers(up: Any, word: int) -> Any:
    """A masked upload, all fields as one array."""
    return np.concatenate([v.numpy() for _, v in leaves(up)]).view(WORDS[word])


def _split(values: torch.Tensor, up: Any, home: torch.device) -> Any:
    """One vector as the fields of an upload."""
    home = torch.device("cpu") if home.type == "mps" else home  # which has no float64
    names = [name for name, _ in leaves(up)]
    return up._replace(**dict(zip(names, values.to(home).chunk(len(names)), strict=True)))
