"""A round as two pure functions: a client's local round, and the server's step.

Both work for one client, vectors (d,), and for a cohort, vectors (n, d), without messages,
modules, files or devices; a `Solver` takes the local steps.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedaccord.core.client_half import ClientHalf, GradientHook
from fedaccord.core.cohort import Client, Cohort, PendingRequest, Reply, seen
from fedaccord.core.optimizer import SGD, add_, shrink_
from fedaccord.core.plugin import joined
from fedaccord.core.privacy import Normal, Privacy, release
from fedaccord.core.rule import Direction, GradientAt, LocalConfig, LocalResult, Stateless
from fedaccord.core.topology import RoundInfo, ServerHalf, first_server, message_to
from fedaccord.core.vectors import Number, Vector, all_to_device, map_vectors, sum_dtype

# --- the client's round ---------------------------------------------------------------------------


class Solution(NamedTuple):
    """The result of a solver."""

    w_K: Vector  # (..., d), a tensor of its own
    steps: Any  # K_i: an int, or (n, 1) for a cohort
    loss: Tensor  # (...), mean over the steps of the loss before the step
    gradient: Any  # the result of `gradient_result`
    moments: Any = Stateless()  # the optimiser's vectors
    mean: Vector | None = None  # (..., d), as `LocalResult.mean`


class Solver(Protocol):
    """Takes the local steps of a client or a cohort, usually by `descend`."""

    def __call__(self, w_i0: Vector, direction: Direction, hook: GradientHook) -> Solution: ...


class ClientRound(NamedTuple):
    """The result of a local round."""

    up: Any  # the reply, as the plug-ins encode it
    state: Any  # the client's next state
    result: LocalResult


@torch.no_grad()
def client_round(
    half: ClientHalf, down: Any, state: Any, config: LocalConfig, solve: Solver
) -> ClientRound:
    """One local round. Raises TypeError, in one line, if a hook changes ``down`` or ``state``."""
    with half.unchanged(down, state):
        w_i0 = half.start(down, state, config)
        received = half.received(down, w_i0)
        hook = GradientHook(half, received, state, config)
        # the direction's vectors are freed with the steps
        solution = solve(w_i0, half.direction(received, state, config), hook)
        w_K, steps, loss, gradient, moments, mean = solution
        is_sgd = isinstance(half.optimizer, SGD)
        length = half.schedule.total(steps, config.lr) if is_sgd else None
        result = LocalResult(w_i0, w_K, steps, loss, gradient, config, length, moments, mean)
        up, next_state = half.finish(received, down, state, result)
    return ClientRound(up, next_state, result)


def descend(
    w: Vector,
    g: Vector,
    gradients: Iterable[GradientAt],
    direction: Direction,
    hook: GradientHook,
) -> Solution:
    """Update w (..., d) in place along a direction affine in the gradient, a step per gradient:

        w <- w - lr * (scale * clip(g(w)) + shift + rho * (w - anchor) + decay * weight_decay * w)

    All terms without w and g are combined once, before the first step; a step then costs the
    gradient and at most three passes over w, in place and without allocating:

        w <- (1 - lr (rho + decay wd)) w - lr scale clip(g) - lr (shift - rho anchor)

    Another optimiser takes its step along the direction, which is formed in g; so does SGD if the
    direction has a vector ``along``, which no optimiser changes.

    Each of ``gradients`` writes the gradient at a point into the buffer g (..., d). Raises
    ValueError without a step, and if rates fall and the round has another number of steps than
    ``hook.config.steps``.
    """
    walk = _Walk.begin(w, g, direction, hook)
    at, losses = None, list[Tensor]()
    for k, at in enumerate(gradients):
        losses.append(hook.gradient(w, g, walk.buffers, at))
        _step(walk, k, direction, hook)
    if at is None:
        raise ValueError("expected at least one batch of training data, got none")
    K, schedule, expected = len(losses), hook.half.schedule, hook.config.steps
    if schedule.falls and expected != K:
        raise ValueError(
            f"lr-schedule={schedule.name}: expected as many batches as the data said, got {K} of "
            f"{expected}; give a list or a DataLoader of fixed length, or set local-steps"
        )
    loss = torch.stack(losses).mean(0, dtype=sum_dtype(w.device))
    gradient = hook.result(w, g, walk.buffers, at)
    return Solution(w, K, loss, gradient, walk.moments, _mean(walk.total, K))


class CohortGradient(Protocol):
    """The gradients of the clients that take a step together: the first ``clients`` of a cohort."""

    clients: int

    def at(self, rows: slice) -> GradientAt:
        """Computes these clients' gradients, each at a point of its own, into their rows of g."""
        ...


