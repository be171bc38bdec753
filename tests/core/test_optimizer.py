"""Local optimisers: PyTorch's on one client, dense references in a federation."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import simulate
from fedaccord import strategies as S
from fedaccord.config import RunConfig
from fedaccord.core import optimizer as optimizers
from fedaccord.core.optimizer import (
    OPTIMIZERS,
    SCHEDULES,
    STATES,
    AdamW,
    Moments,
    Momentum,
    Muon,
    Optimizer,
    Schedule,
    SentMoments,
    orthogonal,
)
from fedaccord.core.rule import LocalConfig
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies.scaffold import ScaffoldClient
from tests.fake_mps import fake_mps
from tests.reference import fedavg, fedcm, feddyn, problem, scaffold
from tests.reference import optimizers as dense
from tests.reference.problem import LeastSquares
from tests.strategies.federate import History, client_vectors, close, federate

K, T, LR, WD = 4, 3, 0.05, 0.02
ALONE = LeastSquares(1, seed=2)
W0 = np.random.default_rng(1).normal(size=ALONE.dim)

MADE: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "momentum": (Momentum(mu=0.8), partial(torch.optim.SGD, momentum=0.8)),
    "nesterov": (
        Momentum(mu=0.8, nesterov=True),
        partial(torch.optim.SGD, momentum=0.8, nesterov=True),
    ),
    "adamw": (
        AdamW(beta1=0.8, beta2=0.95, eps=1e-3),
        partial(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-3, foreach=False, weight_decay=WD),
    ),
    "sgd": (OPTIMIZERS["sgd"](), torch.optim.SGD),
}
FALLING: dict[str, Any] = {
    "constant": lambda steps: torch.optim.lr_scheduler.LambdaLR(steps, lambda k: 1.0),
    "linear": lambda steps: torch.optim.lr_scheduler.LinearLR(steps, 1.0, 0.0, total_iters=K),
    "cosine": lambda steps: torch.optim.lr_scheduler.CosineAnnealingLR(steps, T_max=K),
}


def by_torch(name: str, schedule: str, state: str) -> Tensor:
    """w after T rounds of K steps of one client, as PyTorch's own classes take them."""
    A, b = (torch.from_numpy(x[0]) for x in (ALONE.A, ALONE.b))
    w = torch.nn.Parameter(torch.from_numpy(W0.copy()))
    make = MADE[name][1]
    steps = make([w], lr=LR)  # type: ignore[call-arg]
    for _ in range(T):
        old = steps.state[w]
        steps = make([w], lr=LR)  # type: ignore[call-arg]
        if state == "keep":
            steps.state[w] = old
        elif state == "average" and old:
            steps.state[w] = corrected(old)
        falling = FALLING[schedule](steps)
        for _ in range(K):
            w.grad = A.T @ (A @ w.detach() - b)
            if name != "adamw":  # PyTorch's SGD has weight decay in the momentum
                w.data.mul_(1 - steps.param_groups[0]["lr"] * WD)
            steps.step()
            falling.step()
    return w.detach()


def corrected(state: dict[str, Any]) -> dict[str, Any]:
    """AdamW's moments without their bias, and nothing left to correct."""
    if "step" not in state:
        return state
    n = float(state["step"])
    return {
        "step": torch.tensor(torch.inf),
        "exp_avg": state["exp_avg"] / (1 - 0.8**n),
        "exp_avg_sq": state["exp_avg_sq"] / (1 - 0.95**n),
    }


@pytest.mark.filterwarnings("ignore:Detected call of")  # schedulers of a round before its steps
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MADE)
def test_one_client_takes_pytorchs_steps(name: str, schedule: str, state: str) -> None:
    method = S.FedAvg(
        local_optimizer=MADE[name][0],
        **settings(schedule=schedule, state=state, lr=LR, weight_decay=WD, local_steps=K),
    )
    weights = federate(method, ALONE, W0, [[0]] * T).weights[-1]
    torch.testing.assert_close(weights, by_torch(name, schedule, state), rtol=1e-12, atol=1e-12)


