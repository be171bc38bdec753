"""The test problem and the few lines that every dense reference shares.

Everything is numpy float64 and deterministic. A reference keeps what belongs to client i in row
i of a (C, d) array; letters are those of the papers: C clients, P active ones, T rounds, K local
steps, w the broadcast model, w_k the local model, w_bar the plain mean of the active w_{i,K}.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """What a listing leaves out: rates, batches, the clip, SAM, relaxed starts and the record.

    gradient(t, i, k, w), of client i at local step k of round t, is g_i(w), or with sam_rho = r > 0
    SAM's g_i(w + r g_i(w)/||g_i(w)||); then clipped. Only this is clipped: not the gradient that
    makes the perturbation, no correction term and no weight decay. Both gradients of a SAM step see
    the same batch.

    A relaxed start is w_{i,0} = w + ri_beta (w - l_i), l_i the last local model, w0 before the
    first visit. ri_first_visit: "initial" extrapolates a first visit from w0, "current" starts it
    plainly at w.

    server: the server's vectors before round 0.
    """

    def __init__(
        self,
        problem: LeastSquares,
        w0: Array,
        *,
        lr: float,
        local_steps: int | Sequence[int],
        lr_decay: float = 1.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        batches: Batches | None = None,
        ri_beta: float = 0.0,
        ri_first_visit: str = "initial",
        sam_rho: float = 0.0,
        **server: Array,
    ) -> None:
        if ri_first_visit not in ("initial", "current"):
            raise ValueError(f"ri_first_visit: 'initial' or 'current', not {ri_first_visit!r}")
        self.problem, self.batches = problem, batches
        self.lr, self.lr_decay, self.local_steps = lr, lr_decay, local_steps
        self.wd, self.clip_norm, self.sam_rho = weight_decay, clip_norm, sam_rho
        self.beta, self.first_visit = ri_beta, ri_first_visit
        self.last = np.broadcast_to(w0, (problem.num_clients, problem.dim)).copy()
        self.visited = np.zeros(problem.num_clients, dtype=bool)
        self.weights, self.averages = [w0], [w0]
        self.traces = {name: [vector] for name, vector in server.items()}

    def rounds(self, schedule: Sequence[Any]) -> Iterator[tuple[int, Any, float]]:
        """t, what the schedule has for round t (its cohort, its matrix), and lr_t."""
        for t, of_round in enumerate(schedule):
            yield t, of_round, self.lr * self.lr_decay**t

    def K(self, i: int) -> int:
        return steps_of(self.local_steps, i)

    def raw(self, t: int, i: int, k: int, w: Array) -> Array:
        """g_i(w) on the batch of step (t, i, k): no SAM, no clip."""
        return self.problem.grad(i, w, None if self.batches is None else self.batches[t][i][k])

    def clipped(self, t: int, i: int, k: int, w: Array) -> Array:
        """clip(g_i(w)): no SAM."""
        return clip(self.raw(t, i, k, w), self.clip_norm)

    def gradient(self, t: int, i: int, k: int, w: Array) -> Array:
        if self.sam_rho > 0:
            w = w + ascent(self.raw(t, i, k, w), self.sam_rho)
        return self.clipped(t, i, k, w)

    def start(self, i: int, w: Array) -> Array:
        """w_{i,0}"""
        if not self.visited[i] and self.first_visit == "current":
            return w.copy()
        return w + self.beta * (w - self.last[i])

    def end(self, i: int, w_K: Array) -> Array:
        """w_{i,K}, which is the client's last local model from now on."""
        self.last[i], self.visited[i] = w_K, True
        return w_K

    def record(self, w: Array, w_bar: Array, **server: Array) -> None:
        """The end of a round: the next model, the plain mean, the server's vectors."""
        self.weights.append(w)
        self.averages.append(w_bar)
        self._trace(server)

    def _trace(self, server: dict[str, Array]) -> None:
        assert server.keys() == self.traces.keys()
        for name, vector in server.items():
            self.traces[name].append(vector)

    def history(self, **clients: Array) -> History:
        traces = {name: np.array(trace) for name, trace in self.traces.items()}
        last = {name: trace[-1] for name, trace in traces.items()}
        weights, averages = np.array(self.weights), np.array(self.averages)
        return History(weights, averages, {"last": self.last, **clients}, last, traces)


def center_of(ri_center: str, w: Array, start: Array) -> Array:
    """The anchor of a prox or dual term: w^t, or the relaxed start."""
    if ri_center not in ("server", "start"):
        raise ValueError(f"ri_center: 'server' or 'start', not {ri_center!r}")
    return w if ri_center == "server" else start


def shares(clients: Iterable[int], examples: Sequence[int] | None) -> dict[int, float]:
    """p_i of a mean over `clients`: n_i over the sum of the n_j; None: all the same."""
    n = {i: 1 if examples is None else examples[i] for i in clients}
    return {i: n_i / sum(n.values()) for i, n_i in n.items()}


def mean(rows: dict[int, Array], examples: Sequence[int] | None = None) -> Array:
    """Mean over the active clients, A_P[.]; plain, or weighted by the examples of each client."""
    if examples is None:
        return np.mean(list(rows.values()), axis=0)
    p = shares(rows, examples)
    return np.sum([p[i] * row for i, row in rows.items()], axis=0)
