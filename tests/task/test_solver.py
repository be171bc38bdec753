"""A client's local steps against the formula they stand for, and against PyTorch's optimiser."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.sgd import sgd

from fedaccord import simulate
from fedaccord.core.client_half import ClientHalf, GradientHook
from fedaccord.core.rounds import Solution
from fedaccord.core.rule import Direction, GradientAt, LocalConfig, LocalRule, Model, Stateless
from fedaccord.core.vectors import Vector, sum_dtype
from fedaccord.plugins.sam import SAM
from fedaccord.strategies import FedAvg
from fedaccord.task import solver
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.solver import AHEAD, Batch, Loss, SequentialSolver, ahead, tf32_as

LR, STEPS = 0.3, 5
D = 3 * 4 + 4 + 4 * 3 + 3


def flat_model(dtype: torch.dtype = torch.float64) -> FlatModel:
    torch.manual_seed(1)
    return FlatModel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), dtype=dtype)


def some_batches(dtype: torch.dtype = torch.float64) -> list[Batch]:
    torch.manual_seed(2)
    sizes = [4, 4, 4, 4, 1][:STEPS]
    return [(3 * torch.randn(n, 3, dtype=dtype), torch.randint(3, (n,))) for n in sizes]


def vectors(count: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(D, dtype=torch.float64) for _ in range(count)]


def solve(
    model: FlatModel,
    batches: Sequence[Batch],
    loss: Loss = F.cross_entropy,
    *,
    half: ClientHalf | None = None,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    precision: str = "float32",
    **direction: Any,
) -> Solution:
    """Local steps from the model's own w; ``direction``: the fields of a `Direction`."""
    config = LocalConfig(0, 1, LR, weight_decay, clip_norm or 0.0, 0, 0, model.shapes)
    w = model.w.clone()
    hook = GradientHook(half or ClientHalf(LocalRule()), Model(w), Stateless(), config)
    steps = SequentialSolver(model, batches, loss, precision)
    return steps(w, Direction(**direction), hook)


class Reference:
    """Loss and gradient as functions of a vector, without FlatModel's shared memory."""

    def __init__(self) -> None:
        self.model = flat_model()

    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        x, y = batch
        pieces = dict(zip(self.model.names, self.model.views(w), strict=True))
        return F.cross_entropy(functional_call(self.model.module, pieces, (x,)), y)

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        w = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(self.loss(w, batch), w)
        return g


def plain_loop(
    batches: Sequence[Batch],
    *,
    scale: float = 1.0,
    shift: Tensor | None = None,
    rho: float = 0.0,
    anchor: Tensor | None = None,
    decay: float = 1.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    sam_rho: float = 0.0,
) -> tuple[Tensor, list[float], list[float]]:
    """The formula as it stands: the last w, the losses before each step, the gradients' norms."""
    reference = Reference()
    w = reference.model.w.clone()
    losses, norms = [], []
    for batch in batches:
        losses.append(float(reference.loss(w, batch)))
        point = w
        if sam_rho:
            ascent = reference.gradient(w, batch)
            point = w + sam_rho * ascent / ascent.norm()
        g = reference.gradient(point, batch)
        norms.append(float(g.norm()))
        if clip_norm is not None and g.norm() > clip_norm:
            g = g * clip_norm / g.norm()
        direction = scale * g + decay * weight_decay * w
        if shift is not None:
            direction = direction + shift
        direction = direction + rho * (w if anchor is None else w - anchor)
        w = w - LR * direction
    return w, losses, norms


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


TERMS = [
    dict(zip(("scale", "shift", "prox", "weight_decay", "clip_norm"), values, strict=True))
    for values in product((1.0, 0.3), (False, True), ("", "anchor", "zero"), (0.0, 0.2), (None, 1))
]


def name(terms: dict[str, Any]) -> str:
    return "-".join(f"{k}={v}" for k, v in terms.items() if v) or "plain"


@pytest.mark.parametrize("terms", TERMS, ids=name)
def test_a_step_is_the_formula_whatever_terms_are_on(terms: dict[str, Any]) -> None:
    shift, anchor = vectors(2)
    settings: dict[str, Any] = {k: terms[k] for k in ("scale", "weight_decay")}
    if terms["shift"]:
        settings["shift"] = shift
    if terms["prox"]:
        settings |= {"rho": 0.7, "anchor": anchor if terms["prox"] == "anchor" else None}
    if terms["clip_norm"]:
        norms = plain_loop(some_batches(), **settings)[2]
        settings["clip_norm"] = (min(norms) + max(norms)) / 2  # binds in some of the steps
    solution = solve(flat_model(), some_batches(), **settings)
    w, losses, _ = plain_loop(some_batches(), **settings)
    close(solution.w_K, w)
    assert solution.steps == STEPS
    assert float(solution.loss) == pytest.approx(sum(losses) / STEPS, rel=1e-12)


