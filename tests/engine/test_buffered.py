"""Buffered asynchronous rounds on the simulated clock."""

import random
from collections.abc import Sequence
from inspect import getmodule
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from fedaccord import engine, simulate
from fedaccord.core.rounds import RoundState, broadcast
from fedaccord.core.vectors import leaves
from fedaccord.engine import History, run_with
from fedaccord.engine.faults import KINDS
from fedaccord.federation.device_profiles import write
from fedaccord.federation.method import Method
from fedaccord.plugins.compress import Compress
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies import (
    METHODS,
    AFedPD,
    FedADMM,
    FedAvg,
    FedDyn,
    FedSpeed,
    RelaxedInit,
    Scaffold,
)
from tests.federation import half_square, linear
from tests.reference import asynchronous
from tests.reference.problem import LeastSquares
from tests.strategies.federate import base

C, K, LR = 8, 3, 0.05
PROBLEM = LeastSquares(C, seed=3)
W0 = np.random.default_rng(1).normal(size=PROBLEM.dim)
ROWS = 12  # samples of a client: a visit reads K times as many
UNEQUAL = (1.0, 2.3, 3.1, 20.0, 1.7, 4.9, 0.8, 2.9)
EVERYONE = range(C)
OWN: dict[str, dict[str, Any]] = {
    **{"scaffold": {}, "fedavg": {}},
    **{"feddyn": {"alpha": 1.0}, "afedpd": {"rho": 1.0}, "fedadmm": {"rho": 1.0}},
    **{"fedgloss": {"alpha": 1.0, "radius": 0.2}, "fedinit": {"server": "updates", "beta": 0.1}},
}


def devices(folder: Path, seconds: Sequence[float] = UNEQUAL) -> str:
    """A file of devices with visits of so many seconds."""
    path = folder / "devices.csv"
    each = {"up_kbps": 1e15, "down_kbps": 1e15}
    write(
        path, {i: {"ms_per_sample": 1000 * s / (K * ROWS), **each} for i, s in enumerate(seconds)}
    )
    return str(path)


def method_of(name: str, **more: Any) -> Any:
    plain: dict[str, Any] = {"lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": 0.0, "lr": LR}
    plain |= {"precision": "float64", "local_steps": K, "batch_size": 0}
    return METHODS[name](**plain | OWN.get(name, {}) | more)


def run(method: Any, schedule: Sequence[Sequence[int]], **more: Any) -> History:
    own = {"record": "weights", "rounds": len(schedule), "participation": schedule} | more
    data = {"clients": PROBLEM.clients(), "model": linear(W0), "loss": half_square}
    return simulate(method, **data, **own)


def buffered(folder: Path, seconds: Sequence[float] = UNEQUAL, **more: Any) -> dict[str, Any]:
    own = {"schedule": "buffered", "concurrency": 5, "buffer_size": 3}
    return own | {"device_profile": devices(folder, seconds)} | more


def true_duals(method: Any, s: RoundState, states: Sequence[Any]) -> Tensor:
    """(C, d): the clients' duals with what they have missed; zero before a first visit."""
    duals = []
    for i, state in enumerate(states):
        lam = torch.zeros_like(s.w) if state is None else state.lam
        missed = getattr(broadcast(method, s, i), "missed", None)
        duals.append(lam if missed is None else lam + missed)
    return torch.stack(duals)


@pytest.mark.parametrize("staleness", ["constant", "polynomial"])
@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "feddyn", "afedpd", "fedgloss", "fednova", "local", "fedinit"]
)
def test_the_dense_reference(name: str, staleness: str, tmp_path: Path) -> None:
    """Weights, memories and delays, with a client that is ten times slower than most."""
    rng = np.random.default_rng(5)
    schedule = [sorted(rng.choice(C, 6, replace=False).tolist()) for _ in range(14)]
    method, states = method_of(name, staleness=staleness, **buffered(tmp_path)), list[RoundState]()
    ours = run(method, schedule, on_round=lambda round: states.append(round.state))
    damped = staleness == "polynomial"
    expected = asynchronous.run(
        *(name, PROBLEM, W0, schedule, UNEQUAL),
        **{"M": 5, "B": 3, "K": K, "lr": LR},
        omega=lambda tau: (1 + tau) ** -0.5 if damped else 1.0,
    )
    np.testing.assert_allclose(ours.weights, expected.w, rtol=0, atol=1e-10)
    assert max(map(max, expected.delays)) > 3
    assert ours.metrics["staleness"][1:].tolist() == [*map(np.mean, expected.delays)]
    for t, s in enumerate(states):
        if name == "scaffold":
            vectors = [torch.zeros_like(s.w) if it is None else it.c_i for it in ours.states[t]]
            memories = torch.stack(vectors)
        elif name in ("fedavg", "fednova"):
            continue
        elif name in ("local", "fedinit"):
            field = {"local": "w", "fedinit": "last"}[name]
            own = [
                torch.from_numpy(W0) if it is None else getattr(it, field) for it in ours.states[t]
            ]
            memories = torch.stack(own)
        else:
            memories = true_duals(method, s, ours.states[t])
        np.testing.assert_allclose(memories, expected.memories[t], rtol=0, atol=1e-10)