def settings(schedule: str = "constant", state: str = "reset", **more: Any) -> dict[str, Any]:
    same = {"precision": "float64", "clip_norm": 0.0, "lr_decay": 1.0}
    return same | {"lr_schedule": schedule, "optimizer_state": state} | more


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adamw"])
def test_kept_vectors_make_of_T_rounds_one_run(name: str) -> None:
    method = S.FedAvg(local_optimizer=MADE[name][0], **settings(state="keep", local_steps=K, lr=LR))
    once = S.FedAvg(local_optimizer=MADE[name][0], **settings(local_steps=T * K, lr=LR))
    reset = S.FedAvg(local_optimizer=MADE[name][0], **settings(local_steps=K, lr=LR))
    whole = federate(once, ALONE, W0, [[0]]).weights[-1]
    assert torch.equal(federate(method, ALONE, W0, [[0]] * T).weights[-1], whole)
    assert not torch.allclose(federate(reset, ALONE, W0, [[0]] * T).weights[-1], whole)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_momentum_is_sgd(schedule: str) -> None:
    plain, none = (
        federate(method, ALONE, W0, [[0]] * T).weights[-1]
        for method in (
            S.FedAvg(**settings(schedule, local_steps=K, lr=LR, weight_decay=WD)),
            S.FedAvg(
                local_optimizer=Momentum(mu=0.0),
                **settings(schedule, local_steps=K, lr=LR, weight_decay=WD),
            ),
        )
    )
    torch.testing.assert_close(plain, none, rtol=1e-14, atol=1e-14)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of docs/optimizers.md."""
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "class " in code)
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return import_module("mine")


@pytest.mark.parametrize("vectorize", ["off", "on"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_optimiser_of_ones_own_takes_its_steps(schedule: str, vectorize: str, mine: Any) -> None:
    """Adagrad: two clients with one sample set, whose control variates are equal, as PyTorch's."""
    x, y = torch.randn(6, 3).double(), torch.randn(6, 1).double()
    model = nn.Linear(3, 1).double()
    own = {"local_steps": K, "lr": LR, "weight_decay": 0.0, "fraction_train": 1.0, "batch_size": 0}
    method = S.Scaffold(local_optimizer=mine.Adagrad(), **settings(schedule, **own))
    same: dict[str, Any] = {"clients": [(x, y)] * 2, "model": model, "rounds": T}
    history = simulate(method, **same, vectorize=vectorize)
    by_name = S.Scaffold(optimizer="mine:Adagrad", **settings(schedule, **own))
    for name, value in simulate(by_name, **same, vectorize=vectorize).model.items():
        assert torch.equal(value, history.model[name])
    for _ in range(T):
        steps = torch.optim.Adagrad(model.parameters(), lr=LR)
        falling = FALLING[schedule](steps)
        for _ in range(K):
            steps.zero_grad()
            F.mse_loss(model(x), y).backward()
            steps.step()
            falling.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(history.model[name], value, rtol=1e-12, atol=1e-12)


def test_an_optimiser_of_ones_own_is_a_setting(mine: Any) -> None:
    """A class or a function, also of a method that has an optimiser of its own."""
    fine, coarse = (RunConfig.make({"optimizer": f"mine:{n}"}) for n in ("Adagrad", "coarse"))
    assert fine.strategy.own_optimizer() == mine.Adagrad()
    assert coarse.strategy.own_optimizer() == mine.Adagrad(eps=1e-3)
    own = {"algo": "diloco", "diloco.inner": "mine:coarse"}
    assert RunConfig.make(own).strategy.own_optimizer() == mine.Adagrad(eps=1e-3)
    method = S.FedAvg(local_optimizer=mine.Adagrad(eps=1e-3))
    assert method.optimizer == RunConfig.make({}, method).flat["optimizer"] == "mine:Adagrad"
    assert replace(method, lr=0.01).own_optimizer() == mine.Adagrad(eps=1e-3)
    with pytest.raises(ValueError, match=r"^local_optimizer: expected one called adamw, as FedAvg"):
        replace(method, optimizer="adamw")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("mine:Sum", r"expected a function of no parameters; mine:Sum has 'v': give it a default"),
        ("mine:dataclass", "expected a subclass of Optimizer, or a function without"),
        ("mine:Adagrat", r"expected a function of mine, it has no 'Adagrat' \(did you mean"),
        ("absent:Adagrad", "expected a module that can be imported here"),
        ("adagrad", "expected one of sgd, momentum, adamw, muon, or package.module:function"),
    ],
)
def test_a_setting_that_names_no_optimiser_is_one_line(setting: str, line: str) -> None:
    with pytest.raises(ValueError, match=f"^optimizer: {line}[^\n]*$"):
        RunConfig.make({"optimizer": setting})


