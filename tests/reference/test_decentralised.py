"""The decentralised references against formulas worked out by hand.

On graphs that change from round to round, with and without failing nodes; see test_reference.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.optim.sgd import sgd

from . import dfedavg, dispfl, dpsgd, gossip_feddyn, gossip_scaffold
from .problem import LeastSquares, minibatches
from .test_reference import PROBLEM, SAM, W0, C, D, assert_close, differ
from .topology import (
    draw,
    exponential,
    exponential_directed,
    from_edges,
    full,
    grid,
    random,
    ring,
    without,
)

K, T = 3, 6
RING = [ring(C)] * T
MEAN = [full(C)] * T
CHANGING = [
    ring(C),
    random(draw(C, 1, np.random.default_rng(0))),
    grid(C),
    random(draw(C, 2, np.random.default_rng(1))),
    from_edges(C, [(0, 1), (1, 2), (3, 4), (4, 5)]),  # not connected
    exponential(C),
]
DIRECTED = [exponential_directed(C)] * T
FAILED = [[4], [], [0, 2, 5], [2], [1], []]
BASE = {"lr": 0.05, "local_steps": K}
OPTIONS = {
    "plain": {},
    "clip": {"clip_norm": 1.0},
    "wd": {"weight_decay": 0.2},
    "decay": {"lr_decay": 0.8},
    "batches": {"batches": minibatches(PROBLEM, T, K, 3, seed=5)},
    "steps": {"local_steps": [3, 1, 2, 3, 2, 1]},
    "gossip": {"gossip_steps": 3},
    "failed": {"failed": FAILED},
    "ri": {"ri_beta": 0.3},
    "ri current": {"ri_beta": 0.3, "ri_first_visit": "current", "failed": FAILED},
}
OPTIONS["all"] = {k: v for option in list(OPTIONS)[1:-1] for k, v in OPTIONS[option].items()}
METHODS = {
    "dpsgd lian": (dpsgd, {}),
    "dpsgd atc": (dpsgd, {"variant": "atc"}),
    "dfedavg": (dfedavg, {}),
    "dfedavgm": (dfedavg, {"momentum": 0.6}),
    "dfedsam": (dfedavg, SAM),
    "gossip scaffold": (gossip_scaffold, {}),
    "gossip feddyn": (gossip_feddyn, {"alpha": 0.5}),
}
AVERAGING = [name for name in METHODS if name != "gossip feddyn"]

options = pytest.mark.parametrize("option", list(OPTIONS))
graphs = pytest.mark.parametrize(
    "mixing", [RING, CHANGING, DIRECTED], ids=["ring", "changing", "directed"]
)
methods = pytest.mark.parametrize("name", METHODS)


def go(method, mixing=CHANGING, option="plain", *, problem=PROBLEM, w0=W0, **kwargs):
    run = method if callable(method) else method.run
    kwargs = {**BASE, **OPTIONS[option], **kwargs}
    return run(problem, w0, mixing, **kwargs)


def named(name, *args, **kwargs):
    method, own = METHODS[name]
    return go(method, *args, **{**own, **kwargs})


def assert_same(a, b, *names, rtol=1e-10):
    """Same models, trained and mixed, and the same states `names` of the nodes."""
    assert_close(a.weights, b.weights, rtol)
    assert_close(a.local, b.local, rtol)
    for name in ("last", *names):
        assert_close(a.clients[name], b.clients[name], rtol)


# What all of them share -------------------------------------------------------------------------


@options
@methods
def test_history(name, option):
    """Rows, means and consensus distances, (1/C) sum ||x_i - x_bar||^2 = mean over pairs / 2."""
    h = named(name, CHANGING, option)
    assert h.weights.shape == (T + 1, C, D)
    assert h.local.shape == (T, C, D)
    assert_close(h.weights[0], np.tile(W0, (C, 1)))
    assert_close(h.averages, sum(h.weights[:, i] for i in range(C)) / C)
    for distance, x in ((h.before, h.local), (h.after, h.weights[1:])):
        pairs = [np.sum((x[:, i] - x[:, j]) ** 2, axis=1) for i in range(C) for j in range(C)]
        assert_close(distance, np.mean(pairs, axis=0) / 2)
    one_less = {k: v[:-1] if k in ("batches", "failed") else v for k, v in OPTIONS[option].items()}
    before = named(name, CHANGING[:-1], **one_less)
    assert_close(before.weights, h.weights[:-1])


@options
@pytest.mark.parametrize("name", AVERAGING)
def test_gossip_keeps_the_mean(name, option):
    """x_bar after the mix is the mean of what was trained, whatever the graph and who fails."""
    h = named(name, CHANGING, option)
    assert_close(h.averages[1:], h.local.mean(axis=1))
    if name != "dpsgd lian":
        assert (h.after <= h.before + 1e-12).all()
    directed = named(name, DIRECTED, option)
    drift = np.abs(directed.averages[1:] - directed.local.mean(axis=1)).max()
    assert drift > 1e-4 if "failed" in OPTIONS[option] else drift < 1e-12


# By hand, and reductions ------------------------------------------------------------------------


def by_hand(t, i, x, last, *, momentum=0.0):
    """K steps with every option of "all": relaxed start, ascent, clip, decay, momentum."""
    o = OPTIONS["all"]
    y = y_old = x + 0.3 * (x - last)
    for k in range(o["local_steps"][i]):
        rows = o["batches"][t][i][k]
        g = PROBLEM.grad(i, y, rows)
        g = PROBLEM.grad(i, y + 0.2 * g / np.linalg.norm(g), rows)
        g = g / max(1.0, np.linalg.norm(g)) + 0.2 * y
        y, y_old = y - 0.05 * 0.8**t * g + momentum * (y - y_old), y
    return y


@pytest.mark.parametrize(("method", "own"), [(dfedavg, {}), (dfedavg, {"momentum": 0.6})])
def test_two_rounds_by_hand(method, own):
    """Node by node, mix by mix, all options at once; node 4 fails in round 0."""
    h = go(method, CHANGING, "all", sam_rho=0.2, **own)
    x, last = [W0] * C, [W0] * C
    for t in range(2):
        z = list(x)
        for i in range(C):
            if i not in FAILED[t]:
                z[i] = last[i] = by_hand(t, i, x[i], last[i], **own)
        for _ in range(3):
            W = CHANGING[t]
            mixed = []
            for i in range(C):
                mix = np.zeros(D)
                for j in range(C):
                    is_lost = i != j and (i in FAILED[t] or j in FAILED[t])
                    mix = mix + W[i, j] * (z[i] if is_lost else z[j])
                mixed.append(mix)
            z = mixed
        x = z
        assert_close(h.weights[t + 1], np.array(x))


def test_dfedavgm_is_torch_sgd_within_a_round():
    own = {"momentum": 0.9, "weight_decay": 0.2, "lr_decay": 0.8, "local_steps": 7}
    h = go(dfedavg, **own)
    options = {"momentum": 0.9, "weight_decay": 0.2, "dampening": 0, "nesterov": False}
    options |= {"maximize": False, "foreach": False}
    for t in range(T):
        for i, (features, target) in enumerate(PROBLEM.clients()):
            y, buffers = torch.from_numpy(h.weights[t, i].copy()), [None]
            for _ in range(7):
                g = features.T @ (features @ y - target[:, 0])
                sgd([y], [g], buffers, lr=0.05 * 0.8**t, **options)
            assert_close(h.local[t, i], y.numpy())


# D-PSGD -----------------------------------------------------------------------------------------


def test_lian_by_hand():
    """Mix and gradient in parallel: X <- W X - lr (G(X) + wd X), G at the models before the mix."""
    h = go(dpsgd, local_steps=1, weight_decay=0.2, lr_decay=0.8, clip_norm=2.0, failed=FAILED)
    x = np.tile(W0, (C, 1))
    for t in range(T):
        G = np.zeros((C, D))
        for i in set(range(C)) - set(FAILED[t]):
            g = PROBLEM.grad(i, x[i])
            G[i] = g * min(1, 2 / np.linalg.norm(g)) + 0.2 * x[i]
        x = without(CHANGING[t], FAILED[t]) @ x - 0.05 * 0.8**t * G
        assert_close(h.weights[t + 1], x)
    start = go(dpsgd, local_steps=1)
    assert_close(start.weights[1], [W0 - 0.05 * PROBLEM.grad(i, W0) for i in range(C)])
    assert_close(start.clients["last"], start.local[-1])


# Methods with a memory --------------------------------------------------------------------------


def test_gossip_scaffold_two_rounds_by_hand():
    """Sums node by node; round 1 is DFedAvg's."""
    own = {"weight_decay": 0.2, "lr_decay": 0.8, "ri_beta": 0.3}
    h = go(gossip_scaffold, CHANGING[:2], server_lr=0.7, **own)
    w, last = np.tile(W0, (C, 1)), np.tile(W0, (C, 1))
    c_i, c = np.zeros((C, D)), np.zeros((C, D))
    for t in range(2):
        lr = 0.05 * 0.8**t
        c_plus = np.zeros((C, D))
        start = w + 0.3 * (w - last)
        for i in range(C):
            last[i] = start[i]
            for _ in range(K):
                g = PROBLEM.grad(i, last[i]) + 0.2 * last[i]
                last[i] = last[i] - lr * (g - c_i[i] + c[i])
            c_plus[i] = c_i[i] - c[i] + (start[i] - last[i]) / (K * lr)
        W = CHANGING[t]
        mix = 0.3 * w + 0.7 * last
        w = np.array([sum(W[i, j] * mix[j] for j in range(C)) for i in range(C)])
        tracked = c + c_plus - c_i
        c = np.array([sum(W[i, j] * tracked[j] for j in range(C)) for i in range(C)])
        c_i = c_plus
        assert_close(h.weights[t + 1], w)
        assert_close(h.traces["c"][t + 1], c)
        assert_close(h.traces["c_i"][t + 1], c_i)
        assert_close(h.local[t], last)
    first = go(gossip_scaffold, CHANGING[:1], **own)
    assert_same(first, go(dfedavg, CHANGING[:1], **own))


