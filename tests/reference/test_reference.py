"""The dense references against formulas worked out by hand.

The package equals them, and tests/strategies checks the identities between methods: here is what a
mistake in both would pass. Equalities hold to a relative 1e-10 in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from . import (
    adaptive,
    afedpd,
    fedadmm,
    fedavg,
    fedavgm,
    fedcm,
    feddeper,
    feddyn,
    fedlesam,
    fednova,
    fedpd,
    fedprox,
    fedsmoo,
    fedspeed,
    scaffold,
)
from .problem import LeastSquares, ascent, clip, cohorts, everyone, minibatches

C, D, K, T = 6, 4, 4, 9
PROBLEM = LeastSquares(C, 10, D, seed=3)
W0 = np.random.default_rng(7).normal(size=D)
PARTIAL = cohorts(C, 2, T, seed=1)
FULL = everyone(C, T)
BASE = {"lr": 0.05, "local_steps": K}
OPTIONS = {
    "plain": {},
    "clip": {"clip_norm": 1.0},
    "wd": {"weight_decay": 0.2},
    "decay": {"lr_decay": 0.8},
    "batches": {"batches": minibatches(PROBLEM, T, K, 3, seed=5)},
    "ri": {"ri_beta": 0.3},
    "ri current": {"ri_beta": 0.3, "ri_first_visit": "current"},
}
OPTIONS["all"] = {k: v for option in list(OPTIONS)[1:-1] for k, v in OPTIONS[option].items()}
SAM = {"sam_rho": 0.3}


def go(method, schedule=PARTIAL, option="plain", *, problem=PROBLEM, w0=W0, **kwargs):
    run = method if callable(method) else method.run
    return run(problem, w0, schedule, **{**BASE, **OPTIONS[option], **kwargs})


def assert_close(a, b, rtol=1e-10):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * (1 + np.abs(b).max()))


def assert_same(a, b, *names, rtol=1e-10):
    """Same models, same averages, same last local models, and the same client states `names`."""
    assert_close(a.weights, b.weights, rtol)
    assert_close(a.averages, b.averages, rtol)
    for name in ("last", *names):
        assert_close(a.clients[name], b.clients[name], rtol)


def differ(a, b, by=1e-3):
    return np.abs(a.weights[-1] - b.weights[-1]).max() > by


# The problem and the shared lines ---------------------------------------------------------------


def test_problem_is_the_one_of_torch():
    for i, (x, y) in enumerate(PROBLEM.clients()):
        layer = torch.nn.Linear(D, 1, bias=False).double()
        layer.weight.data = torch.from_numpy(W0[None].copy())
        rows = np.array([1, 4, 5])
        for batch in (None, rows):
            layer.zero_grad()
            xb, yb = (x, y) if batch is None else (x[batch], y[batch])
            (0.5 * ((layer(xb) - yb) ** 2).sum()).backward()
            assert_close(PROBLEM.grad(i, W0, batch), layer.weight.grad.numpy()[0])


def test_optimum_is_stationary_and_clients_disagree():
    assert np.abs(PROBLEM.full_grad(PROBLEM.optimum())).max() < 1e-12
    ridge = PROBLEM.optimum(0.3)
    assert np.abs(PROBLEM.full_grad(ridge) + 0.3 * ridge).max() < 1e-12
    assert all(np.abs(PROBLEM.grad(i, PROBLEM.optimum())).max() > 0.1 for i in range(C))


@pytest.mark.parametrize(("P", "rounds"), [(2, 3), (2, 10), (4, 2), (6, 1)])
def test_cohorts_visit_everyone(P, rounds):
    for seed in range(20):
        schedule = cohorts(C, P, rounds, seed)
        assert all(len(set(a)) == P and a == sorted(a) for a in schedule)
        assert set().union(*schedule) == set(range(C))


def test_clip_and_ascent():
    g = np.array([3.0, 4.0])
    assert_close(clip(g, 1.0), g / 5)
    assert_close(clip(g, 6.0), g)
    assert_close(clip(g, None), g)
    assert_close(ascent(g, 0.5), g / 10)
    assert (ascent(0 * g, 0.5) == 0).all()


def test_one_local_step_by_hand():
    """Two rounds of one step, every option at once: ascent unclipped, clip, then weight decay."""
    o = {**OPTIONS["all"], "local_steps": 1, "sam_rho": 0.3}
    h = go(fedavg, [[2], [2]], **o)
    w, expected = W0, [W0]
    last = W0
    for t in range(2):
        start = w + 0.3 * (w - last)
        rows = o["batches"][t][2][0]
        g = PROBLEM.grad(2, start, rows)
        g = PROBLEM.grad(2, start + 0.3 * g / np.linalg.norm(g), rows)
        assert np.linalg.norm(g) > 1.0
        g = g / np.linalg.norm(g)
        w = last = start - 0.05 * 0.8**t * (g + 0.2 * start)
        expected.append(w)
    assert_close(h.weights, expected)


def test_first_visit():
    """Client 5 comes first at t = 1: from w^0 outwards, or plainly."""
    schedule = [[0, 1], [4, 5]]
    plain = go(fedavg, schedule)
    initial = go(fedavg, schedule, ri_beta=0.3)
    current = go(fedavg, schedule, ri_beta=0.3, ri_first_visit="current")
    assert_same(plain, current)
    assert_close(plain.weights[1], initial.weights[1])
    w = initial.weights[1] + 0.3 * (initial.weights[1] - W0)
    for _ in range(K):
        w = w - 0.05 * PROBLEM.grad(5, w)
    assert_close(initial.clients["last"][5], w)


def test_server_rate_interpolates():
    for method in (fedavg, fedprox, scaffold, fedcm, feddeper, fedlesam):
        h = go(method, server_lr=0.4, ri_beta=0.2)
        assert_close(h.weights[1:], 0.6 * h.weights[:-1] + 0.4 * h.averages[1:])


# Server optimisers ------------------------------------------------------------------------------


def test_fedavgm_one_step_is_heavy_ball():
    h = go(fedavgm, FULL, local_steps=1, beta=0.6, server_lr=0.8)
    w, v = W0, 0
    for t in range(T):
        v = 0.6 * v - 0.05 * PROBLEM.full_grad(w)
        w = w + 0.8 * v
        assert_close(h.weights[t + 1], w)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("adam", lambda v, x: 0.8 * v + 0.2 * x),
        ("yogi", lambda v, x: np.where(v > x, v - 0.2 * x, v + 0.2 * x)),
        ("adagrad", lambda v, x: v + x),
    ],
)
def test_adaptive_servers_by_hand(name, rule):
    """v by its rule; the step solves back for m, which is an exponential mean of Delta."""
    h = go(adaptive, rule=name, tau=1e-2, server_lr=0.05, beta1=0.7, beta2=0.8)
    v, m = np.full(D, 1e-4), 0
    for t in range(T):
        Delta = h.averages[t + 1] - h.weights[t]
        v = rule(v, Delta**2)
        m = 0.7 * m + 0.3 * Delta
        assert_close(h.weights[t + 1] - h.weights[t], 0.05 * m / (v**0.5 + 1e-2))
    assert_close(h.extra["v"], v)
    assert_close(h.extra["m"], m)


@pytest.mark.parametrize("n", [[1] * C, [6, 1, 5, 2, 4, 3]], ids=["alike", "weighted"])
def test_fednova_weighs_tau_and_directions(n):
    """w^t + (sum p_i K_i) sum p_i (w_{i,K_i} - w^t)/K_i, each w_{i,K_i} from FedAvg alone."""
    steps = [1, 2, 3, 4, 5, 6]
    h = go(fednova, local_steps=steps, examples=n, server_lr=0.9)
    for t, active in enumerate(PARTIAL):
        w = h.weights[t]
        p = np.array([n[i] for i in active]) / sum(n[i] for i in active)
        local = [go(fedavg, [[i]], w0=w, local_steps=steps[i]).weights[1] for i in active]
        d = [(x - w) / steps[i] for x, i in zip(local, active, strict=True)]
        tau = p @ [steps[i] for i in active]
        assert_close(h.weights[t + 1], w + 0.9 * tau * p @ d)


# SCAFFOLD, FedCM, FedDeper ----------------------------------------------------------------------


def test_control_variates_are_mean_gradients_of_the_path():
    """c_i^+ = mean over the path of g + wd w. One step: the gradient at the (relaxed) start."""
    kwargs = {"ri_beta": 0.3, "weight_decay": 0.2, "lr_decay": 0.8}
    h = go(scaffold, local_steps=1, **kwargs)
    i = PARTIAL[-1][0]
    before = go(scaffold, PARTIAL[:-1], local_steps=1, **kwargs)
    start = before.weights[-1] + 0.3 * (before.weights[-1] - before.clients["last"][i])
    assert_close(h.clients["c_i"][i], PROBLEM.grad(i, start) + 0.2 * start)
    assert_close(
        h.clients["last"][i],
        start
        - 0.05
        * 0.8 ** (T - 1)
        * (PROBLEM.grad(i, start) + 0.2 * start - before.clients["c_i"][i] + before.extra["c"]),
    )
    three = go(scaffold, [[i]], local_steps=3)
    path = [go(fedavg, [[i]], local_steps=k).weights[1] if k else W0 for k in range(3)]
    mean_gradient = np.mean([PROBLEM.grad(i, w) for w in path], axis=0)
    assert_close(three.clients["c_i"][i], mean_gradient)
    assert_close(three.extra["c"], mean_gradient / C)


@pytest.mark.parametrize("wd_mode", ["outside", "inside"])
def test_fedcm_one_step_by_hand(wd_mode):
    """Delta is an exponential mean of gradients at the relaxed starts; the model moves along it."""
    own = {"alpha": 0.3, "weight_decay": 0.2, "wd_mode": wd_mode}
    h = go(fedcm, FULL, local_steps=1, ri_beta=0.2, lr_decay=0.9, **own)
    decay = 0.2 if wd_mode == "outside" else 0.3 * 0.2
    w, Delta, last = W0, np.zeros(D), np.tile(W0, (C, 1))
    for t in range(T):
        start = w + 0.2 * (w - last)
        g = np.array([PROBLEM.grad(i, start[i]) for i in range(C)])
        Delta_i = 0.3 * g + 0.7 * Delta + decay * start
        last = start - 0.05 * 0.9**t * Delta_i
        Delta, w = Delta_i.mean(axis=0), last.mean(axis=0)
        assert_close(h.weights[t + 1], w)
        assert_close(h.traces["delta"][t + 1], Delta)


def test_feddeper_two_steps_by_hand():
    """The second step of the first round sees v_1, y_1; the second round sees the mixed v_i."""
    lr, rho, lam, wd = 0.05, 0.1, 0.75, 0.2
    h = go(feddeper, [[0], [0]], local_steps=2, rho=rho, lam=lam, weight_decay=wd)
    x, v = W0, W0
    for t in range(2):
        y0, v0 = x, v
        y1 = y0 - lr * (PROBLEM.grad(0, y0) + wd * y0) - rho * (v0 + y0 - 2 * x)
        v1 = v0 - lr * (PROBLEM.grad(0, v0) + wd * v0)
        y2 = y1 - lr * (PROBLEM.grad(0, y1) + wd * y1) - rho * (v1 + y1 - 2 * x)
        v2 = v1 - lr * (PROBLEM.grad(0, v1) + wd * v1)
        v, x = (1 - lam) * v2 + lam * y2, y2
        assert_close(h.weights[t + 1], x)
    assert_close(h.clients["v"][0], v)
    assert_close(h.clients["v"][1], W0)


# The primal-dual family -------------------------------------------------------------------------


@pytest.mark.parametrize("center", ["server", "start"])
def test_exact_local_solves(center):
    """w_i = argmin f_i + (rho/2)||w - centre||^2, with + <lam_i, w> for the dual methods, whose
    stationarity reads lam_i^new = -grad f_i(w_i). Steps begin at the relaxed start."""
    rho, beta = 0.7, 0.3
    own = {"local_steps": 500, "ri_beta": beta, "ri_center": center}
    for method, name in ((fedprox, "mu"), (feddyn, "alpha"), (fedadmm, "rho")):
        h = go(method, **own, **{name: rho})
        w_i, lam = np.tile(W0, (C, 1)), np.zeros((C, D))
        for t, active in enumerate(PARTIAL):
            for i in active:
                jump = beta * (h.weights[t] - w_i[i]) if center == "start" else 0
                pull = PROBLEM.A[i].T @ PROBLEM.b[i] - lam[i] + rho * (h.weights[t] + jump)
                w_i[i] = np.linalg.solve(PROBLEM.hessian(i) + rho * np.eye(D), pull)
                if method is not fedprox:
                    lam[i] = -PROBLEM.grad(i, w_i[i])
            assert_close(h.averages[t + 1], w_i[active].mean(axis=0))
        if method is not fedprox:
            assert_close(h.clients["lam"], lam)


def test_fedspeed_paper_ascent():
    """a = 0 ignores the ascent; plain ascent on a quadratic is (I + r H_i) g_1."""
    assert_same(go(fedspeed, a=0.0, **SAM), go(feddyn), "lam")
    r, a = 0.3, 0.6
    h = go(fedspeed, [[1]], local_steps=1, sam_rho=r, a=a, ascent_form="plain")
    g = PROBLEM.grad(1, W0)
    direction = g + a * r * PROBLEM.hessian(1) @ g
    assert_close(h.averages[1], W0 - 0.05 * direction)
    clipped = go(fedspeed, [[1]], local_steps=1, sam_rho=r, a=a, ascent_form="plain", clip_norm=1.0)
    assert_close(clipped.averages[1], W0 - 0.05 * direction / np.linalg.norm(direction))


def test_fedpd_skipping():
    """A skipped round moves only own anchors; the next one averages them."""
    skip = [False, True, True, False]
    full = everyone(C, 4)
    h = go(fedpd, full, rho=0.5, skip=skip)
    assert_close(h.weights[2], h.weights[1])
    assert_close(h.weights[3], h.weights[1])
    assert_same(go(fedpd, full[:1], rho=0.5), go(fedpd, full[:1], rho=0.5, skip=[False]), "lam")
    before = go(fedpd, full[:2], rho=0.5, skip=skip)
    anchor = before.clients["last"] + before.clients["lam"] / 0.5
    assert_close(before.clients["anchor"], anchor)
    third = go(fedpd, full[:3], rho=0.5, skip=skip)
    for i in range(C):
        th = anchor[i]
        for _ in range(K):
            pull = 0.5 * (th - anchor[i])
            th = th - 0.05 * (PROBLEM.grad(i, th) + before.clients["lam"][i] + pull)
        assert_close(third.clients["last"][i], th)
    fourth = go(fedpd, full, rho=0.5, skip=skip)
    mean_anchor = (fourth.clients["last"] + fourth.clients["lam"] / 0.5).mean(axis=0)
    assert_close(fourth.weights[4], mean_anchor)


def test_fedpd_own_start_is_a_relaxed_start_of_minus_one():
    own = go(fedpd, FULL, local_init="own")
    assert_same(own, go(fedpd, FULL, ri_beta=-1.0), "lam")
    assert differ(own, go(fedpd, FULL))


def test_exact_local_solves_are_consensus_admm():
    """Duals are -grad f_i(theta_i); at full participation w_bar is textbook ADMM's sequence:
    x_i = argmin f_i + <y_i, x> + (rho/2)||x - z||^2, z = mean(x_i + y_i/rho), y_i += rho(x_i - z).
    """
    rho, rounds = 0.8, 5
    h = go(afedpd, everyone(C, rounds), rho=rho, local_steps=500)
    duals = [-PROBLEM.grad(i, h.clients["last"][i]) for i in range(C)]
    assert_close(h.clients["lam"], duals)
    # In the family's letters z = w_bar^t and y_i = delta_i = lam_i - lam_bar.
    z, y = W0, np.zeros((C, D))
    for t in range(rounds):
        x = np.array(
            [
                np.linalg.solve(
                    PROBLEM.hessian(i) + rho * np.eye(D),
                    PROBLEM.A[i].T @ PROBLEM.b[i] - y[i] + rho * z,
                )
                for i in range(C)
            ]
        )
        z_new = (x + y / rho).mean(axis=0)
        y = y + rho * (x - z_new)
        z = z_new
        assert_close(h.averages[t + 1], z)
    assert_close(h.clients["lam"] - h.extra["lam_bar"], y)
    partial = go(afedpd, PARTIAL, rho=rho, local_steps=500)
    for i in PARTIAL[-1]:
        assert_close(partial.clients["lam"][i], -PROBLEM.grad(i, partial.clients["last"][i]))


# SAM variants that are not base + SAM -----------------------------------------------------------


def test_fedlesam_rounds_by_hand():
    """First activations are FedAvg's; then e_i points from w^t back to the last received model."""
    schedule = [[0, 1], [0, 2], [1, 2]]
    r = 0.4
    h = go(fedlesam, schedule, local_steps=1, path_rho=r, weight_decay=0.2)
    w = h.weights

    def step(t, i, old):
        e = 0 if old is None else r * (w[old] - w[t]) / np.linalg.norm(w[old] - w[t])
        return w[t] - 0.05 * (PROBLEM.grad(i, w[t] + e) + 0.2 * w[t])

    assert_close(w[1], (step(0, 0, None) + step(0, 1, None)) / 2)
    assert_close(w[2], (step(1, 0, 0) + step(1, 2, None)) / 2)
    assert_close(w[3], (step(2, 1, 0) + step(2, 2, 1)) / 2)
    assert_close(h.clients["w_old"][:3], [w[1], w[2], w[2]])


def test_fedsmoo_by_hand():
    """Two rounds of two steps of two clients."""
    r, rho, lr = 0.4, 0.5, 0.05
    h = go(fedsmoo, [[0, 1], [0, 1]], local_steps=2, sam_rho=r, rho=rho)
    theta, s = W0, np.zeros(D)
    mu, lam = np.zeros((C, D)), np.zeros((C, D))
    for t in range(2):
        ends = []
        for i in (0, 1):
            th = theta
            for _ in range(2):
                u = PROBLEM.grad(i, th) - mu[i] - s
                e = r * u / np.linalg.norm(u)
                mu[i] += e - s
                th = th - lr * (PROBLEM.grad(i, th + e) + lam[i] + rho * (th - theta))
            ends.append(th)
            lam[i] += rho * (th - theta)
        total = mu[0] + mu[1]
        s = r * total / np.linalg.norm(total)
        theta = (ends[0] + ends[1]) / 2 + (lam[0] + lam[1]) / (C * rho)
        assert_close(h.weights[t + 1], theta)
        assert_close(h.traces["s"][t + 1], s)
    assert_close(h.clients["mu"], mu)