def test_visits_of_several_rounds_do_not_share_a_call(tmp_path: Path) -> None:
    """Each round has a rate of its own."""
    method = method_of("scaffold", lr_decay=0.9, **buffered(tmp_path))
    one, many = (run(method, [EVERYONE] * 8, vectorize=how) for how in ("off", "on"))
    assert one.metrics["staleness"].max() > 0
    torch.testing.assert_close(many.weights, one.weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_drift_is_that_of_the_models_before_damping(
    on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the model that each client received, also if a reply's numbers are still on a GPU, as
    those of a loss in a tensor may be."""
    schedule, usual = [EVERYONE] * 8, engine.fleet.local_round
    far = dict[tuple[int, int], float]()  # by client and round of the model

    def measured(visit: Any, *more: Any) -> Any:
        reply, state = usual(visit, *more)
        request = visit.instruction
        far[request.client, request.round] = float((reply.up.w - visit.down.w).norm())
        return reply._replace(loss=torch.tensor(reply.loss)) if on_gpu else reply, state

    monkeypatch.setattr(engine.fleet, "local_round", measured)
    own = buffered(tmp_path) | {"staleness": "polynomial"}
    rounds: list[Any] = []
    history = run(method_of("fedavg", **own), schedule, on_round=rounds.append)
    assert history.metrics["staleness"].max() > 0
    for round in rounds[1:]:
        used = [far[it["client"], round.number - 1 - it["staleness"]] for it in round.clients]
        assert round.metrics["drift"] == pytest.approx(np.mean(np.square(used)), rel=1e-10)


def test_a_clients_update_is_bounded_before_damping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, slow = engine.fleet.local_round, UNEQUAL.index(20.0)

    def far(visit: Any, *more: Any) -> Any:
        reply, state = usual(visit, *more)
        if visit.instruction.client == slow:
            reply = reply._replace(up=reply.up._replace(w=visit.down.w + 10))
        return reply, state

    monkeypatch.setattr(engine.fleet, "local_round", far)
    own = buffered(tmp_path) | {"staleness": "polynomial", "max_client_norm": 9 * len(W0) ** 0.5}
    rows: list[Any] = []
    run(
        method_of("fedavg", **own),
        [EVERYONE] * 14,
        on_round=lambda round: rows.extend(round.clients),
    )
    lines = [row["status"] for row in rows if row["client"] == slow]
    assert lines
    assert all(line.startswith("max-client-norm: expected an update") for line in lines)


@pytest.mark.parametrize("staleness", ["constant", "polynomial"])
def test_fednova_with_unequal_steps(staleness: str, tmp_path: Path) -> None:
    steps = [i % 3 + 1 for i in range(C)]
    each = [K * s / k for k, s in zip(steps, UNEQUAL, strict=True)]  # visits of unequal samples
    own = buffered(tmp_path, each) | {"local_steps": 0, "local_epochs": 1, "staleness": staleness}
    pairs = zip(PROBLEM.clients(), steps, strict=True)
    history = simulate(
        method_of("fednova", **own),
        clients=[lambda _, pair=pair, k=k: [pair] * k for pair, k in pairs],
        **{"model": linear(W0), "loss": half_square, "record": "weights"},
        **{"rounds": 14, "participation": [EVERYONE] * 14},
    )
    expected = asynchronous.run(
        *("fednova", PROBLEM, W0, [EVERYONE] * 14, UNEQUAL),
        **{"M": 5, "B": 3, "K": steps, "lr": LR},
        omega=lambda tau: (1 + tau) ** -0.5 if staleness == "polynomial" else 1.0,
    )
    np.testing.assert_allclose(history.weights, expected.w, rtol=0, atol=1e-10)


ABLE = [
    name
    for name, kind in METHODS.items()
    if not kind.all_clients and not kind(fraction_train=1.0).synchronous
]


def test_which_methods_can() -> None:
    assert {*ABLE} == {
        *("fedavg", "fedprox", "fedinit", "fedsam", "fedavgm", "fedadam", "fedyogi", "fedadagrad"),
        *("fednova", "fedexp", "feddeper", "diloco", "ditto", "local", "scaffold", "fedgamma"),
        *("feddyn", "afedpd", "afedpdsam", "fedadmm", "fedspeed", "fedsmoo", "fedgloss"),
        *("fedlesam", "fedlesam-d", "fedlesam-s"),
    }
    for kind, variant in ((FedSpeed, "paper"), (FedADMM, "active")):  # of a whole dual
        with pytest.raises(ValueError, match="holds the client's whole dual"):
            kind(variant=variant, schedule="buffered", device_profile="lognormal")
    unable = {*METHODS} - {*ABLE}
    why = {name: METHODS[name](fraction_train=1.0).why_synchronous for name in unable}
    assert all(why.values())
    of_a_paper = {n for n in unable if "arXiv" in (getmodule(METHODS[n]).__doc__ or "")}
    assert len(of_a_paper) > 10
    for name in of_a_paper:  # a reason of its own
        assert why[name] != Method.synchronous.fget(None), name


@pytest.mark.parametrize(("clients", "replies"), [(1, 1), (4, 2), (5, 3)])
def test_a_server_step_has_half_of_the_replies_underway_rounded_up(
    clients: int, replies: int
) -> None:
    own: dict[str, Any] = {"schedule": "buffered", "device_profile": "lognormal"}
    assert Scaffold(**own, concurrency=clients).buffer_of(C) == replies
    assert Scaffold(**own, fraction_train=clients / 10).buffer_of(10) == replies


def test_settings_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    sizes = {"concurrency": 4, "buffer_size": 2, "min_replies": 3, "device_profile": "lognormal"}
    with pytest.raises(ValueError, match=r"^min-replies: .* lower it, or raise buffer-size$"):
        run_with("fedavg", schedule="buffered", out_dir=str(tmp_path), **sizes)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ABLE)
def test_equal_devices_and_a_buffer_of_all_are_synchronous_rounds(
    name: str, tmp_path: Path
) -> None:
    """Bit for bit, with the same draws."""
    more = {"fraction_train": 0.5, "seed": 4}
    one = run(method_of(name, **more), [()] * 3, participation=None)
    own = buffered(tmp_path, [2.0] * C, buffer_size=4, concurrency=4)
    method = method_of(name, **more | own)
    other = run(method, [()] * 3, participation=None)
    assert torch.equal(one.weights, other.weights)
    for mine, theirs in zip(one.clients, other.clients, strict=True):
        for (_, v), (_, w) in zip(leaves(mine), leaves(theirs), strict=True):
            assert torch.equal(v, w)
    assert other.metrics["clock"].tolist() == pytest.approx(
        [t * 2 * method.cost.gradients for t in range(4)]
    )
    assert other.metrics["staleness"][1:].tolist() == [0] * 3


FAULTS = st.dictionaries(
    st.tuples(st.integers(0, 7), st.integers(0, C - 1)), st.sampled_from(KINDS), max_size=12
)
SECONDS = st.lists(st.floats(0.1, 30.0), min_size=C, max_size=C)


@pytest.mark.parametrize(
    ("name", "is_compressed"),
    [
        ("scaffold", True),
        ("feddyn", False),
        ("afedpd", True),
        ("afedpd", False),
        ("fedgloss", False),
        ("fedadmm", True),
    ],
)
@settings(max_examples=3)
@given(faults=FAULTS, seconds=SECONDS, sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)))
def test_the_server_knows_the_mean_of_the_clients_memories(
    name: str,
    is_compressed: bool,
    faults: dict[tuple[int, int], str],
    seconds: list[float],
    sizes: tuple[int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In every step, for any order of arrival, with lost and repeated messages and states."""
    folder, states = tmp_path_factory.mktemp("devices"), list[RoundState]()
    sizes_of = {"concurrency": max(sizes), "buffer_size": min(sizes), "staleness": "polynomial"}
    plugins = (Compress(share=0.4),) if is_compressed else ()
    own = {"max_failed_rounds": 99, "plugins": plugins} | buffered(folder, seconds, **sizes_of)
    method = method_of(name, **own)
    history = run(
        *(method, [EVERYONE] * 8),
        participation=None,
        faults=lambda t, i: faults.get((t, i)),
        on_round=lambda round: states.append(round.state),
    )
    for s, every in zip(states, history.states, strict=True):
        bases = [None if it is None else base(it) for it in every]
        assert len({visit.client for visit in s.visits}) == len(s.visits) < max(sizes) + 1
        if name == "fedadmm":
            first = states[0].w_init if s.w_init is None else s.w_init
            mine = [first if it is None else it.w_hat for it in bases]
            mean, summed = torch.stack(mine).mean(0), s.w
        elif name == "scaffold":
            mine = [torch.zeros_like(s.w) if it is None else it.c_i for it in bases]
            mean, summed = torch.stack(mine).mean(0), s.server.c
        else:
            mean, summed = true_duals(method, s, bases).mean(0), s.server.lam_bar
        torch.testing.assert_close(mean, summed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("buffer", [2, 4])
def test_the_mean_of_duals_if_a_visit_begins_late_and_lasts_long(
    buffer: int, tmp_path: Path
) -> None:
    """The server keeps the step before the first that client 7 misses, though no other needs it."""
    schedule, states = [[0, 1, 2, 3]] * 3 + [[0, 1, 2, 3, 7]] * 27, list[RoundState]()
    own = buffered(tmp_path, (1, 1, 1, 1, 1, 1, 1, 20), buffer_size=buffer)
    method = method_of("afedpd", **own)
    history = run(method, schedule, on_round=lambda round: states.append(round.state))
    assert history.metrics["staleness"].max() >= 1
    for s, every in zip(states, history.states, strict=True):
        mean = true_duals(method, s, every).mean(0)
        torch.testing.assert_close(mean, s.server.lam_bar, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("fedavg", "none"), ("fedavg", "topk"), ("afedpd", "none"), ("scaffold", "none")),
        ("fedadmm", "none"),  # whose first visits read w^0
    ],
)
def test_a_run_that_resumes_with_visits_at_work_is_the_same(
    name: str, method: str, tmp_path: Path
) -> None:
    """Bit for bit, with tables and clocks; vectorised, and with error memories, too."""
    keys: dict[str, Any] = {
        **{"num_clients": 8, "model": "linear", "local_steps": 2, "checkpoint_every": 1},
        **{"schedule": "buffered", "concurrency": 5, "buffer_size": 2, "seed": 1, "threads": 1},
        **{"device_profile": "lognormal", "out_dir": str(tmp_path), "sam.rho": 0.05},
        **{"vectorize": "on" if name == "scaffold" else "off", "compress.method": method},
    }
    whole = run_with(name, **keys, name="whole", num_server_rounds=7)
    run_with(name, **keys, name="half", num_server_rounds=3)
    path = run_with(name, **keys, name="half", num_server_rounds=7, resume=True)
    for table in ("metrics.csv", "clients.csv"):
        one, other = (
            pd.read_csv(folder / table).drop(columns="seconds") for folder in (whole, path)
        )
        pd.testing.assert_frame_equal(one, other)
        assert one["staleness"].max() > 0
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, path))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_exact_methods_reach_the_optimum_where_fedavg_does_not(tmp_path: Path) -> None:
    """With a client ten times slower."""
    distance = {}
    for name in ("fedavg", "scaffold"):
        method = method_of(name, **buffered(tmp_path))
        history = run(method, [()] * 120, participation=None, record="metrics")
        w = history.model["weight"].numpy().ravel()
        distance[name] = np.linalg.norm(w - PROBLEM.optimum()) / np.linalg.norm(PROBLEM.optimum())
    assert distance["fedavg"] > 0.1
    assert distance["scaffold"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "steps", "low", "high"),
    [
        ("fedavg", 2000, 0.1, 1.0),
        ("scaffold", 2000, 0, 1e-13),
        ("feddyn", 8000, 0, 1e-13),
        ("afedpd", 8000, 0, 1e-13),
    ],
)
def test_the_optimum_with_a_slow_client_and_faults(
    name: str, steps: int, low: float, high: float, seed: int, tmp_path: Path
) -> None:
    """The distance from the optimum in its norm: with drawn speeds, one client ten times slower,
    and in the first half lost and repeated messages and clients that lose their states."""
    rng = np.random.default_rng(seed)
    seconds = rng.lognormal(sigma=0.5, size=C)
    seconds[0] *= 10

    def fault(t: int, i: int) -> str | None:
        generator = random.Random(f"{seed} {t} {i}")
        return generator.choice(KINDS) if t < steps / 2 and generator.random() < 0.1 else None

    method = method_of(name, max_failed_rounds=99, **buffered(tmp_path, seconds.tolist()))
    history = run(method, [()] * steps, participation=None, record="metrics", faults=fault)
    w, optimum = history.model["weight"].numpy().ravel(), PROBLEM.optimum()
    distance = np.linalg.norm(w - optimum) / np.linalg.norm(optimum)
    assert history.metrics["staleness"].max() > 3  # mean of a step
    assert history.metrics["dropped"].sum() > steps / 20
    assert low <= distance < high