class _Walk(NamedTuple):
    """The vectors of the local steps; a row for each client of a cohort."""

    w: Vector
    g: Vector
    constant: Vector | None
    buffers: Any  # of the gradient hook; a tensor of one dimension belongs to all rows
    moments: Any  # of the optimiser
    total: Vector | None  # (..., d), the sum of the directions; None: not needed
    along: Vector | None  # (..., d), as in `Direction`
    losses: Tensor | None = None  # (n, 1), the sum of a cohort's losses

    @staticmethod
    def begin(w: Vector, g: Vector, direction: Direction, hook: GradientHook) -> "_Walk":
        half = hook.half
        sums = half.rule.reads_mean_direction and not isinstance(half.optimizer, SGD)
        total = torch.zeros_like(w) if sums else None
        moments = half.moments(w, hook.down, hook.state)
        return _Walk(w, g, _constant(direction), hook.init(w), moments, total, direction.along)

    def of(self, rows: slice) -> "_Walk":
        """The vectors of some clients, as views."""
        walk: _Walk = map_vectors(lambda v: v[rows] if v.ndim > 1 else v, self)
        return walk


def descend_cohort(
    w: Vector,
    g: Vector,
    gradients: Iterable[CohortGradient],
    direction: Direction,
    hook: GradientHook,
) -> Solution:
    """`descend` of n clients, w (n, d), which may take unequal numbers of steps.

    Clients are sorted by falling numbers of steps: each of ``gradients`` holds the first rows, as
    many as the one before or fewer. The other rows do not change.
    Raises ValueError as `descend`, and if one has more rows than the one before.
    """
    active = len(w)
    losses = torch.zeros(active, 1, dtype=sum_dtype(w.device), device=w.device)
    whole = walk = _Walk.begin(w, g, direction, hook)._replace(losses=losses)
    steps, own = torch.zeros_like(losses), hook
    last: CohortGradient | None = None
    results: list[Any] = []

    def leave(rows: slice) -> None:
        if last is None:
            raise ValueError("expected at least one batch of training data, got none")
        part, at = whole.of(rows), last.at(rows)
        results.append(_hook_of(rows, hook).result(part.w, part.g, part.buffers, at))

    for k, gradient in enumerate(gradients):
        if gradient.clients > active:
            raise ValueError("expected clients in the order of falling numbers of steps")
        if gradient.clients < active:
            leave(slice(gradient.clients, active))
            active = gradient.clients
            walk, own = whole.of(slice(active)), _hook_of(slice(active), hook)
        at = gradient.at(slice(active))
        losses[:active] += own.gradient(walk.w, walk.g, walk.buffers, at)[:, None]
        _step(walk, k, direction, own)
        steps[:active] += 1
        last = gradient
    leave(slice(active))
    result, *others = reversed(results)
    if others:
        result = map_vectors(lambda *v: torch.cat(v), result, *others)
    K, loss = steps.to(w.dtype), (losses / steps).squeeze(1)
    return Solution(w, K, loss, result, whole.moments, _mean(whole.total, K))


def _hook_of(rows: slice, hook: GradientHook) -> GradientHook:
    """The hook of some clients of a cohort, after `init`."""
    clients = hook.config.client
    assert not isinstance(clients, int)
    K = hook.config.steps
    steps = K[rows] if isinstance(K, Tensor) else K
    config = hook.config._replace(client=clients[rows], steps=steps)
    return GradientHook(hook.half, hook.down, hook.state, config)


