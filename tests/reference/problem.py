"""The test problem and the few lines that every dense reference shares.

Everything is numpy float64 and deterministic. A reference keeps what belongs to client i in row
i of a (C, d) array; letters are those of the papers: C clients, P active ones, T rounds, K local
steps, w the broadcast model, w_k the local model, w_bar the plain mean of the active w_{i,K}.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .optimizers import RATES, SGD

Array = NDArray[np.float64]
Cohorts = Sequence[Sequence[int]]
Batches = Sequence[Sequence[Sequence[NDArray[np.int64]]]]  # batches[t][i][k]: rows of client i

EPS = 1e-12  # keeps g/||g|| at zero when g = 0


class History(NamedTuple):
    """What a reference returns: the path of the models and every state after the last round."""

    weights: Array  # (T+1, d), row t: the model broadcast at round t; row 0 = w0
    averages: Array  # (T+1, d), row t+1: plain mean of the active w_{i,K} of round t; row 0 = w0
    clients: dict[str, Array]  # (C, d) each, after the last round; "last" = last local models
    extra: dict[str, Array]  # server vectors (d,), after the last round
    traces: dict[str, Array]  # (T+1, d) each: a server vector per round, row 0 = initial value


class LeastSquares:
    """Heterogeneous least squares f_i(w) = 1/2 ||A_i w - b_i||^2 (sum over rows), f = mean of f_i.

    The Hessians A_i^T A_i have their eigenvalues in [0.8, 4], and differ in their eigenvectors; the
    local minimisers are about `heterogeneity` apart. No b_i is fitted without residual.
    """

    def __init__(
        self,
        num_clients: int = 8,
        num_rows: int = 12,
        dim: int = 5,
        *,
        seed: int = 0,
        heterogeneity: float = 1.0,
    ) -> None:
        rng = np.random.default_rng(seed)
        C, n, d = num_clients, num_rows, dim
        u, _, vt = np.linalg.svd(rng.normal(size=(C, n, d)), full_matrices=False)
        s = np.sqrt(rng.uniform(0.8, 4.0, size=(C, d)))
        self.A: Array = (u * s[:, None, :]) @ vt  # (C, n, d)
        w_true = rng.normal(size=d) + heterogeneity * rng.normal(size=(C, d))
        noise = 0.3 * rng.normal(size=(C, n))
        self.b: Array = np.einsum("cnd,cd->cn", self.A, w_true) + noise  # (C, n)

    @property
    def num_clients(self) -> int:
        return self.A.shape[0]

    @property
    def dim(self) -> int:
        return self.A.shape[2]

    def grad(self, i: int, w: Array, batch: NDArray[np.int64] | None = None) -> Array:
        """Gradient of f_i at w, summed over the rows in `batch` (None: all rows)."""
        A = self.A[i] if batch is None else self.A[i][batch]
        b = self.b[i] if batch is None else self.b[i][batch]
        return A.T @ (A @ w - b)

    def full_grad(self, w: Array) -> Array:
        """Gradient of f = (1/C) sum_i f_i at w."""
        return np.mean([self.grad(i, w) for i in range(self.num_clients)], axis=0)

    def hessian(self, i: int) -> Array:
        """A_i^T A_i."""
        return self.A[i].T @ self.A[i]

    def optimum(self, weight_decay: float = 0.0, examples: Sequence[int] | None = None) -> Array:
        """argmin of f(w) + (weight_decay/2) ||w||^2; with `examples` f is the weighted mean."""
        H = np.average([self.hessian(i) for i in range(self.num_clients)], 0, examples)
        pulls = [self.A[i].T @ self.b[i] for i in range(self.num_clients)]
        y = np.average(pulls, 0, examples)
        return np.linalg.solve(H + weight_decay * np.eye(self.dim), y)

    def clients(self) -> list[tuple[Any, Any]]:
        """[(x_i (n_i, d), y_i (n_i, 1))], torch float64.

        nn.Linear(d, 1, bias=False) with the loss 0.5*((pred - y)**2).sum() is the same problem.
        """
        import torch

        return [
            (torch.from_numpy(A.copy()), torch.from_numpy(b.copy()).reshape(-1, 1))
            for A, b in zip(self.A, self.b, strict=True)
        ]


def cohorts(C: int, P: int, T: int, seed: int) -> list[list[int]]:
    """T sorted cohorts of P out of C clients; each client is in one of them if T*P >= C.

    Uniform draws without replacement; then a client that was never drawn takes the latest place of
    one that was drawn more than once.
    """
    rng = np.random.default_rng(seed)
    schedule = [set(rng.choice(C, size=P, replace=False).tolist()) for _ in range(T)]
    for missing in range(C):
        count = {i: sum(i in active for active in schedule) for i in range(C)}
        if count[missing] > 0:
            continue
        for active in reversed(schedule):
            repeated = [i for i in sorted(active) if count[i] > 1]
            if repeated:
                active.remove(repeated[0])
                active.add(missing)
                break
    return [sorted(active) for active in schedule]


def everyone(C: int, T: int) -> list[list[int]]:
    """Full participation for T rounds."""
    return [list(range(C)) for _ in range(T)]


def minibatches(
    problem: LeastSquares, T: int, local_steps: int | Sequence[int], batch_size: int, seed: int
) -> list[list[list[NDArray[np.int64]]]]:
    """A fixed schedule batches[t][i][k] of `batch_size` rows without replacement."""
    rng = np.random.default_rng(seed)
    n = problem.A.shape[1]
    return [
        [
            [rng.choice(n, size=batch_size, replace=False) for _ in range(steps_of(local_steps, i))]
            for i in range(problem.num_clients)
        ]
        for _ in range(T)
    ]


def steps_of(local_steps: int | Sequence[int], i: int) -> int:
    """K_i: one number for every client, or one number each."""
    return local_steps if isinstance(local_steps, int) else int(local_steps[i])


def clip(g: Array, clip_norm: float | None) -> Array:
    """g * min(1, clip_norm/||g||); None: off."""
    norm = np.linalg.norm(g)
    if clip_norm is None or norm <= clip_norm:
        return g
    return g * (clip_norm / norm)


def ascent(g: Array, r: float) -> Array:
    """SAM's perturbation r * g/||g||, zero if g = 0."""
    return r * g / (np.linalg.norm(g) + EPS)


