"""Who averages with whom: a star, or another topology of this protocol (plugins/gossip.py)."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from fedaccord.core.cohort import Client, Cohort, Reply, rows
from fedaccord.core.optimizer import CONSTANT, Optimizer, Schedule
from fedaccord.core.rule import LocalRule
from fedaccord.core.vectors import Number, Vector, versions


class ServerHalf(Protocol):
    """The server half of a method, as rounds and plug-ins see it; vectors hold over (..., d)."""

    # properties of the server step
    linear: ClassVar[bool]  # mixed steps are a step of mixed nodes
    reads_anchors: ClassVar[bool]  # `aggregate` reads cohort.anchor
    has_duals: ClassVar[bool]  # clients sum up their w_{i,K} - anchor over the rounds
    fixed_anchor: ClassVar[str]  # why relaxed initialisation cannot move w^t as the anchor
    tied: ClassVar[bool]  # the server's memory sums up the clients'
    averages: ClassVar[bool]  # `aggregate` reads the uploads by cohort.mean(ups.w) alone
    all_clients: ClassVar[bool]  # a round counts only with the replies of all clients
    refuses: ClassVar[dict[Any, str]]  # a plug-in's type -> why it does not fit

    @property
    def beyond_sums(self) -> str: ...  # what `aggregate` reads of uploads beside means and sums

    @property
    def reads_starts(self) -> bool: ...  # `aggregate` reads cohort.starts

    @property
    def keeps_jumps(self) -> bool: ...  # w moves by the jumps of moved starts, too

    @property
    def weighting(self) -> str: ...

    @property
    def is_buffered(self) -> bool: ...  # replies may be to earlier models

    @property
    def seed(self) -> int: ...

    @property
    def plugins(self) -> tuple[Any, ...]: ...

    def rule(self) -> LocalRule: ...

    def own_plugins(self) -> tuple[Any, ...]: ...

    def own_state(self) -> str: ...

    def own_optimizer(self) -> Optimizer: ...

    @property
    def topology(self) -> "Topology": ...

    def rate(self, t: int) -> float: ...

    def steps_of_round(self, t: int) -> int: ...

    def init(self, w: Vector) -> Any: ...

    def broadcast(self, w: Vector, state: Any, client: Client) -> Any: ...

    def aggregate(self, w: Vector, ups: Any, state: Any, cohort: Cohort) -> tuple[Vector, Any]: ...

    def output_model(self, w: Vector, state: Any) -> Vector: ...


class RoundInfo(NamedTuple):
    """The inputs of a cohort besides its replies."""

    round: int  # t
    lr: float  # eta_t
    num_clients: int  # C
    accepted: Tensor  # (C,) as in `Cohort`
    weighted: bool  # clients count by their examples
    anchored_at_starts: bool  # clients used their own start as the anchor
    schedule: Schedule = CONSTANT
    size: float | None = None  # clients in the one reply, a mean; None: one client per reply
    seen: Tensor | None = None  # as in `Cohort`

    def length(self, steps: Any) -> Any:
        """The sum of the rates of so many steps."""
        return self.schedule.total(steps, self.lr)


class Step(NamedTuple):
    """The result of a server step."""

    w: Vector  # the next round's model; without a server a row for each node
    server: Any  # the method's next server state
    metrics: dict[str, Number]  # metrics of the topology


class Topology(Protocol):
    """The part of the state that a client sees, and the form of a server step."""

    is_decentralised: bool  # every client trains in every round
    eval_nodes: bool  # evaluate the model of every node

    def facts(self, num_clients: int) -> dict[str, Any]:
        """Facts for the run summary. Raises ValueError if it does not fit the clients."""

    def describe(self, num_clients: int) -> str:
        """The same in one line; may be empty."""

    def begin(self, w: Vector, server: Any, num_clients: int) -> tuple[Vector, Any]:
        """Model and server state before round 1, from those of one server."""

    def view(self, w: Vector, server: Any, client: int) -> tuple[Vector, Any]:
        """The model and the server state for a client's message."""

    def gather(self, w: Vector, replies: Sequence[Reply], info: RoundInfo) -> tuple[Any, Cohort]:
        """The uploads and the cohort that the method's server step sees."""

    def step(self, method: ServerHalf, w: Vector, ups: Any, server: Any, cohort: Cohort) -> Step:
        """The method's server step, taken by the server or by every node."""

    def absence(self, num_clients: int, cohort: Cohort) -> str:
        """The effect of clients without a reply on a step, in one line; may be empty."""

    def average(self, w: Vector) -> Vector:
        """One model (d,), the mean of all nodes'."""


