"""Robust means against their definitions in plain NumPy, and in a federation with a liar."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from fedaccord.config import RunConfig
from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import first_state, server_round
from fedaccord.core.rule import Model
from fedaccord.core.topology import RoundInfo
from fedaccord.plugins import robust
from fedaccord.plugins.robust import Robust
from fedaccord.strategies import METHODS
from tests.fake_mps import FakeMPS, fake_mps
from tests.federation import run
from tests.server.runs import LEAST_SQUARES, W0, federation, strategy
from tests.server.test_replies import with_w


def points(P: int, d: int = 7) -> np.ndarray:
    return np.random.default_rng(P).normal(size=(P, d))


def of(xs: np.ndarray, **settings: Any) -> np.ndarray:
    return Robust(**settings).of([*torch.from_numpy(xs)]).numpy()


# --- the definitions ------------------------------------------------------------------------------


@pytest.mark.parametrize("P", [1, 2, 3, 4, 7, 10])
def test_the_median_of_each_coordinate(P: int) -> None:
    np.testing.assert_allclose(of(points(P)), np.median(points(P), axis=0), rtol=1e-14)


@pytest.mark.parametrize(
    ("P", "trim", "f"),
    [(10, 0.1, 1), (10, 0.3, 3), (10, 0.21, 3), (5, 0.1, 1), (3, 0.5, 1), (25, 0.28, 7)],
)
def test_the_trimmed_mean_of_each_coordinate(P: int, trim: float, f: int) -> None:
    expected = [np.mean(sorted(column)[f : P - f]) for column in points(P).T]
    np.testing.assert_allclose(of(points(P), rule="trimmed-mean", trim=trim), expected, rtol=1e-13)


def test_without_a_share_to_cut_the_trimmed_mean_is_the_mean() -> None:
    mean = of(points(6), rule="trimmed-mean", trim=0.0)
    np.testing.assert_allclose(mean, points(6).mean(0), rtol=1e-14)


def krum(xs: np.ndarray, f: int) -> np.ndarray:
    """The paper's: the sum over the P - f - 2 nearest of all others."""
    scores = []
    for i, x in enumerate(xs):
        others = sorted(np.sum((x - y) ** 2) for j, y in enumerate(xs) if j != i)
        scores.append(sum(others[: max(1, len(xs) - f - 2)]))
    best: np.ndarray = xs[int(np.argmin(scores))]
    return best


@pytest.mark.parametrize(("P", "trim", "f"), [(7, 0.2, 2), (9, 0.3, 3), (10, 0.0, 0), (4, 0.5, 2)])
def test_krum_takes_the_most_central_model(P: int, trim: float, f: int) -> None:
    point = of(points(P), rule="krum", trim=trim)
    assert np.array_equal(point, krum(points(P), f))
    assert (point == points(P)).all(1).any()


@pytest.mark.parametrize("seed", range(20))
def test_krum_sums_over_neither_more_nor_fewer_neighbours(seed: int) -> None:
    """Vectors at many scales: one neighbour more or fewer often takes another."""
    scale = 10 ** np.random.default_rng(seed).uniform(-1, 1, size=(8, 1))
    xs = scale * np.random.default_rng(seed).normal(size=(8, 3))
    assert np.array_equal(of(xs, rule="krum", trim=0.25), krum(xs, 2))


def test_krum_on_a_gpu_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    distances = [5.0, 5.0, 5.0, 1.0, 5.0, 1.0]  # 1 is near 3, 2 near 3, in the order of the pairs
    monkeypatch.setattr(robust, "fetch", lambda far: distances[: len(far)])
    with fake_mps():
        xs = [*torch.empty(4, 10, device="mps")]
    with FakeMPS():
        assert robust.krum(xs, 0) == 3


def test_long_vectors_are_sorted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedaccord.plugins.robust.CHUNK", 10)
    np.testing.assert_allclose(of(points(4, 103)), np.median(points(4, 103), axis=0), rtol=1e-14)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum"])
def test_fewer_than_the_expected_liars_move_it_no_farther_than_the_others_reach(rule: str) -> None:
    xs = points(9)
    xs[[2, 5]] = [[1e25], [-3e30]]
    center, honest = of(xs, rule=rule, trim=0.25), np.delete(xs, [2, 5], axis=0)
    assert (honest.min(0) <= center).all()
    assert (center <= honest.max(0)).all()


# --- in the mean seat -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum"])
def test_a_liar_is_outvoted(rule: str) -> None:
    """FedAvg loses its model to one reply; with a robust mean the others decide."""
    lie = with_w(lambda w: torch.full_like(w, 1e25))
    best = LEAST_SQUARES.optimum()
    far = float(np.linalg.norm(best))
    plain = federation(strategy(), 3, lie)[-1].w
    robust = federation(strategy(plugins=(Robust(rule=rule, trim=0.2),)), 25, lie)[-1].w
    assert np.linalg.norm(plain.numpy() - best) > 1e20
    assert (
        np.linalg.norm(robust.numpy() - best) < (0.8 if rule != "krum" else 1.0) * far
    )  # krum follows one client