def _step(walk: _Walk, k: int, direction: Direction, hook: GradientHook) -> None:
    """Step k, from 0, along the direction with the gradient in ``walk.g``."""
    w, g, constant, config = walk.w, walk.g, walk.constant, hook.config
    lr, decay = hook.half.schedule.rate(k, config), direction.decay * config.weight_decay
    if isinstance(hook.half.optimizer, SGD) and walk.along is None:
        shrink_(w, lr, direction.rho + decay)
        add_(w, g, -lr * direction.scale)
        if constant is not None:
            add_(w, constant, -lr)
        return
    if direction.scale != 1.0:
        g.mul_(direction.scale)
    if direction.rho:
        g.add_(w, alpha=direction.rho)
    if constant is not None:
        g.add_(constant)
    if walk.total is not None:
        walk.total.add_(g)
    own_lr = lr if walk.along is None else lr * (1 - direction.mix)
    hook.half.optimizer.step(w, g, walk.moments, own_lr, decay, config)
    if walk.along is not None:
        add_(w, walk.along, -lr * direction.mix)


def _mean(total: Vector | None, steps: Any) -> Vector | None:
    return None if total is None else total.div_(steps)


def _constant(direction: Direction) -> Vector | None:
    """shift - rho * anchor, or None if it is zero."""
    shift, rho, anchor = direction.shift, direction.rho, direction.anchor
    if rho == 0.0 or anchor is None:
        return shift
    constant = -rho * anchor
    return constant if shift is None else constant.add_(shift)


# --- the server's round ---------------------------------------------------------------------------


class RoundState(NamedTuple):
    """The server's whole state between two rounds, an immutable value."""

    t: int  # number of the next round, from 0
    w: Vector  # w^t, (d,); without a server (m, d), a row for each node
    w_init: Vector | None  # (d,), w^0; None: no client reads it
    server: Any  # the method's server state, a NamedTuple of vectors
    # (C,) int64: the round t whose reply was last accepted; -1: none yet; -2 - t: after a reset,
    # when of the client's state only its own parameters and buffers still count
    accepted: Tensor
    failed: int = 0  # failed rounds in a row without those of empty cohorts; 0 after a lost state
    moments: Any = Stateless()  # the mean of the optimisers' vectors, of optimizer-state=average
    buffers: Vector | None = None  # (d_b,), the clients' mean, which no method reads; None: none
    clock: float = 0.0  # simulated seconds since the start, with a device profile
    privacy: Privacy | None = None  # of the mechanism; None: the run promises none
    # (C,) int64, rounds from the model of each client's last accepted reply to the step that used
    # it; None: rounds are synchronous, all are 0
    delays: Tensor | None = None
    visits: tuple[PendingRequest, ...] = ()  # without a reply yet, in the order of clients

    @property
    def num_clients(self) -> int:
        """C."""
        return len(self.accepted)

    def client(self, i: int) -> Client:
        delay = 0 if self.delays is None else int(self.delays[i])
        return Client(i, self.t, max(-1, int(self.accepted[i])), delay)

    def to(self, device: torch.device) -> "RoundState":
        """The same with its vectors on ``device``; ``accepted`` stays on the host."""
        vectors = ("w", "w_init", "server", "moments", "buffers")
        copies: dict[str, Any] = {n: all_to_device(getattr(self, n), device) for n in vectors}
        visits = tuple(v._replace(down=all_to_device(v.down, device)) for v in self.visits)
        return self._replace(**copies, visits=visits)


def first_state(
    method: ServerHalf,
    w: Vector,
    num_clients: int,
    buffers: Vector | None = None,
    is_buffered: bool = False,
) -> RoundState:
    """The state before round 0; w: (d,), buffers: as in `RoundState`; is_buffered: replies may
    start from earlier models."""
    accepted = torch.full((num_clients,), -1, dtype=torch.int64)
    nodes, server = method.topology.begin(w, first_server(method, w), num_clients)
    more = {"moments": first_moments(method), "buffers": buffers}
    delays = torch.zeros_like(accepted) if is_buffered else None
    return RoundState(0, nodes, w, server, accepted, **more, delays=delays)


def first_moments(method: ServerHalf) -> Any:
    """`RoundState.moments` before round 0."""
    averages = method.own_state() == "average"
    return method.own_optimizer().sends() if averages else Stateless()


def broadcast(method: ServerHalf, s: RoundState, client: int) -> Any:
    """The message to one client in round t, a NamedTuple of vectors (d,)."""
    w, server = method.topology.view(s.w, s.server, client)
    return joined(message_to(method, s.client(client), w, server), s.moments)