def test_a_device_that_goes_away_frees_its_seat(tmp_path: Path) -> None:
    path = tmp_path / "away.csv"
    traces = {i: {"ms_per_sample": 1, "up_kbps": 1e9, "down_kbps": 1e9} for i in range(C)}
    traces[2] |= {"ms_per_sample": 1e4, "active": "0-0.05", "period_s": 1e9}
    write(path, traces)
    rows: list[Any] = []
    method = method_of("fedavg", **buffered(tmp_path) | {"device_profile": str(path)})
    history = run(method, [EVERYONE] * 4, on_round=lambda round: rows.extend(round.clients))
    away = [row for row in rows if row["client"] == 2]
    assert [row["status"] for row in away] == ["its device disconnected at 0.05 simulated seconds"]
    assert history.metrics["replies"][1:].tolist() == [3] * 4


def test_a_step_does_not_foresee_that_a_device_goes_away(tmp_path: Path) -> None:
    """A buffer of all active clients is a synchronous round, which waits for it until then."""
    path = tmp_path / "away.csv"
    traces = {i: {"ms_per_sample": 1, "up_kbps": 1e9, "down_kbps": 1e9} for i in range(C)}
    traces[2] |= {"ms_per_sample": 1e4, "active": "0-5", "period_s": 1e9}
    write(path, traces)
    own: dict[str, Any] = {"device_profile": str(path)}
    full = {"schedule": "buffered", "concurrency": C, "buffer_size": C}
    together = run(method_of("fedavg", **own), [EVERYONE] * 3).metrics
    steps = run(method_of("fedavg", **own, **full), [EVERYONE] * 3).metrics
    assert steps["clock"].tolist() == together["clock"].tolist()
    assert steps["clock"][1] == 5
    for row in (steps, together):
        assert row["replies"][1:].tolist() == [C - 1] * 3
        assert row["dropped"][1:].tolist() == [1, 0, 0]