def test_the_terms_have_an_effect() -> None:
    """Otherwise the test above could not distinguish the combinations."""
    shift, anchor = vectors(2)
    variants = [
        {},
        {"scale": 0.3},
        {"shift": shift},
        {"rho": 0.7},
        {"rho": 0.7, "anchor": anchor},
        {"weight_decay": 0.2},
        {"weight_decay": 0.2, "decay": 0.5},
        {"clip_norm": 0.1},
    ]
    ends = [plain_loop(some_batches(), **variant)[0] for variant in variants]
    assert all((a - b).norm() > 1e-2 for i, a in enumerate(ends) for b in ends[:i])


@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
def test_a_method_may_scale_the_weight_decay(decay: float) -> None:
    settings = {"weight_decay": 0.2, "decay": decay}
    solution = solve(flat_model(), some_batches(), **settings)
    close(solution.w_K, plain_loop(some_batches(), **settings)[0])


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_without_correction_it_is_pytorchs_sgd(weight_decay: float, clip_norm: float) -> None:
    module = flat_model().module
    solution = solve(flat_model(), some_batches(), weight_decay=weight_decay, clip_norm=clip_norm)
    parameters = list(module.parameters())
    # the step of torch.optim.SGD, whose first use loads PyTorch's compiler
    settings = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    for x, y in some_batches():
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        gradients = [p.grad for p in parameters]
        with torch.no_grad():
            sgd(parameters, gradients, [None] * 4, lr=LR, weight_decay=weight_decay, **settings)
    expected = torch.cat([p.detach().reshape(-1) for p in parameters])
    # clip_grad_norm_ divides by ||g|| + 1e-6
    close(solution.w_K, expected, 1e-5 if clip_norm else 1e-12)


def test_only_the_data_gradient_is_clipped() -> None:
    """A step without gradient is -lr (shift + rho (w - anchor) + weight_decay w), however long."""
    shift, anchor = (1e3 * v for v in vectors(2))
    model = flat_model()
    w = model.w.clone()
    settings: dict[str, Any] = {"shift": shift, "rho": 0.7, "anchor": anchor, "weight_decay": 0.2}
    solution = solve(model, some_batches()[:1], no_gradient, clip_norm=1e-3, **settings)
    close(solution.w_K, w - LR * (shift + 0.7 * (w - anchor) + 0.2 * w))


def no_gradient(predictions: Tensor, targets: Tensor) -> Tensor:
    return 0.0 * predictions.sum()


def test_a_zero_gradient_survives_clipping() -> None:
    model = flat_model()
    w = model.w.clone()
    solution = solve(model, some_batches(), no_gradient, clip_norm=1.0)
    assert torch.equal(solution.w_K, w)
    assert (solution.steps, float(solution.loss)) == (STEPS, 0.0)


@pytest.mark.parametrize("clips", [False, True])
def test_a_hook_evaluates_the_gradient_at_any_point(clips: bool) -> None:
    """Sharpness-aware: at w + r g / ||g||. The clip bounds the gradient there."""
    settings: dict[str, Any] = {"weight_decay": 0.1}
    if clips:
        norms = plain_loop(some_batches(), sam_rho=0.2)[2]
        settings["clip_norm"] = (min(norms) + max(norms)) / 2
    half = ClientHalf(LocalRule(), (SAM(rho=0.2),))
    solution = solve(flat_model(), some_batches(), half=half, **settings)
    w, losses, _ = plain_loop(some_batches(), sam_rho=0.2, **settings)
    close(solution.w_K, w, 1e-11)
    assert float(solution.loss) == pytest.approx(sum(losses) / STEPS, rel=1e-11)
    assert not torch.allclose(w, plain_loop(some_batches(), **settings)[0])