class ServerRound(NamedTuple):
    """The result of a round at the server."""

    state: RoundState  # of round t + 1
    ups: Any  # the uploads, a tuple of vectors in each field
    cohort: Cohort
    metrics: dict[str, Number]  # metrics of the topology


@torch.no_grad()
def server_round(
    method: ServerHalf,
    half: ClientHalf,
    s: RoundState,
    replies: Sequence[Reply],
    normal: Normal | None = None,
) -> ServerRound:
    """Round t of the server; ``replies``: the accepted ones, at least one, in the order of clients.

    normal: the noise of private sums, with which there may be no replies.
    """
    clients = torch.tensor([reply.client for reply in replies], dtype=torch.int64)
    accepted, delays = s.accepted.index_fill(0, clients, s.t), s.delays
    if delays is not None:
        late = torch.tensor([reply.delay for reply in replies])
        delays = delays.index_copy(0, clients, late)
        accepted = accepted.index_copy(0, clients, s.t - late)
    began = accepted.clamp(min=-1)
    info = RoundInfo(
        round=s.t,
        lr=method.rate(s.t),
        num_clients=s.num_clients,
        accepted=began,
        weighted=method.weighting == "examples",
        anchored_at_starts=half.moves_anchor,
        schedule=half.schedule,
        seen=seen(began, delays, s.visits),
    )
    privacy = s.privacy
    if privacy is not None and privacy.local:  # clients have added the noise
        privacy = privacy.spent()
    elif privacy is not None:
        assert normal is not None
        kind, models = half.rule.sends, half.rule.models
        mean, privacy = release(privacy, replies, s.w, kind, models, s.num_clients, normal)
        info = info._replace(size=privacy.share * s.num_clients)
        replies = [Reply(-1, mean, method.steps_of_round(s.t) or 1, 1)]
    ups, cohort = method.topology.gather(s.w, replies, info)
    averaged, over = half.mean(ups, cohort)
    step = method.topology.step(method, s.w, averaged, s.server, over)
    w_init = s.w_init if half.needs_w_init else None
    moments = type(s.moments)(*(cohort.mean(getattr(ups, name)) for name in s.moments._fields))
    sent = [reply.buffers for reply in replies if reply.buffers is not None]
    buffers = None if s.buffers is None else cohort.mean(sent)
    more: dict[str, Any] = {"moments": moments, "buffers": buffers, "privacy": privacy}
    more |= {"w": step.w, "w_init": w_init, "server": step.server}
    state = s._replace(t=s.t + 1, accepted=accepted, delays=delays, failed=0, **more)
    return ServerRound(state, ups, cohort, step.metrics)


def failed_round(s: RoundState, has_cohort: bool) -> RoundState:
    """The state after a round that does not count: the model stays, and if there was a cohort, the
    noise was drawn."""
    spent = s.privacy.spent() if s.privacy and has_cohort else s.privacy
    return s._replace(t=s.t + 1, failed=s.failed + 1, privacy=spent)


def forget(
    method: ServerHalf, half: ClientHalf, s: RoundState, clients: Sequence[int]
) -> RoundState:
    """The state after ``clients`` lost theirs: their next visit is a first one.

    If the server's memory is a sum over the clients' states, the part of a lost state is unknown
    and cannot be subtracted. All memories are then reset at the current model; the other clients
    keep their own parameters and buffers, which enter no sum.
    """
    accepted, is_anew = s.accepted, begins_anew(method, half, s, clients)
    if is_anew and half.keeps_local:
        accepted = accepted.where(accepted < 0, -2 - accepted)
    elif is_anew:
        accepted = torch.full_like(accepted, -1)
    accepted = accepted.index_fill(0, torch.tensor([*clients]), -1)
    if not is_anew:
        return s._replace(accepted=accepted)
    w = method.output_model(s.w, s.server)
    centre = method.topology.average(w)
    _, server = method.topology.begin(centre, first_server(method, centre), s.num_clients)
    # pending requests began with old memories: their replies are dropped
    return s._replace(w=w, w_init=centre, server=server, accepted=accepted, visits=())


def begins_anew(method: ServerHalf, half: ClientHalf, s: RoundState, lost: Sequence[int]) -> bool:
    """Whether all memories are reset if these clients lose theirs: if one is part of the sum."""
    return method.tied and not half.rule.is_stateless and bool((s.accepted[[*lost]] >= 0).any())