@pytest.mark.parametrize("key", ["optimizer", "diloco.inner"])
def test_an_option_of_an_optimiser_of_another_type_is_one_line(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its default, 1, is no float."""
    (tmp_path / "integer_eps.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedaccord.core import option\n"
        "from fedaccord.core.optimizer import Optimizer\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Wrong(Optimizer):\n"
        "    eps: float = option(1, 'added')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "integer_eps", raising=False)
    algo = {"algo": "diloco"} if key == "diloco.inner" else {}
    with pytest.raises(ValueError, match=r"^optimizer: Wrong\.eps: expected a float.* and 1$"):
        RunConfig.make({key: "integer_eps:Wrong"} | algo)


def test_kept_vectors_of_ones_own_make_of_T_rounds_one_run(mine: Any) -> None:
    many, one = (
        S.FedAvg(local_optimizer=mine.Adagrad(), **settings(state=state, local_steps=steps, lr=LR))
        for state, steps in (("keep", K), ("reset", T * K))
    )
    whole = federate(one, ALONE, W0, [[0]]).weights[-1]
    assert torch.equal(federate(many, ALONE, W0, [[0]] * T).weights[-1], whole)


@pytest.mark.parametrize(
    ("verb", "own", "line"),
    [
        ("init", lambda self, w: (w,), r"expected Adagrad\.init to return a NamedTuple of .*tuple"),
        ("step", Optimizer.step, "a step of Adagrad failed: NotImplementedError: it has no method"),
        ("step", lambda *_: 1 / 0, "a step of Adagrad failed: ZeroDivisionError: division by"),
        ("step", lambda self, w, d, *_: w - d, r"expected Adagrad\.step to change w in place"),
    ],
)
def test_an_optimiser_of_ones_own_that_takes_no_step_is_one_line(
    verb: str, own: Any, line: str, mine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mine.Adagrad, verb, own)
    with pytest.raises(ValueError, match=rf"^optimizer: {line}[^\n]*$"):
        S.FedAvg(local_optimizer=mine.Adagrad())
    with pytest.raises(ValueError, match=rf"^optimizer: {line}[^\n]*$"):
        RunConfig.make({"optimizer": "mine:Adagrad"})


def test_an_optimiser_of_ones_own_may_write_through_data_or_move_at_its_second_step(
    mine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(self: Any, w: Any, d: Any, own: Any, *_: Any) -> None:
        if own.v.any():
            w.sub_(d)
        own.v.add_(d)

    for step in (lambda self, w, d, *_: w.data.sub_(d), second):
        monkeypatch.setattr(mine.Adagrad, "step", step)
        assert S.FedAvg(local_optimizer=mine.Adagrad()).optimizer == "mine:Adagrad"


def test_vectors_that_an_optimiser_does_not_send_have_no_average(mine: Any) -> None:
    line = r"^optimizer-state: expected reset or keep with Adagrad, which does not declare what"
    with pytest.raises(ValueError, match=line):
        S.FedAvg(local_optimizer=mine.Adagrad(), optimizer_state="average")


@pytest.mark.parametrize("optimizer", ["adamw", Momentum, torch.optim.Adam([torch.ones(1)])])
def test_an_optimiser_that_is_none_is_one_line(optimizer: Any) -> None:
    line = r"^local_optimizer: expected an object, e\.g\. AdamW\(beta1=0.8\), got .*='adamw' sets"
    with pytest.raises(ValueError, match=f"{line}.*subclass of Optimizer is your own$"):
        S.FedAvg(local_optimizer=optimizer)
    with pytest.raises(ValueError, match=r"^optimizer: expected a string, got Adam \( Para"):
        S.FedAvg(optimizer=torch.optim.Adam([torch.ones(1)]))  # type: ignore[arg-type]


def test_sgd_has_no_subclasses() -> None:
    """The local loop folds SGD's step, so that a subclass's own would never be called."""
    with pytest.raises(TypeError, match=r"^Own: expected a subclass of Optimizer"):
        type("Own", (type(OPTIMIZERS["sgd"]()),), {})


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_sum_of_the_rates_is_known_beforehand(name: str, floor: float, steps: int) -> None:
    schedule = Schedule(name, floor)
    rates = [schedule.rate(k, plain_config(steps)) for k in range(steps)]
    assert sum(rates) == pytest.approx(schedule.total(steps, LR), rel=1e-12)
    assert rates[0] == pytest.approx(LR, rel=1e-15)
    x = np.arange(steps) / steps
    factors = {"linear": 1 - x, "cosine": (1 + np.cos(np.pi * x)) / 2}.get(name, np.ones(steps))
    np.testing.assert_allclose(rates, LR * (floor + (1 - floor) * factors))


def plain_config(steps: int) -> LocalConfig:
    return LocalConfig(0, 1, LR, 0.0, 0.0, 0, 0, (), steps)


# --- a method with an optimiser -------------------------------------------------------------------

C = 6
SHARED = LeastSquares(C, seed=3)
SOME = problem.cohorts(C, 3, 6, seed=1)
COMMON = {"lr": 0.03, "lr_decay": 0.98, "weight_decay": 0.05, "local_steps": [3, 2, 4, 3, 1, 5]}
OPTIONS = {"momentum": {"mu": 0.7, "nesterov": True}, "adamw": {"beta1": 0.8, "eps": 1e-2}}
REFERENCES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any], str]] = {
    "scaffold": (S.Scaffold, scaffold.run, {}, {}, "c_i"),
    "feddyn": (S.FedDyn, feddyn.run, {"alpha": 0.3}, {"alpha": 0.3}, "lam"),
    "fedinit": (S.FedInit, fedavg.run, {"beta": 0.07}, {"ri_beta": 0.07}, "last"),
    "fedcm": (S.FedCM, fedcm.run, {"alpha": 0.3}, {"alpha": 0.3}, ""),  # the vector: delta
}


def run_both(
    name: str, optimizer: str, state: str, schedule: str, **more: Any
) -> tuple[History, problem.History]:
    kind, reference, own, theirs, _ = REFERENCES[name]
    inner = {"momentum": Momentum, "adamw": AdamW}[optimizer](**OPTIONS[optimizer])
    cls = {"momentum": dense.Momentum, "adamw": dense.AdamW}[optimizer]
    steps = {k: v for k, v in COMMON.items() if k != "local_steps"}
    method = kind(local_optimizer=inner, **settings(schedule, state, **steps, **own, **more))
    history = federate(method, SHARED, W0, SOME, local_steps=COMMON["local_steps"])
    expected = reference(
        SHARED,
        W0,
        SOME,
        make=partial(cls, **OPTIONS[optimizer]),
        state=state,
        lr_schedule=schedule,
        **theirs,
        **COMMON,
    )
    return history, expected


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("optimizer", OPTIONS)
@pytest.mark.parametrize("name", REFERENCES)
def test_a_method_with_an_optimizer_is_its_dense_reference(
    name: str, optimizer: str, state: str
) -> None:
    schedule = "cosine" if state == "keep" else "constant"
    history, expected = run_both(name, optimizer, state, schedule)
    close(history.weights, expected.weights)
    active = sorted({i for cohort in SOME for i in cohort})
    if field := REFERENCES[name][4]:
        vectors = client_vectors([history.clients[i] for i in active], field)
        close(vectors, expected.clients[field][active])
    for field, vector in expected.extra.items():
        close(getattr(history.server[-1], field), vector)


@pytest.mark.parametrize("name", ["scaffold", "fedgamma", "fedcm", "mofedsam"])
def test_the_mean_direction_is_the_displacement_under_sgd(name: str) -> None:
    """Momentum without momentum goes the way of the summed directions, with SGD's numbers."""
    common = settings(lr=0.03, weight_decay=0.0, local_steps=3)
    kind = S.METHODS[name]
    plain = federate(kind(**common), SHARED, W0, SOME)
    summed = federate(kind(local_optimizer=Momentum(mu=0.0), **common), SHARED, W0, SOME)
    close(plain.weights, summed.weights)
    assert not torch.equal(plain.weights, summed.weights)


def test_a_rule_that_does_not_ask_for_the_mean_direction_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another optimiser's displacement is not taken for it."""
    monkeypatch.setattr(ScaffoldClient, "reads_mean_direction", False)
    method = S.Scaffold(optimizer="adamw", **settings(local_steps=2))
    with pytest.raises(TypeError, match="a rule with reads_mean_direction = True"):
        federate(method, SHARED, W0, SOME)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("name", ["scaffold", "fedcm", "fedcm on a full graph"])
def test_falling_rates_add_up_to_another_divisor(name: str, schedule: str) -> None:
    """c_i and delta are means of directions, weighted by the rates: of their order, not half."""
    name, *graph = name.split(" on a ")
    own: dict[str, Any] = {"alpha": 1.0} if name == "fedcm" else {}
    if graph:
        own |= {"plugins": (Gossip(topology="full"),), "fraction_train": 1.0}
    common = settings(schedule, lr=1e-5, weight_decay=0.0, local_steps=4)
    history = federate(S.METHODS[name](**common, **own), SHARED, W0, [[*range(C)]])
    for node in [*history.server[-1]] if graph else [history.server[-1]]:
        close(node[0], SHARED.full_grad(W0), 1e-3)


def test_a_second_moment_is_not_negative_whatever_a_client_sends() -> None:
    m = torch.ones(3)
    own = AdamW().resume(SentMoments(m, -m))
    assert not own.v.any()
    w = torch.zeros(3)
    AdamW().step(w, m.clone(), own, LR, 0.0, plain_config(1))
    assert w.isfinite().all()


# --- Muon -----------------------------------------------------------------------------------------

SHAPES = ((7, 4), (7,), (3, 2, 2, 2), (5, 9), (5,), (2, 5))
HIDDEN = (0, 2, 3)
MUON = Muon(mu=0.9, beta1=0.8, rate="original")


def muon_config() -> LocalConfig:
    return LocalConfig(0, 1, LR, WD, 0.0, 0, 0, SHAPES, hidden=HIDDEN)


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()])
def test_moments_on_a_gpu_without_float64_are_corrected_in_float32(optimizer: AdamW) -> None:
    config = LocalConfig(0, 1, LR, WD, 0.0, 0, 0, ((2, 3),))
    with fake_mps():
        m, n = torch.empty(2, 6, device="mps"), torch.ones(2, 1, device="mps")
        sent = optimizer.upload(Moments(m, m, n), config)
    assert isinstance(sent.optimizer_m, Tensor)
    assert sent.optimizer_m.dtype == torch.float32