@graphs
def test_gossip_scaffold_of_one_step_is_gradient_tracking(mixing):
    """X <- W (X - lr Y), Y <- W Y + G(X_new) - G(X), Y = G(X) at first."""
    h = go(gossip_scaffold, mixing, local_steps=1)
    x = np.tile(W0, (C, 1))
    y = g = np.array([PROBLEM.grad(i, x[i]) for i in range(C)])
    for t, W in enumerate(mixing):
        x = W @ (x - 0.05 * y)
        g_new = np.array([PROBLEM.grad(i, x[i]) for i in range(C)])
        y, g = W @ y + g_new - g, g_new
        assert_close(h.weights[t + 1], x)


def test_gossip_feddyn_two_rounds_by_hand():
    """Sums node by node."""
    alpha = 0.5
    h = go(gossip_feddyn, CHANGING[:2], alpha=alpha, weight_decay=0.2, lr_decay=0.8)
    w, lam, lam_bar = np.tile(W0, (C, 1)), np.zeros((C, D)), np.zeros((C, D))
    for t in range(2):
        z = w.copy()
        for i in range(C):
            for _ in range(K):
                g = PROBLEM.grad(i, z[i]) + 0.2 * z[i]
                z[i] = z[i] - 0.05 * 0.8**t * (g + lam[i] + alpha * (z[i] - w[i]))
        W = CHANGING[t]
        send = lam_bar + alpha * (z - w)
        lam = lam + alpha * (z - w)
        lam_bar = np.array([sum(W[i, j] * send[j] for j in range(C)) for i in range(C)])
        w = np.array([sum(W[i, j] * z[j] for j in range(C)) for i in range(C)]) + lam_bar / alpha
        assert_close(h.weights[t + 1], w)
        assert_close(h.traces["lam_bar"][t + 1], lam_bar)
        assert_close(h.traces["lam"][t + 1], lam)


