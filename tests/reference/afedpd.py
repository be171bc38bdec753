"""A-FedPD - arXiv:2409.18915, Algorithm 1, literally: one dense (C, d) table of duals.

    theta_i^0 = theta^0, lam_i^0 = 0 for all i
    for t = 0 .. T-1:
        1. for i in P^t:  theta_{i,0} = theta^t, K steps of
               theta <- theta - lr_t (g_i(theta) + lam_i^t + rho (theta - theta^t) + wd theta)
        2. theta_bar^{t+1} = A_P[theta_i]
        3. active i:    lam_i^{t+1} = lam_i^t + rho (theta_i - theta^t)
           inactive i:  lam_i^{t+1} = lam_i^t + rho (theta_bar^{t+1} - theta^t)      (virtual)
        4. lam_bar^{t+1} = A_C[lam_i^{t+1}]
        5. theta^{t+1} = theta_bar^{t+1} + lam_bar^{t+1} / rho

`run_centred` is the same method in a client's own state, delta_i = lam_i - lam_bar:

        1. for i in P^t:  start 2 w_bar^t - w_bar^{t-1}, K steps of
               theta <- theta - lr_t (g_i(theta) + delta_i^t + rho (theta - w_bar^t) + wd theta)
        2. w_bar^{t+1} = A_P[theta_i]
        3. active i:    delta_i^{t+1} = delta_i^t + rho (theta_i - w_bar^{t+1}); inactive: unchanged

with w_bar^{-1} = w_bar^0 = theta^0. `weights` are theta^t, `averages` are w_bar^t (the model
that the paper's theorem is about). Decisions: rho is constant, though the listing prints rho_t;
a relaxed start moves theta_{i,0} only, the centre stays theta^t. With `examples` A_P and A_C are
weighted by n_i, which is the same algebra: lam_bar moves by rho (theta_bar - theta^t).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .problem import Array, Cohorts, Federation, History, LeastSquares, mean


def run(
    problem: LeastSquares,
    w0: Array,
    cohorts: Cohorts,
    *,
    rho: float = 0.1,
    examples: Sequence[int] | None = None,
    **common: Any,
) -> History:
    f = Federation(problem, w0, lam_bar=np.zeros(problem.dim), **common)
    C = problem.num_clients
    theta = w0
    lam = np.zeros((C, problem.dim))
    for t, active, lr_t in f.rounds(cohorts):
        theta_i = {}
        for i in active:
            th = f.start(i, theta)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, th)
                th = th - lr_t * (g + lam[i] + rho * (th - theta) + f.wd * th)
            theta_i[i] = f.end(i, th)
        theta_bar = mean(theta_i, examples)
        for i in range(C):
            if i in theta_i:
                lam[i] = lam[i] + rho * (theta_i[i] - theta)
            else:
                lam[i] = lam[i] + rho * (theta_bar - theta)
        lam_bar = np.average(lam, 0, examples)
        theta = theta_bar + lam_bar / rho
        f.record(theta, theta_bar, lam_bar=lam_bar)
    return f.history(lam=lam)


def run_centred(
    problem: LeastSquares, w0: Array, cohorts: Cohorts, *, rho: float = 0.1, **common: Any
) -> History:
    f = Federation(problem, w0, lam_bar=np.zeros(problem.dim), **common)
    delta = np.zeros((problem.num_clients, problem.dim))
    w_bar, w_bar_previous = w0, w0
    for t, active, lr_t in f.rounds(cohorts):
        theta_i = {}
        for i in active:
            th = f.start(i, 2 * w_bar - w_bar_previous)
            for k in range(f.K(i)):
                g = f.gradient(t, i, k, th)
                th = th - lr_t * (g + delta[i] + rho * (th - w_bar) + f.wd * th)
            theta_i[i] = f.end(i, th)
        w_bar, w_bar_previous = mean(theta_i), w_bar
        for i in active:
            delta[i] = delta[i] + rho * (theta_i[i] - w_bar)
        lam_bar = rho * (w_bar - w_bar_previous)
        f.record(2 * w_bar - w_bar_previous, w_bar, lam_bar=lam_bar)
    return f.history(delta=delta, lam=delta + lam_bar)
