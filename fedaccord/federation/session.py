"""The constants of a run: the layout of the model, the client half, the clients."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord

from fedaccord.core.client_half import state_like
from fedaccord.core.cohort import PendingRequest
from fedaccord.core.privacy import Normal, Privacy, secret, seeded
from fedaccord.core.request import EvaluateRequest, ModelLayout, TrainInstruction, TrainRequest
from fedaccord.core.rounds import RoundState, broadcast
from fedaccord.core.vectors import Vector, dtype_of, leaves
from fedaccord.federation.fleet import DEVICES, Fleet
from fedaccord.federation.method import Method
from fedaccord.federation.state_dict import layout_of
from fedaccord.wire.tensor_array import to_record, to_tensor


@dataclass
class Book:
    """The run's name among its clients, and its records: none, unless it is a `Logbook`.

    federation, attempt: as in `TrainInstruction`. folder: for vectors that do not fit into memory;
    None: the system's temporary one.
    """

    federation: str = ""
    attempt: int = 0
    folder: Path | None = None

    def durable(self, client: int) -> int:
        """`TrainInstruction.durable` of a client."""
        return -1

    def spend(self, releases: int) -> None:
        """Store how many rounds of a privacy budget are spent, before the last one's release."""


class Session:
    """The model's own names and shapes, the client half for messages, and the clients."""

    def __init__(
        self,
        method: Method,
        initial: ArrayRecord,
        fleet: Fleet,
        num_rounds: int,
        book: Book,
        model: ModelLayout | None = None,
    ) -> None:
        """Raises ValueError if ``initial`` does not hold the parameters of a model."""
        self.method = method
        self.fleet = fleet
        self.num_rounds = num_rounds
        self.book = book
        self.half = method.client_half()
        self.is_deployed = fleet.place == DEVICES
        self.model = model or layout_of(initial, method.model_settings)
        self.layout, self.buffer_layout = (
            {name: torch.Size(shape) for name, shape in part.items()}
            for part in (self.model.shared, self.model.buffers)
        )
        self._initial = initial
        self.shapes = tuple(self.layout.values())
        self.dtype = dtype_of(method.precision)
        d = sum(shape.numel() for shape in self.shapes)
        self.like = torch.empty(d, dtype=self.dtype, device="meta")  # (d,), without values
        self.has_personal = method.has_personal

    def vector(self, arrays: ArrayRecord) -> Vector:
        """(d,) of the parameters under the names of the initial arrays."""
        return self._vector(arrays, self.layout)

    def buffers(self, arrays: ArrayRecord) -> Vector | None:
        """(d_b,) of the averaged buffers; None: there are none."""
        return self._vector(arrays, self.buffer_layout) if self.buffer_layout else None

    def _vector(self, arrays: ArrayRecord, names: Iterable[str]) -> Vector:
        return torch.cat([to_tensor(arrays[name]).reshape(-1).to(self.dtype) for name in names])

    def arrays(self, vector: Vector, buffers: Vector | None = None) -> ArrayRecord:
        """Vectors (d,) and (d_b,) under the names and shapes of the initial arrays; arrays of other
        roles are unchanged."""
        named = views(vector, self.layout)
        if buffers is not None:
            named |= views(buffers, self.buffer_layout)
        tensors = {name: to_tensor(array) for name, array in self._initial.items()}
        for name in self.buffer_layout if buffers is not None else ():
            if not tensors[name].is_floating_point():  # a counter
                named[name] = named[name].round().to(tensors[name].dtype)
        return to_record(tensors | named)

    def client_state(self) -> Any:
        """The structure of a client's state, with empty vectors."""
        return state_like(self.half, self.shapes)

    def requests(self, s: RoundState, cohort: Iterable[int]) -> list[TrainRequest]:
        """The request to each client of round t."""
        return self.requests_of(self.pending(s, cohort), s.privacy)

    def pending(self, s: RoundState, cohort: Iterable[int]) -> list[PendingRequest]:
        """The request to each client of round t, as a checkpoint has it."""
        pending: list[PendingRequest] = []
        is_w_init = s.t == 0 and self.half.rounding is None  # the broadcast itself
        late = self.half.needs_w_init and not is_w_init
        rounded: dict[int, tuple[Vector, Vector]] = {}
        first: dict[tuple[int, int], Any] = {}  # the message to the first client of each last visit
        for i in cohort:
            client, down = s.client(i), broadcast(self.method, s, i)
            accepted = int(s.accepted[i])
            like = first.setdefault((accepted, client.delay), down)
            w_init = s.w_init if late and accepted < 0 else None
            down = self._rounded(like if _are_equal(down, like) else down, s.t, rounded)
            pending.append(PendingRequest(i, s.t, accepted, down, w_init, s.buffers))
        return pending

    def _rounded(self, down: Any, t: int, rounded: dict[int, tuple[Vector, Vector]]) -> Any:
        """A broadcast of round t as clients read it; rounded: vectors and their rounded forms, by
        id, which clients share."""
        rounding = self.half.rounding
        if rounding is None:
            return down
        changed = {}
        for name, v in down._asdict().items():
            if v is not None and name not in self.half.rule.exact:
                if id(v) not in rounded:
                    rounded[id(v)] = v, rounding.rounded(v, self.method.seed, t, name)
                changed[name] = rounded[id(v)][1]
        return down._replace(**changed)

    def requests_of(
        self, pending: Sequence[PendingRequest], privacy: Privacy | None = None
    ) -> list[TrainRequest]:
        """The requests to send, of possibly several rounds."""
        common = {t: self._instruction(t, privacy) for t in {it.round for it in pending}}
        requests = []
        for it in pending:
            instruction = common[it.round]._replace(
                client=it.client, accepted=it.accepted, durable=self.book.durable(it.client)
            )
            requests.append(TrainRequest(instruction, it.down, it.w_init, it.buffers))
        return requests

    def normal(self, s: RoundState) -> Normal | None:
        """The noise of round t on sums; None: they have none."""
        if s.privacy is None or s.privacy.local:
            return None
        return secret if self.is_deployed else seeded(self.method.seed, s.t)

    @property
    def asks_clients(self) -> bool:
        """Whether clients evaluate by `fedaccord.evaluate_locally`."""
        return self.has_personal or self.method.evaluation != "server"

    def evaluate_requests(self, s: RoundState) -> list[EvaluateRequest]:
        """The request to each client that evaluates after round t: those drawn by (seed, t), or, if
        only the server evaluates the output model, those with a personal model."""
        if not self.asks_clients:
            return []
        method, available = self.method, self.fleet.available()
        own_only, clients = method.evaluation == "server", list[int]()
        if own_only:
            reached = available if isinstance(available, range) else {*available}
            accepted = (s.accepted != -1).nonzero().flatten().tolist() if self.has_personal else []
            clients = [i for i in accepted if i in reached]
        elif method.fraction_evaluate:
            clients = method.draw_evaluators(s.t, available, s.num_clients)
        needs_w = self.half.keeps_local or not own_only
        w = method.averaged_output(s.w, s.server) if clients and needs_w else None
        common = self._instruction(s.t, s.privacy)
        return [
            EvaluateRequest(
                common._replace(client=i, accepted=int(s.accepted[i])), w, s.buffers, own_only
            )
            for i in clients
        ]

    def _instruction(self, t: int, privacy: Privacy | None = None) -> TrainInstruction:
        """The common part of the instructions of round t."""
        method = self.method
        return TrainInstruction(
            round=t,
            rounds=max(self.num_rounds, t + 1),
            half=self.half.at(privacy),
            shapes=self.shapes,
            lr=method.rate(t),
            weight_decay=method.weight_decay,
            clip_norm=method.clip_norm,
            local_epochs=method.local_epochs,
            local_steps=method.steps_of_round(t),
            batch_size=method.batch_size,
            seed=method.seed,
            **method.model_settings._asdict(),
            federation=self.book.federation,
            attempt=self.book.attempt,
        )


def views(vector: Vector, layout: Mapping[str, torch.Size]) -> dict[str, Vector]:
    """A vector as tensors of these names and shapes, without a copy."""
    pieces = torch.split(vector, [shape.numel() for shape in layout.values()])
    named = zip(layout.items(), pieces, strict=True)
    return {name: piece.view(shape) for (name, shape), piece in named}


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two messages of one method have equal vectors; on a GPU, where a comparison would
    synchronise, the same objects."""
    ours, theirs = dict(leaves(a)), dict(leaves(b))
    return ours.keys() == theirs.keys() and all(
        v is theirs[name] or (v.is_cpu and torch.equal(v, theirs[name])) for name, v in ours.items()
    )