# DisPFL -----------------------------------------------------------------------------------------

SHAPES = [(2, 4), (4,), (3, 2, 2)]
SIZES = [8, 4, 12]
WIDE = LeastSquares(C, 30, 24, seed=4)
X0 = np.random.default_rng(8).normal(size=24)
DENSITY = 0.5


def some_masks(problem=WIDE, density=DENSITY, seed=0):
    rng = np.random.default_rng(seed)
    counts = dispfl.ones_per_layer(SHAPES, density)
    masks = np.zeros((problem.num_clients, sum(SIZES)))
    for mask in masks:
        for part, n in zip(dispfl.layers(SHAPES), counts, strict=True):
            mask[part][rng.choice(part.stop - part.start, size=n, replace=False)] = 1
    return masks


MASKS = some_masks()
SPARSE = {
    "plain": {},
    "clip": {"clip_norm": 1.0},
    "wd": {"weight_decay": 0.2},
    "decay": {"lr_decay": 0.8},
    "batches": {"batches": minibatches(WIDE, T, K, 8, seed=5)},
    "steps": {"local_steps": [3, 1, 2, 3, 2, 1]},
    "failed": {"failed": FAILED},
    "kappa": {"kappa_0": 0.9},
    "rounds": {"rounds": 4 * T},
}
SPARSE["all"] = {k: v for option in SPARSE.values() for k, v in option.items()}
sparse_options = pytest.mark.parametrize("option", list(SPARSE))