def first_server(method: ServerHalf, w: Vector) -> Any:
    """The method's ``init``. Raises TypeError, in one line, if it is not a NamedTuple."""
    state = method.init(w)
    if not hasattr(state, "_fields"):
        raise TypeError(
            f"{type(method).__name__}.init: expected the server state as a NamedTuple of vectors, "
            f"got a {type(state).__name__}; a state of one vector is a NamedTuple with one field"
        )
    return state


def message_to(method: ServerHalf, client: Client, w: Vector, server: Any) -> Any:
    """The method's ``broadcast``. Raises TypeError, in one line, if it is not of the type that the
    client half `receives`: devices could not read it."""
    down, rule = method.broadcast(w, server, client), method.rule()
    if type(down) is not rule.receives:
        raise TypeError(
            f"{type(method).__name__}.broadcast: expected a {rule.receives.__name__}, which "
            f"{type(rule).__name__}.receives declares, got a {type(down).__name__}"
        )
    return down


def server_step(
    method: ServerHalf, w: Vector, ups: Any, server: Any, cohort: Cohort
) -> tuple[Vector, Any]:
    """The method's ``aggregate``.

    Raises TypeError, in one line, if it returns something else or changes its arguments.
    """
    arguments = (w, *(v for field in ups for v in field or ()), server)
    before = versions(*arguments)
    result = method.aggregate(w, ups, server, cohort)
    if versions(*arguments) != before:
        raise TypeError(
            f"{type(method).__name__}.aggregate: expected unchanged arguments, got w, uploads or "
            "state changed in place; return new vectors, e.g. w - x, not w.sub_(x)"
        )
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)
    if not (is_pair and type(result[1]) is type(server)):
        got = f"a {type(result).__name__}"
        if isinstance(result, tuple):
            got = f"({', '.join(type(each).__name__ for each in result)})"
        raise TypeError(
            f"{type(method).__name__}.aggregate: expected (w, state), the next model as a tensor "
            f"and the next server state, a {type(server).__name__}, got {got}"
        )
    if (result[0].shape, result[0].dtype) != (w.shape, w.dtype):
        raise TypeError(
            f"{type(method).__name__}.aggregate: expected the next model as w, {tuple(w.shape)} in "
            f"{w.dtype}, got {tuple(result[0].shape)} in {result[0].dtype}"
        )
    return result


class Star:
    """One server, and clients that exchange messages with it only."""

    is_decentralised = False
    eval_nodes = False

    def __repr__(self) -> str:
        return "Star()"

    def facts(self, num_clients: int) -> dict[str, Any]:
        return {}

    def absence(self, num_clients: int, cohort: Cohort) -> str:
        return ""

    def describe(self, num_clients: int) -> str:
        return ""

    def begin(self, w: Vector, server: Any, num_clients: int) -> tuple[Vector, Any]:
        return w, server

    def view(self, w: Vector, server: Any, client: int) -> tuple[Vector, Any]:
        return w, server

    def gather(self, w: Vector, replies: Sequence[Reply], info: RoundInfo) -> tuple[Any, Cohort]:
        starts = [w if reply.w_i0 is None else reply.w_i0 for reply in replies]
        cohort = Cohort(
            [reply.client for reply in replies],
            round=info.round,
            num_clients=info.num_clients,
            weights=[float(reply.examples) if info.weighted else 1.0 for reply in replies],
            w=w,
            steps=[reply.steps for reply in replies],
            lengths=[info.length(reply.steps) for reply in replies],
            starts=starts,
            anchor=w,
            accepted=info.accepted,
            size=info.size,
            seen=info.seen,
            damping=[r.damping for r in replies] if any(r.damping != 1 for r in replies) else (),
        )
        if info.anchored_at_starts and any(reply.w_i0 is not None for reply in replies):
            cohort.anchor = cohort.mean(starts)
        return rows(replies), cohort

    def step(self, method: ServerHalf, w: Vector, ups: Any, server: Any, cohort: Cohort) -> Step:
        w, server = server_step(method, w, ups, server, cohort)
        return Step(w, server, {})

    def average(self, w: Vector) -> Vector:
        return w