@pytest.mark.parametrize("schedule", ["synchronous", "buffered"])
def test_a_given_cohort_waits_for_its_first_device(schedule: str, tmp_path: Path) -> None:
    path = tmp_path / "late.csv"
    traces = {i: {"ms_per_sample": 1, "up_kbps": 1e9, "down_kbps": 1e9} for i in range(C)}
    traces[0] |= {"active": "20-1000"}
    write(path, traces)
    more = {"device_profile": str(path), "schedule": schedule}
    if schedule == "buffered":
        more |= {"concurrency": 1, "buffer_size": 1}
    metrics = run(method_of("fedavg", **more), [[0], [0], [1]]).metrics
    assert metrics["replies"][1:].tolist() == [1, 1, 1]
    assert metrics["clock"][1] > 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: METHODS["fedcm"](schedule="buffered"), "expected synchronous with FedCM"),
        (lambda: METHODS["fedpd"](schedule="buffered", fraction_train=1.0), "has all|have all"),
        (
            lambda: FedAvg(schedule="buffered", plugins=(Gossip(topology="ring"),)),
            "under gossip no server",
        ),
        (lambda: FedADMM(schedule="buffered", variant="active"), "expected synchronous"),
        (
            lambda: AFedPD(schedule="buffered", staleness="polynomial", weighting="examples"),
            "staleness: expected constant with weighting=examples",
        ),
        (lambda: FedAvg(schedule="buffered", sampling="bernoulli"), "sampling: expected fixed"),
        (lambda: FedAvg(schedule="buffered", buffers="mean"), "buffers: expected refuse, freeze"),
        (
            lambda: FedDyn(schedule="buffered", plugins=(RelaxedInit(beta=0.1, center="start"),)),
            "relaxed-init.center: expected server",
        ),
        (
            lambda: Scaffold(schedule="buffered", concurrency=9).check_clients(8),
            "concurrency: expected at most 8",
        ),
        (
            lambda: Scaffold(schedule="buffered", buffer_size=5, concurrency=4).check_clients(8),
            "buffer-size: expected at most 4",
        ),
        (
            lambda: Scaffold(schedule="buffered", concurrency=4, min_replies=3).check_clients(8),
            "min-replies: expected at most 2",
        ),
        (
            lambda: run(
                method_of("fedavg", schedule="buffered", device_profile="lognormal"), [EVERYONE]
            ),
            "concurrency: expected the number of active clients with given cohorts",
        ),
        (
            lambda: run(method_of("fedavg", schedule="buffered"), [()]),
            "expected synchronous without simulated devices",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