def test_with_nothing_cut_fedavg_is_fedavg() -> None:
    plain, robust = (
        run(strategy(plugins=plugins, batch_size=0), LEAST_SQUARES, W0, [range(6)] * 3).weights
        for plugins in ((), (Robust(rule="trimmed-mean", trim=0.0),))
    )
    assert plain is not None
    assert robust is not None
    np.testing.assert_allclose(robust, plain, atol=1e-15)


AVERAGING = [name for name, kind in METHODS.items() if kind.averages]


def test_who_averages() -> None:
    assert {
        *("fedavg", "fedinit", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad"),
        *("fedsam", "fedlesam", "feddeper", "local"),
    } <= {*AVERAGING}


@pytest.mark.parametrize("name", AVERAGING)
def test_they_read_the_mean_alone(name: str) -> None:
    """So a step on the mean is the step on the models."""
    method: Any = METHODS[name](precision="float64", fraction_train=1.0)
    s = first_state(method, torch.ones(7, dtype=torch.float64), 4)
    models = [*torch.from_numpy(points(4))]
    mean = torch.stack(models).mean(0)

    replies = [Reply(i, Model(w), 3, 10) for i, w in enumerate(models)]
    info = RoundInfo(0, 0.1, 4, s.accepted, False, False)
    ups, cohort = method.topology.gather(s.w, replies, info)
    expected = method.aggregate(s.w, ups, s.server, cohort)[0]
    w = method.aggregate(s.w, Model((mean,)), s.server, cohort.of_mean())[0]
    torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)


def test_krum_is_the_model_of_a_client() -> None:
    """To the bit, whatever their number."""
    for P in (3, 10):
        xs = [*torch.from_numpy(points(P, 100)).float()]
        method = METHODS["fedavg"](plugins=(Robust(rule="krum"),), fraction_train=1.0)
        s = first_state(method, torch.ones(100), P)
        replies = [Reply(i, Model(w), 3, 10) for i, w in enumerate(xs)]
        after = server_round(method, method.client_half(), s, replies, None).state.w
        assert any(torch.equal(after, x) for x in xs)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"algo": "scaffold"}, "robust.rule: expected none with Scaffold, got 'median': its serv"),
        ({"algo": "fednova"}, "robust.rule: expected none with FedNova"),
        ({"algo": "scaffnew", "fraction-train": 1.0}, "robust.rule: expected none with Scaffnew"),
        ({"algo": "dfedavg"}, "robust.rule: expected none with gossip"),
        ({"gossip.topology": "ring"}, "robust.rule: expected none with gossip"),
        ({"weighting": "examples"}, "weighting: expected uniform with robust.rule=median, got"),
        ({"buffers": "mean"}, "buffers: expected refuse, freeze or local with robust.rule=median"),
        (
            {"fedinit.server": "updates"},
            "robust.rule: expected none with FedInit, got 'median': its",
        ),
        *(
            (
                {"compress.method": name, "robust.rule": rule},
                f"robust.rule: expected krum with sparse uploads, got '{rule}': ",
            )
            for name in ("topk", "randk")
            for rule in ("median", "trimmed-mean")
        ),
        ({"robust.trim": 0.6}, "robust.trim: expected at least 0 and at most 0.5, got 0.6"),
        ({"robust.rule": "mean"}, "robust.rule: expected one of none, median, trimmed-mean, krum"),
    ],
)
def test_where_it_does_not_fit_is_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        RunConfig.make({"robust.rule": "median"} | settings)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rule", "trim", "share", "is_refused"),
    [
        ("trimmed-mean", 0.1, 0.6, False),
        ("trimmed-mean", 0.1, 0.41, False),
        ("trimmed-mean", 0.1, 0.4, True),
        ("trimmed-mean", 0.2, 0.6, True),
        ("trimmed-mean", 0.0, 0.1, False),
        ("median", 0.1, 0.6, True),
        ("krum", 0.1, 0.1, False),
    ],
)
def test_less_than_half_of_sparse_uploads_is_cut(
    rule: str, trim: float, share: float, is_refused: bool
) -> None:
    """A median of many clients does not move if they send 0.6 of the numbers, of either sign."""
    settings = {"robust.rule": rule, "robust.trim": trim, "compress.share": share}
    line = f"^robust.rule: expected krum with sparse uploads, got '{rule}': it may cut half or more"
    with pytest.raises(ValueError, match=line) if is_refused else nullcontext():
        RunConfig.make(settings | {"compress.method": "topk"})


def test_by_default_there_is_none() -> None:
    assert RunConfig.make({"algo": "fedavg"}).strategy.active_plugins == ()
    active = RunConfig.make({"algo": "fedavg", "robust.rule": "krum"}).strategy.active_plugins
    assert active == (Robust(rule="krum", trim=0.1),)
    assert RunConfig.make({"algo": "fedavg", "robust.rule": "none"}).strategy.active_plugins == ()