def test_the_gradient_elsewhere_is_that_of_a_model_which_lives_there() -> None:
    """Also where layers read their weights again on the way back, as convolutions do."""

    def convolutions() -> FlatModel:
        torch.manual_seed(1)
        layers = (nn.Conv2d(1, 2, 3), nn.GroupNorm(2, 2), nn.Tanh(), nn.Conv2d(2, 3, 2))
        return FlatModel(nn.Sequential(*layers, nn.Flatten()), dtype=torch.float64)

    x, y = torch.randn(5, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    other = convolutions()
    other.w.add_(torch.randn_like(other.w))
    expected = F.cross_entropy(other.module(x), y)
    expected.backward()

    class Elsewhere(LocalRule):
        def gradient(
            self, w: Tensor, g: Tensor, buffers: Any, at: GradientAt, config: Any
        ) -> Tensor:
            return at(other.w)

    model = convolutions()
    w = model.w.clone()
    solution = solve(model, [(x, y)], half=ClientHalf(Elsewhere()))
    close(solution.w_K, w - LR * other.g)
    assert float(solution.loss) == pytest.approx(expected.item(), rel=1e-12)


def test_what_goes_in_stays_as_it_was() -> None:
    shift, anchor = vectors(2)
    settings: dict[str, Any] = {"shift": shift, "rho": 0.7, "anchor": anchor, "weight_decay": 0.2}
    solve(flat_model(), some_batches(), **settings)
    solve(flat_model(), some_batches(), shift=shift)
    for now, before in zip((shift, anchor), vectors(2), strict=True):
        assert torch.equal(now, before)


def test_the_solution_is_a_tensor_of_its_own_and_the_start_is_the_callers() -> None:
    """The module may have been anywhere before, and may go anywhere afterwards."""
    model, (start,) = flat_model(), vectors(1)
    config = LocalConfig(0, 1, LR, 0.0, 0.0, 0, 0, model.shapes)
    hook = GradientHook(ClientHalf(LocalRule()), Model(start), Stateless(), config)
    solution = SequentialSolver(model, some_batches(), no_gradient)(start, Direction(), hook)
    model.w.zero_()
    assert torch.equal(start, vectors(1)[0])
    assert torch.equal(solution.w_K, start)


def test_the_model_trains_in_training_mode() -> None:
    model = flat_model()
    model.module.eval()
    solve(model, some_batches()[:1])
    assert model.module.training


@pytest.mark.parametrize("changes", [{}, {"seed": 1}, {"round": 1}, {"client": 1}])
def test_dropout_is_a_function_of_seed_round_and_client(changes: dict[str, int]) -> None:
    model, batches = flat_model(), some_batches()
    model.module.append(nn.Dropout(0.5))
    w, half = model.w.clone(), ClientHalf(LocalRule())

    def walk(**own: int) -> Tensor:
        config = LocalConfig(0, 1, LR, 0.0, 0.0, 0, 0, model.shapes)._replace(**own)
        hook = GradientHook(half, Model(w), Stateless(), config)
        return SequentialSolver(model, batches, F.cross_entropy)(w, Direction(), hook).w_K

    before = walk()
    torch.rand(7)  # wherever the caller's own random numbers are
    state = torch.get_rng_state()
    assert torch.equal(before, walk(**changes)) == (not changes)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("plugins", "reads"), [((), 0), ((SAM(rho=0.1),), STEPS)])
def test_only_steps_of_several_passes_copy_random_state_and_statistics(
    plugins: tuple[SAM, ...], reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model = FlatModel(module, dtype=torch.float64, buffers="mean")
    states_of, sizes = solver.states_of, list[int]()
    monkeypatch.setattr(solver, "states_of", lambda of: sizes.append(len(of)) or states_of(of))
    batches = [(x[:4], y[:4]) for x, y in 2 * some_batches()[:4]][:STEPS]
    solve(model, batches, half=ClientHalf(LocalRule(), plugins))
    assert sizes == [3] * reads
    assert int(module[1].num_batches_tracked) == STEPS


def test_the_passes_of_a_step_draw_the_same_numbers() -> None:
    draws: list[tuple[float, ...]] = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            draws.append((np.random.rand(), random.random(), float(torch.rand(()))))
            return super().forward(x)

    model = FlatModel(Noting(3, 3), dtype=torch.float64)
    solve(model, some_batches(), half=ClientHalf(LocalRule(), (SAM(rho=0.1),)))
    first, second = draws[::2], draws[1::2]
    assert first == second
    assert all(len({*numbers}) == STEPS for numbers in zip(*first, strict=True))


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand], ids=["torch", "numpy"])
def test_so_do_those_of_a_generator_that_the_first_step_did_not_use(draw: Any) -> None:
    """As dropout in a layer that is left out at random."""
    draws: list[float] = []

    class Later(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            draws.append(float(draw(1)[0]) if len(draws) > 1 else 0.0)
            return super().forward(x)

    model = FlatModel(Later(3, 3), dtype=torch.float64)
    solve(model, some_batches(), half=ClientHalf(LocalRule(), (SAM(rho=0.1),)))
    assert draws[::2] == draws[1::2]
    assert len({*draws}) == STEPS


# --- passes over the data -------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "cut"), [(10, 4), (AHEAD // 2, 2), (AHEAD, 1), (2 * AHEAD, 1)])
def test_small_batches_are_cut_ahead_of_the_steps(size: int, cut: int) -> None:
    calls: list[int] = []

    def batches() -> Iterator[Batch]:
        for k in range(4):
            calls.append(k)
            yield torch.full((1,), k).expand(size), torch.tensor([k])

    steps = ahead(batches())
    assert calls == []
    assert int(next(steps)[1]) == 0
    assert calls == [*range(cut)]
    assert [int(y) for _, y in steps] == [1, 2, 3]


# --- what a step costs, and in which dtype --------------------------------------------------------


def test_a_step_allocates_no_vector() -> None:
    """Of many small layers no activation or gradient has d elements: only a vector has."""
    model = FlatModel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))))
    x, y = torch.randn(4, 8), torch.randint(8, (4,))
    shift, anchor = torch.ones_like(model.w), torch.zeros_like(model.w)
    terms: dict[str, Any] = {"shift": shift, "rho": 0.1, "anchor": anchor}

    def allocations(steps: int) -> list[str]:
        settings = {"scale": 0.5, "weight_decay": 0.01, "clip_norm": 0.1, **terms}
        # not TorchDispatchMode: its first use loads PyTorch's compiler
        with profile(profile_memory=True) as trace:
            solve(model, [(x, y)] * steps, **settings)
        vector = model.w.numel() * model.w.element_size()
        return [e.name for e in trace.function_events if e.self_cpu_memory_usage >= vector]

    one_step = allocations(1)
    assert one_step  # the solution, and shift - rho anchor: the counter does count
    assert allocations(5) == one_step