def test_moments_of_a_model_of_hidden_matrices_are_finite() -> None:
    config = LocalConfig(0, 1, LR, WD, 0.0, 0, 0, ((2, 3),), hidden=(0,))
    w, d = torch.ones(6), torch.arange(6.0)
    own = MUON.init(w)
    MUON.step(w, d, own, LR, WD, config)
    upload = MUON.upload(own, config)
    assert own.n.item() == 1
    assert torch.equal(MUON.resume(upload).m, own.m)  # a client alone begins where it ended
    assert all(part.isfinite().all() for part in upload if part is not None)


def directions(n: int, rows: tuple[int, ...] = ()) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    d = sum(torch.Size(shape).numel() for shape in SHAPES)
    return [torch.randn(*rows, d, generator=generator) for _ in range(n)]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("ours", ["original", "match-rms-adamw"])
def test_muon_is_pytorchs_but_for_its_rounding(
    ours: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch rounds the iteration to bfloat16, here to float64: then they are the same."""
    monkeypatch.setattr("torch.bfloat16", torch.float64)
    config, optimizer = muon_config(), Muon(mu=0.9, nesterov=nesterov, rate=ours)
    w, *ds = (v.double() for v in directions(6))
    sizes = [torch.Size(shape).numel() for shape in SHAPES]

    def parts(v: Tensor) -> list[Tensor]:
        pieces = zip(v.split(sizes), SHAPES, strict=True)
        return [p.reshape(s[0], -1) if len(s) > 1 else p for p, s in pieces]

    matrices, rest = [0, 2, 3], [1, 4, 5]
    parameters = [torch.nn.Parameter(part.clone()) for part in parts(w)]
    theirs = [
        torch.optim.Muon(
            [parameters[i] for i in matrices],
            lr=LR,
            weight_decay=WD,
            momentum=0.9,
            nesterov=nesterov,
            adjust_lr_fn={"original": None}.get(ours, "match_rms_adamw"),
        ),
        torch.optim.AdamW([parameters[i] for i in rest], lr=LR, weight_decay=WD, fused=True),
    ]
    own = optimizer.init(w)
    for d in ds:
        for parameter, gradient in zip(parameters, parts(d), strict=True):
            parameter.grad = gradient.clone()
        for one in theirs:
            one.step()
        optimizer.step(w, d.clone(), own, LR, WD, config)
    for i, (a, b) in enumerate(zip(parts(w), parameters, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-10 if i in matrices else 1e-6, atol=1e-12)


def test_orthogonal_factors_have_singular_values_near_one() -> None:
    for shape in ((7, 4), (4, 7), (5, 5), (3, 6, 4), (64, 130), (130, 64), (3, 64, 150)):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        values = torch.linalg.svdvals(orthogonal(x))
        assert values.min() > 0.5
        assert values.max() < 1.5
        rows = x[None] if x.ndim == 2 else x
        expected = torch.stack([torch.from_numpy(dense.orthogonal(row.numpy())) for row in rows])
        torch.testing.assert_close(orthogonal(x), expected.view_as(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("smallest", [1.0, 1e-3, 1e-8, 0.0])
def test_orthogonal_factors_of_long_matrices_bear_float32(smallest: float) -> None:
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    x = u * torch.linspace(1.0, smallest, 64).pow(4).double() @ vt
    exact = torch.from_numpy(dense.orthogonal(x.numpy()))
    torch.testing.assert_close(orthogonal(x), exact, rtol=0, atol=1e-10)
    torch.testing.assert_close(orthogonal(x.float()).double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("flag", ["medium", "newer flags"])
def test_rounded_products_take_no_powers_of_the_gram_matrix(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(optimizers, "_all_iterations", lambda gram: pytest.fail("on long matrices"))
    query = refuse if flag == "newer flags" else lambda: flag
    monkeypatch.setattr(torch, "get_float32_matmul_precision", query)
    x = torch.randn(64, 300, dtype=torch.float64)
    expected = torch.from_numpy(dense.orthogonal(x.numpy()))
    torch.testing.assert_close(orthogonal(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", [Momentum(), AdamW(), MUON], ids=lambda o: type(o).__name__)
def test_a_cohort_takes_the_steps_of_its_clients(optimizer: Optimizer) -> None:
    """Each with its own count, and a rate of its own where they take unequal numbers of steps."""
    config, (w, *ds) = muon_config(), directions(5, rows=(3,))
    together, own = w.clone(), optimizer.init(w)
    rates = torch.tensor([[0.1], [0.05], [0.02]], dtype=torch.float64)
    alone = [(w[i].clone(), optimizer.init(w[i])) for i in range(3)]
    for k, d in enumerate(ds):
        lr: Any = rates if k % 2 else LR
        rows = 3 if k < 2 else 2  # the last client has taken its steps
        some = lr[:rows] if k % 2 else lr
        optimizer.step(
            together[:rows], d[:rows].clone(), type(own)(*(v[:rows] for v in own)), some, WD, config
        )
        for i in range(rows):
            w_i, own_i = alone[i]
            lr_i = float(rates[i]) if k % 2 else LR
            optimizer.step(w_i, d[i].clone(), own_i, lr_i, WD, config)
    for i in range(3):
        torch.testing.assert_close(together[i], alone[i][0], rtol=1e-6, atol=1e-6)
    upload = optimizer.upload(own, config)
    for i, (_, own_i) in enumerate(alone):
        for a, b in zip(upload, optimizer.upload(own_i, config), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-5, atol=1e-6)