def go_sparse(mixing=CHANGING, option="plain", **kwargs):
    own = {"shapes": SHAPES, "masks": MASKS, **SPARSE[option], **kwargs}
    return dispfl.run(WIDE, X0, mixing, **{**BASE, **own})


def test_erk():
    """Proportional to sum/prod of the shape; a layer that would pass one is dense."""
    shapes = [(10, 20), (20,), (20, 5, 3, 3)]
    size = [200, 20, 900]
    raw = [30 / 200, 1, 31 / 900]
    small = dispfl.erk(shapes, 0.05)
    assert max(small) < 1
    assert_close(np.array(small), small[1] * np.array(raw))
    assert math.isclose(np.dot(small, size), 0.05 * 1120)
    half = dispfl.erk(shapes, 0.5)
    assert half[:2] == [1, 1]
    assert math.isclose(np.dot(half, size), 560)
    some = dispfl.erk(shapes, 0.15)
    assert some[1] == 1
    assert_close(some[0] / some[2], raw[0] / raw[2])
    assert math.isclose(np.dot(some, size), 0.15 * 1120)
    assert dispfl.erk(shapes, 1.0) == [1, 1, 1]
    assert dispfl.ones_per_layer(shapes, 0.15) == [
        round(s * n) for s, n in zip(some, size, strict=True)
    ]
    assert [part.start for part in dispfl.layers(shapes)] == [0, 200, 220]


def local_steps_by_hand(h, option, t, i):
    o = {**BASE, **SPARSE[option]}
    w, m = h.weights[t, i], h.traces["masks"][t, i]
    K_i = o["local_steps"] if isinstance(o["local_steps"], int) else o["local_steps"][i]
    for k in range(K_i):
        rows = o["batches"][t][i][k] if "batches" in o else None
        g = WIDE.grad(i, w, rows)
        g = g / max(1.0, np.linalg.norm(g) / o.get("clip_norm", np.inf))
        w = (1 - 0.05 * o.get("lr_decay", 1.0) ** t * o.get("weight_decay", 0.0)) * w
        w = np.where(m == 1, w - 0.05 * o.get("lr_decay", 1.0) ** t * g, 0)
    return w, WIDE.grad(i, w, rows)


