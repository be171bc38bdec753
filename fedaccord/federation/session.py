"""What lasts from the first hello to the last round: the layout of the model and the clients."""

from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import ArrayRecord

from fedaccord.core.plugin import has_personal, state_like
from fedaccord.core.rounds import RoundState, broadcast
from fedaccord.core.vectors import Vector, dtype_of
from fedaccord.core.visit import TrainInstruction, Visit
from fedaccord.federation.fleet import Fleet
from fedaccord.wire.tensor_array import to_record, to_tensor


class Session:
    """The model's own names and shapes, the client half as it travels, and the clients."""

    def __init__(self, method: Any, initial: ArrayRecord, fleet: Fleet) -> None:
        """Raises ValueError where ``initial`` is no model's parameters."""
        tensors = {name: to_tensor(array) for name, array in initial.items()}
        if not tensors or not all(x.is_floating_point() for x in tensors.values()):
            raise ValueError(
                "initial_arrays: expected the floating-point parameters of a model, got "
                f"{ {name: str(x.dtype) for name, x in tensors.items()} }"
            )
        self.fleet = fleet
        self.half = method.client_half()
        self.layout = {name: x.shape for name, x in tensors.items()}
        self.shapes = tuple(self.layout.values())
        self.dtype = dtype_of(method.precision)
        d = sum(shape.numel() for shape in self.shapes)
        self.like = torch.empty(d, dtype=self.dtype, device="meta")  # (d,), without values
        self.has_personal = has_personal(self.half, self.shapes)

    def vector(self, arrays: ArrayRecord) -> Vector:
        """(d,) of the parameters under the names of the initial arrays."""
        parts = (to_tensor(arrays[name]).reshape(-1).to(self.dtype) for name in self.layout)
        return torch.cat([*parts])

    def arrays(self, vector: Vector) -> ArrayRecord:
        """A vector (d,) under the names and shapes of the initial arrays."""
        pieces = torch.split(vector, [shape.numel() for shape in self.shapes])
        views = [p.view(s) for p, s in zip(pieces, self.shapes, strict=True)]
        return to_record(dict(zip(self.layout, views, strict=True)))

    def client_state(self) -> Any:
        """A client's state with vectors that are empty: its structure."""
        return state_like(self.half, self.shapes)

    def visits(self, method: Any, s: RoundState, cohort: Iterable[int]) -> list[Visit]:
        """What each client of round t is asked."""
        common, late = self.instruction(method, s), self.half.needs_w_init and s.t > 0
        visits = []
        for i in cohort:
            accepted = int(s.accepted[i])
            durable = -1 if method.durable is None else int(method.durable[i])
            told = common._replace(client=i, accepted=accepted, durable=durable)
            first_is_late = late and accepted < 0
            visits.append(Visit(told, broadcast(method, s, i), s.w_init if first_is_late else None))
        return visits

    def questions(self, method: Any, s: RoundState) -> list[TrainInstruction]:
        """The clients that are here and were accepted once, to be asked for their own models."""
        common, here = self.instruction(method, s), self.fleet.here()
        reached = here if isinstance(here, range) else {*here}
        return [
            common._replace(client=i, accepted=int(s.accepted[i]))
            for i in (s.accepted >= 0).nonzero().flatten().tolist()
            if i in reached
        ]

    def instruction(self, method: Any, s: RoundState) -> TrainInstruction:
        """What all clients are told in round t."""
        return TrainInstruction(
            round=s.t,
            rounds=max(method.num_rounds, s.t + 1),
            half=self.half,
            shapes=self.shapes,
            lr=method.rate(s.t),
            weight_decay=method.weight_decay,
            clip_norm=method.clip_norm,
            local_epochs=method.local_epochs,
            local_steps=method.local_steps,
            batch_size=method.batch_size,
            seed=method.seed,
            precision=method.precision,
            federation=method.federation,
            attempt=method.attempt,
        )