def test_bfloat16_is_for_the_forward_pass_only() -> None:
    inside: list[torch.dtype] = []

    def walk(precision: str) -> Tensor:
        model = flat_model(torch.float32)
        hook = model.module[0].register_forward_hook(lambda m, i, out: inside.append(out.dtype))
        batches = some_batches(torch.float32)
        solution = solve(model, batches, weight_decay=0.1, precision=precision)
        hook.remove()
        assert solution.loss > 0
        assert model.w.dtype == model.g.dtype == torch.float32
        assert model.module[0].weight.dtype == torch.float32
        return solution.w_K

    rounded, exact = walk("bfloat16"), walk("float32")
    assert inside == [torch.bfloat16] * STEPS + [torch.float32] * STEPS
    assert torch.isfinite(rounded).all()
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.05)


def test_a_gpu_rounds_products_only_where_it_is_told() -> None:
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    try:
        for precision, allowed in (("tf32", True), ("float32", False), ("bfloat16", True)):
            for outer in (True, False):
                flags[0].allow_tf32 = flags[1].allow_tf32 = outer
                with (
                    tf32_as(precision, torch.device("cuda")),
                    tf32_as("float32" if allowed else "tf32", torch.device("cpu")),  # no change
                ):
                    assert [flag.allow_tf32 for flag in flags] == [allowed] * 2
                assert [flag.allow_tf32 for flag in flags] == [outer] * 2
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def test_the_rounding_of_a_gpu_is_that_of_one_thread_at_a_time() -> None:
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before, began = [flag.allow_tf32 for flag in flags], Event()

    def exact() -> list[bool]:
        with tf32_as("float32", torch.device("cuda")):
            began.set()
            return [flag.allow_tf32 for flag in flags]

    with ThreadPoolExecutor(1) as pool:
        with tf32_as("tf32", torch.device("cuda")):
            other = pool.submit(exact)
            assert not began.wait(0.3)
            assert [flag.allow_tf32 for flag in flags] == [True] * 2
        assert other.result() == [False] * 2
    assert [flag.allow_tf32 for flag in flags] == before


def test_losses_are_summed_in_float64_where_there_is_float64() -> None:
    assert sum_dtype(torch.device("cpu")) == torch.float64
    assert sum_dtype(torch.device("mps")) == torch.float32
    losses = iter([1e8, 1.0, 1.0, 1.0, 1.0])

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        return predictions.sum() * 0.0 + next(losses)

    solution = solve(flat_model(torch.float32), some_batches(torch.float32), loss)
    assert float(solution.loss) == pytest.approx((1e8 + 4) / 5, rel=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw", "muon"])
def test_local_parameters_are_trained_beside_the_shared_ones(optimizer: str) -> None:
    """One client that keeps its last layer takes the steps of one that shares it."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(20, 6, generator=generator)
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "lr_schedule": "linear",
        "precision": "float64",
        "lr": 0.05,
        "clip_norm": 0.0,
        "weight_decay": 0.01,
        "fraction_train": 1.0,
        "local_epochs": 2,
        "batch_size": 5,
    }

    def run(local_parameters: str) -> tuple[Vector, Vector]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        method = FedAvg(**settings, local_parameters=local_parameters)
        history = simulate(
            method, clients=[(x, torch.arange(20) % 3)], model=module, rounds=3, record="weights"
        )
        state = history.clients[0]
        return history.weights[-1], state.local if local_parameters else history.weights[-1][:0]

    (shared, local), (whole, _) = run("2.*"), run("")
    torch.testing.assert_close(torch.cat([shared, local]), whole, rtol=1e-12, atol=1e-12)
    assert len(local) == 18