@sparse_options
def test_dispfl_by_hand(option):
    """Every round from the recorded one before it: training, pruning, growing, mixing."""
    h = go_sparse(option=option)
    masks = h.traces["masks"]
    kappa_0, rounds = SPARSE[option].get("kappa_0", 0.5), SPARSE[option].get("rounds", T)
    all_failed = SPARSE[option].get("failed", [[]] * T)
    last = MASKS * X0
    assert_close(h.weights[0], last)
    for t, failed in enumerate(all_failed):
        kappa = kappa_0 / 2 * (1 + math.cos(math.pi * t / rounds))
        for i in set(range(C)) - set(failed):
            w, g = local_steps_by_hand(h, option, t, i)
            assert_close(h.local[t, i], w)
            last[i] = w
            for part in dispfl.layers(SHAPES):
                ones = [p for p in range(part.start, part.stop) if masks[t, i, p]]
                n = math.ceil(kappa * len(ones))
                rest = sorted(ones, key=lambda p, w=w: abs(w[p]))[n:]
                zeros = [p for p in range(part.start, part.stop) if p not in rest]
                new = sorted(zeros, key=lambda p, g=g: -abs(g[p]))[:n]
                after = [p for p in range(part.start, part.stop) if masks[t + 1, i, p]]
                assert after == sorted(rest + new)
        for i in range(C):
            if i in failed:
                assert_close(h.local[t, i], h.weights[t, i], 0)
                assert_close(h.weights[t + 1, i], h.weights[t, i], 0)
                assert_close(masks[t + 1, i], masks[t, i], 0)
                continue
            senders = [j for j in range(C) if (CHANGING[t][i, j] > 0 or j == i) and j not in failed]
            for p in range(24):
                values = [h.local[t, j, p] for j in senders if masks[t, j, p] == 1]
                expected = np.mean(values) if values and masks[t + 1, i, p] else 0
                assert_close(h.weights[t + 1, i, p], expected)
    assert_close(h.clients["last"], last)
    assert_close(h.clients["mask"], masks[-1], 0)
    if option == "plain":
        new = (masks[1:] == 1) & (masks[:-1] == 0)
        assert (h.weights[1:][new] != 0).any()
        assert (h.weights[1:][new] == 0).any()


def test_dense_dispfl_weighs_neighbours_alike():
    """Itself included, by any W with the same graph: DFedAvg's mix is uniform on a ring only."""
    dense = {"masks": np.ones((C, 24))}
    plain = dfedavg.run(WIDE, X0, RING, **BASE)
    assert_close(go_sparse(RING, **dense).weights, plain.weights)
    lazy = [(np.eye(C) + W) / 2 for W in RING]
    assert_close(go_sparse(lazy, **dense).weights, plain.weights)
    selfless = [np.where(np.eye(C), 0, W) * 3 / 2 for W in RING]
    assert_close(go_sparse(selfless, **dense).weights, plain.weights)
    for other in (lazy, selfless):
        assert differ(dfedavg.run(WIDE, X0, other, **BASE), plain)


def test_random_regrow():
    """The callback sees each layer's zeros after pruning and decides."""
    calls = []

    def lowest(i, t, layer, candidates, n):
        calls.append((i, t, layer, len(candidates), n))
        return candidates[:n]

    h = go_sparse(variant="random", regrow=lowest, failed=FAILED)
    masks = h.traces["masks"]
    counts = dispfl.ones_per_layer(SHAPES, DENSITY)
    expected = []
    for t in range(T):
        kappa = 0.25 * (1 + math.cos(math.pi * t / T))
        for i in sorted(set(range(C)) - set(FAILED[t])):
            for layer, part in enumerate(dispfl.layers(SHAPES)):
                n = math.ceil(kappa * counts[layer])
                expected.append((i, t, layer, SIZES[layer] - counts[layer] + n, n))
                old, new = masks[t, i, part], masks[t + 1, i, part]
                order = [p for p in np.argsort(abs(h.local[t, i, part])) if old[p]]
                zeros = [p for p in range(SIZES[layer]) if p not in order[n:]]
                assert np.flatnonzero(new).tolist() == sorted(order[n:] + zeros[:n])
    assert calls == expected
    assert (masks.sum(axis=2) == sum(counts)).all()


def test_ties_go_to_the_lowest_index():
    """No steps worth the name (lr = 0) from weights 2, 1, 2, 1, ..: the first ones are pruned."""
    masks = np.ones((C, 24))
    masks[:, 18:] = 0
    h = dispfl.run(
        WIDE,
        np.tile([2.0, 1.0], 12),
        RING[:1],
        lr=0.0,
        local_steps=1,
        shapes=[(24,)],
        masks=masks,
        kappa_0=0.25,
        variant="random",
        regrow=lambda i, t, layer, candidates, n: candidates[::-1][:n],
    )
    after = set(np.flatnonzero(h.traces["masks"][1, 0]))
    assert after == set(range(18)) - {1, 3, 5, 7, 9} | {23, 22, 21, 20, 19}
