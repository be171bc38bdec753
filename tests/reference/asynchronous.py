"""Buffered asynchronous rounds, dense: all clients' memories in one array, all visits by hand.

M clients work at any time; the server steps when B replies have come. Client i received w^{s_i},
and D_i = w_{i,K} - w^{s_i}; tau_i = t - s_i.

    v = w^t + mean over the buffer of omega(tau_i) D_i
    FedAvg     w = v
    SCAFFOLD   w = v;  c_i <- c_i - c^{s_i} - D_i / (K lr);  c = mean of c_i
    FedDyn     lam_i <- lam_i + rho D_i;  w = v + mean of lam_i / rho
    A-FedPD    the same, and the others, also those at work: lam_i <- lam_i + rho (v - w^t)
    FedNova    w = w^t + mean of K_i times the mean of omega(tau_i) D_i / K_i
    FedGloSS   as FedDyn, then w <- w - e^t + e^{t+1},  e^{t+1} = radius (w^t - v) / ||w^t - v||
    FedInit    clients start at y_0 = w + beta (w - their last model), and D_i = w_{i,K} - y_0
    local      clients resume from their own models; w = the mean of those in the buffer
    ACE        w = w^t + server_lr times the mean of all clients' last D_i, zero before the first
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.reference.problem import EPS, Array, LeastSquares


class Work(NamedTuple):
    """A visit at work."""

    end: float
    client: int
    start: int  # s
    y: Array  # w_{i,K}
    D: Array
    c: Array  # c^s


class Result(NamedTuple):
    w: Array  # (T + 1, d)
    memories: Array  # (T + 1, C, d): c_i, lam_i or D_i
    delays: list[list[int]]  # tau_i of each step


def run(
    method: str,
    problem: LeastSquares,
    w0: Array,
    schedule: Sequence[Sequence[int]],
    seconds: Sequence[float],
    *,
    M: int,
    B: int,
    K: int | Sequence[int],
    lr: float,
    rho: float = 1.0,
    radius: float = 0.2,
    beta: float = 0.1,
    server_lr: float = 1.0,
    omega: Callable[[int], float] = lambda tau: 1.0,
) -> Result:
    """schedule: who is asked in each step, as far as seats are free and they are not at work.
    seconds: of a visit of each client. K: local steps, of all or of each client."""
    C, d = problem.num_clients, problem.dim
    steps = [K] * C if isinstance(K, int) else K
    duals = method in ("feddyn", "afedpd", "fedgloss")
    w, memory, c, e = w0.copy(), np.zeros((C, d)), np.zeros(d), np.zeros(d)
    if method in ("local", "fedinit"):
        memory = memory + w0
    now, at_work = 0.0, list[Work]()
    result: Any = Result(w0[None], memory[None], [])
    for t, cohort in enumerate(schedule):
        busy = {visit.client for visit in at_work}
        for i in [i for i in sorted(cohort) if i not in busy][: M - len(busy)]:
            start = {"local": memory[i], "fedinit": w + beta * (w - memory[i])}.get(method, w)
            y = start.copy()
            for _ in range(steps[i]):
                g = problem.grad(i, y)
                if method == "scaffold":
                    g = g - memory[i] + c
                elif duals:
                    g = g + memory[i] + rho * (y - w)
                y = y - lr * g
            at_work.append(Work(now + seconds[i], i, t, y, y - start, c))
        at_work.sort()
        buffer, at_work = at_work[:B], at_work[B:]
        now = buffer[-1].end
        damped = [omega(t - visit.start) * visit.D for visit in buffer]
        step = np.mean(damped, axis=0)
        if method == "fednova":
            own = [steps[visit.client] for visit in buffer]
            step = np.mean(own) * np.mean([D / k for D, k in zip(damped, own, strict=True)], axis=0)
        memory, clients = memory.copy(), [visit.client for visit in buffer]
        for visit in buffer:
            i, D = visit.client, visit.D
            if method == "scaffold":
                memory[i] -= visit.c + D / (steps[i] * lr)
            elif duals:
                memory[i] += rho * D
            elif method == "ace":
                memory[i] = D
            elif method in ("local", "fedinit"):
                memory[i] = visit.y
        if method == "afedpd":
            memory[[i for i in range(C) if i not in clients]] += rho * step
        if method == "scaffold":
            c = memory.mean(axis=0)
        if method == "ace":
            step = server_lr * memory.mean(axis=0)
        if method == "local":
            step = memory[clients].mean(axis=0) - w
        w = w + step
        if duals:
            w = w + memory.mean(axis=0) / rho
        if method == "fedgloss":
            before, e = e, -radius * step / (np.linalg.norm(step) + EPS)
            w = w - before + e
        result = Result(
            np.concatenate([result.w, w[None]]),
            np.concatenate([result.memories, memory[None]]),
            [*result.delays, [t - visit.start for visit in buffer]],
        )
    return result