class Federation:
    """What a listing leaves out: local steps, batches, the clip, SAM, relaxed starts, the record.

    The K local steps of client i in round t are w <- w - lr_t (direction(w, g) + wd w), with
    direction = g by default. g is g_i(w), with sam_rho = r > 0 SAM's g_i(w + r g_i(w)/||g_i(w)||),
    with path_rho = r > 0 FedLESAM's g_i(w + e_i); then clipped. Only this is clipped: not the
    gradient that makes the perturbation, no correction term and no weight decay. Perturbations do
    not contain a correction or weight decay, and both gradients of a step see the same batch.

    A relaxed start is w_{i,0} = w + ri_beta (w - l_i), l_i the last local model, w0 before the
    first visit. ri_first_visit: "initial" extrapolates a first visit from w0, "current" starts it
    plainly at w. ri_center: the anchor of a prox or dual term is w ("server") or w_{i,0} ("start").

    e_i = r (w_i^old - w) / ||w_i^old - w||, w_i^old the model of i's last visit; 0 at the first.

    make: another optimiser's steps along the direction, weight decay beside them. Its vectors begin
    anew every round (state "reset"), stay with the client ("keep"), or begin as the mean of what
    the last round's clients ended with ("average"; AdamW: bias-corrected, and corrected no more).

    examples: n_i of every client, the weights of `mean`; None: equal weights.
    """

    def __init__(
        self,
        problem: LeastSquares,
        w0: Array,
        schedule: Sequence[Any],
        *,
        lr: float,
        local_steps: int | Sequence[int] = 1,
        lr_decay: float = 1.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        batches: Batches | None = None,
        examples: Sequence[int] | None = None,
        ri_beta: float = 0.0,
        ri_first_visit: str = "initial",
        ri_center: str = "server",
        sam_rho: float = 0.0,
        path_rho: float = 0.0,
        make: Callable[[], Any] = SGD,
        state: str = "reset",
        lr_schedule: str = "constant",
    ) -> None:
        assert ri_first_visit in ("initial", "current")
        assert ri_center in ("server", "start")
        self.problem, self.w0, self.schedule = problem, w0, schedule
        self.C, self.d = problem.num_clients, problem.dim
        self.lr, self.lr_decay, self.local_steps = lr, lr_decay, local_steps
        self.wd, self.clip_norm = weight_decay, clip_norm
        self.batches, self.examples = batches, examples
        self.beta, self.first_visit, self.ri_center = ri_beta, ri_first_visit, ri_center
        self.sam_rho, self.path_rho = sam_rho, path_rho
        self.make, self.state, self.factor = make, state, RATES[lr_schedule]
        self.optimizers: dict[int, Any] = {}
        self.mean_state: list[Array] | None = None
        self.mean_gradient = self.zeros()  # over the steps of a client's last round
        self.last, self.received, self.e = self.copies(w0), self.copies(w0), self.zeros()
        self.visited = np.zeros(self.C, dtype=bool)
        self.weights, self.averages = [w0], [w0]
        self.traces: dict[str, list[Array]] = {}

    def zeros(self) -> Array:
        return np.zeros((self.C, self.d))

    def copies(self, w: Array) -> Array:
        """w for every client, (C, d)."""
        return np.broadcast_to(w, (self.C, self.d)).copy()

    def rounds(self, **server: Array) -> Iterator[tuple[int, Any, float]]:
        """t, what the schedule has for round t (its cohort, its matrix), and lr_t.

        server: vectors whose path is recorded, with their values before round 0.
        """
        self.traces = {name: [vector] for name, vector in server.items()}
        for t, of_round in enumerate(self.schedule):
            yield t, of_round, self.rate(t)
            if self.state == "average":
                ends = zip(*(self.optimizers[i].sent() for i in of_round), strict=True)
                p = [*self.shares(of_round).values()]
                self.mean_state = [np.average(vectors, axis=0, weights=p) for vectors in ends]

    def rate(self, t: int) -> float:
        return self.lr * self.lr_decay**t

    def K(self, i: int) -> int:
        return steps_of(self.local_steps, i)

    def raw(self, t: int, i: int, k: int, w: Array) -> Array:
        """g_i(w) on the batch of step (t, i, k): no SAM, no clip."""
        return self.problem.grad(i, w, None if self.batches is None else self.batches[t][i][k])

    def clipped(self, t: int, i: int, k: int, w: Array) -> Array:
        """clip(g_i(w)): no SAM."""
        return clip(self.raw(t, i, k, w), self.clip_norm)

    def gradient(self, t: int, i: int, k: int, w: Array) -> Array:
        """g, the gradient of a local step at w."""
        if self.path_rho > 0:
            w = w + self.e[i]
        elif self.sam_rho > 0:
            w = w + ascent(self.raw(t, i, k, w), self.sam_rho)
        return self.clipped(t, i, k, w)

    def start(self, i: int, w: Array) -> Array:
        """w_{i,0} of a client that receives w."""
        if self.visited[i]:
            self.e[i] = ascent(self.received[i] - w, self.path_rho)
        self.received[i] = w
        if not self.visited[i] and self.first_visit == "current":
            return w.copy()
        return w + self.beta * (w - self.last[i])

    def center(self, w: Array, w_0: Array) -> Array:
        """The anchor of a prox or dual term."""
        return w if self.ri_center == "server" else w_0

    def steps(
        self, t: int, i: int, w: Array, direction: Callable[[Array, Array], Array] = lambda w, g: g
    ) -> Array:
        """w_K after the K local steps from w."""
        if self.state != "keep" or i not in self.optimizers:
            self.optimizers[i] = self.make()
        if self.mean_state is not None:
            self.optimizers[i].start(*self.mean_state)
        K, gradients = self.K(i), []
        for k in range(K):
            gradients.append(self.gradient(t, i, k, w))
            step = self.optimizers[i].step(direction(w, gradients[-1]))
            w = w - self.rate(t) * self.factor(k / K) * (step + self.wd * w)
        self.mean_gradient[i] = np.mean(gradients, axis=0)
        return w

    def end(self, i: int, w_K: Array) -> Array:
        """w_{i,K}, which is the client's last local model from now on."""
        self.last[i], self.visited[i] = w_K, True
        return w_K

    def train(
        self, t: int, i: int, w_0: Array, *direction: Callable[[Array, Array], Array]
    ) -> Array:
        """w_{i,K} from w_{i,0}."""
        return self.end(i, self.steps(t, i, w_0, *direction))

    def shares(self, clients: Iterable[int]) -> dict[int, float]:
        """p_i of a mean over `clients`: n_i over the sum of the n_j."""
        n = {i: 1 if self.examples is None else self.examples[i] for i in clients}
        return {i: n_i / sum(n.values()) for i, n_i in n.items()}

    def mean(self, rows: dict[int, Array]) -> Array:
        """Mean over the active clients, A_P[.]"""
        p = self.shares(rows)
        return np.sum([p[i] * row for i, row in rows.items()], axis=0)

    def record(self, w: Array, w_bar: Array, **server: Array) -> None:
        """The end of a round: the next model, the plain mean, the server's vectors."""
        self.weights.append(w)
        self.averages.append(w_bar)
        self.trace(server)

    def trace(self, server: dict[str, Array]) -> None:
        assert server.keys() == self.traces.keys()
        for name, vector in server.items():
            self.traces[name].append(vector)

    def history(self, **clients: Array) -> History:
        traces = {name: np.array(trace) for name, trace in self.traces.items()}
        extra = {name: trace[-1] for name, trace in traces.items()}
        clients = {"last": self.last, "w_old": self.received, **clients}
        return History(np.array(self.weights), np.array(self.averages), clients, extra, traces)


def reference(run: Callable[..., Any], kind: Any = Federation) -> Callable[..., Any]:
    """run(problem, w0, schedule, options), where ``run`` has a Federation and its own options.

    Every other option is the Federation's.
    """
    own = inspect.signature(run).parameters

    @functools.wraps(run)
    def complete(problem: LeastSquares, w0: Array, schedule: Sequence[Any], **options: Any) -> Any:
        common = {name: value for name, value in options.items() if name not in own}
        mine = {name: value for name, value in options.items() if name in own}
        return run(kind(problem, w0, schedule, **common), **mine)

    return complete
