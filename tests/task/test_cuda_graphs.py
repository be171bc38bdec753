"""Recorded gradients: on a CPU by a recorder that calls what it was given, on a GPU as graphs."""

import gc
import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from fedaccord import simulate
from fedaccord.core.vectors import leaves
from fedaccord.engine import History
from fedaccord.task import cohort_solver, cuda_graphs, solver
from fedaccord.task.cohort_solver import CohortSolver, Stack
from fedaccord.task.cuda_graphs import (
    MAX_SHAPES,
    WARM_UP,
    GradientGraphs,
    Work,
    graphs_of,
    records,
    run,
)
from fedaccord.task.flat_model import FlatModel
from tests.wire.methods import COMBINATIONS, make

FULLEST = dict(COMBINATIONS)  # each method with its last combination of plug-ins
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 2, 3), nn.Tanh(), *more)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))


def batches(m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, 1, 4, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (m, n), generator=g)


class Spy:
    """A recorder that counts recordings and replays."""

    def __init__(self) -> None:
        self.clients: list[int] = []  # of each recording
        self.replays = 0

    def __call__(self, works: Sequence[Work]) -> Work:
        for _ in range(WARM_UP):
            run(works)
        self.clients.append(len(works))

        def replay() -> None:
            self.replays += 1
            run(works)

        return replay


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Instead of the recorder of a GPU."""
    recorder = Spy()
    monkeypatch.setattr(cuda_graphs, "GraphRecorder", lambda _: recorder)
    return recorder


@pytest.fixture
def everywhere(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """As if the CPU were a GPU."""
    monkeypatch.setattr(cuda_graphs, "is_on_gpu", lambda _: True)
    for module in (solver, cohort_solver):
        monkeypatch.setattr(module, "known_layers", lambda *_: None)
    return spy


def graphs_in_use(*more: nn.Module) -> tuple[FlatModel, GradientGraphs]:
    """A model, and its graphs in a second visit."""
    model = FlatModel(network(*more), dtype=torch.float64)
    graphs = GradientGraphs(model, F.cross_entropy, "float32")
    graphs.visits = 2
    return model, graphs


def of_autograd(model: FlatModel, x: Tensor, y: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    with model.at(point):
        loss = solver.by_autograd(model, x, y, F.cross_entropy, "float32")
    return loss, model.g.clone()


def test_each_clients_gradient_is_that_of_one_client_alone(spy: Spy) -> None:
    model, graphs = graphs_in_use()
    for m, n in ((3, 4), (3, 4), (1, 4), (2, 3), (3, 4), (4, 4), (3, 4), (3, 4), (3, 4)):
        x, y = batches(m, n, seed=spy.replays)
        points, g = (torch.randn(m, len(model.w), dtype=torch.float64) for _ in range(2))
        losses = graphs.gradient(x, y, points, g)
        assert losses is not None
        for i in range(m):
            loss, alone = of_autograd(model, x[i], y[i], points[i])
            assert torch.equal(losses[i], loss)
            assert torch.equal(g[i], alone)
    # four clients need larger buffers: what was recorded is recorded again
    assert spy.clients == [3, 1, 2, 4, 3]
    assert spy.replays == 9


@pytest.mark.parametrize(("name", "vectorize"), [*zip(FULLEST, cycle(["off", "on"]))])
def test_every_method_leaves_the_same_bits(
    name: str, vectorize: str, everywhere: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one client at a time without recordings."""
    ours = trained(name, FULLEST[name], vectorize)
    assert everywhere.replays
    for module in (solver, cohort_solver):
        monkeypatch.setattr(module, "graphs_of", lambda *_: None)
    plain = trained(name, FULLEST[name], vectorize)
    assert plain.weights is not None
    assert ours.weights is not None
    close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)  # of vmap
    same = close if vectorize == "on" else partial(close, rtol=0, atol=0)
    same(ours.weights, plain.weights)
    for before, after in zip(plain.clients, ours.clients, strict=True):
        for (_, one), (_, other) in zip(leaves(before), leaves(after), strict=True):
            same(one, other)


def trained(name: str, plugins: str, vectorize: str) -> History:
    length = {} if name in ("dpsgd", "scaffnew") else {"local_epochs": 1}  # have steps of their own
    more: dict[str, Any] = {"lr": 0.05, "batch_size": 2, "precision": "float64", **length}
    method = replace(make(name, plugins), **more)
    g = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(n, 1, 4, 4, generator=g, dtype=torch.float64), torch.arange(n) % 3)
        for n in (5, 4, 3)
    ]
    return simulate(
        method,
        clients=data,
        model=network(),
        rounds=2,
        participation=[[0, 1, 2]] * 2,
        record="weights",
        vectorize=vectorize,
    )


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Drawing(nn.Dropout):
    """As if a library's layer drew them, from any generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * np.random.random()


class OwnLinear(nn.Linear):
    pass


def hooked() -> nn.Module:
    layer = nn.Tanh()
    layer.register_forward_hook(lambda *_: None)
    return layer


def test_python_of_ones_own_is_not_recorded() -> None:
    def of(*more: nn.Module, loss: Any = F.cross_entropy, **settings: Any) -> bool:
        return records(FlatModel(network(*more), **settings), loss)

    assert of()
    assert of(nn.Dropout())  # which is seen when it draws
    assert not of(Own())
    assert not of(hooked())
    linear = nn.Linear(2, 2)
    linear.weight.register_hook(lambda gradient: gradient)
    assert not of(linear)
    replaced = nn.Tanh()
    replaced.forward = Own().forward  # type: ignore[method-assign]
    assert not of(replaced)
    assert not of(parametrize.register_parametrization(OwnLinear(2, 2), "weight", Own()))
    assert not of(weight_norm(OwnLinear(2, 2)))
    assert of(weight_norm(nn.Linear(2, 2)))
    assert not of(torch.fx.symbolic_trace(Own()))
    activation = nn.TransformerEncoderLayer(2, 1, activation=lambda x: x)
    assert not of(activation)
    assert of(nn.TransformerEncoderLayer(2, 1))
    assert of(nn.Embedding(3, 2))
    assert not of(nn.Embedding(3, 2, max_norm=1.0))  # which changes its weights in place
    assert not of(loss=lambda predictions, targets: predictions.sum())
    assert not of(nn.BatchNorm2d(2), buffers="mean")
    assert of(nn.BatchNorm2d(2), buffers="freeze")
    assert not of(local_parameters="0.*")
    assert not of(forward=lambda model, inputs: model(inputs))


@pytest.mark.parametrize("layer", [nn.Dropout(), Drawing()])
def test_a_model_that_draws_random_numbers_is_not_recorded(layer: nn.Module, spy: Spy) -> None:
    model, graphs = graphs_in_use(layer)
    x, y = batches(2, 4)
    points = model.w.expand(2, -1).clone()
    states = torch.get_rng_state(), np.random.get_state()[2]
    for _ in range(3):
        assert graphs.gradient(x, y, points, torch.empty_like(points)) is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[2] == states[1]
    assert not spy.clients


def test_a_model_that_cannot_be_recorded_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(works: Sequence[Work]) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs, "GraphRecorder", lambda _: fails)
    model, graphs = graphs_in_use()
    x, y = batches(2, 4)
    points = model.w.expand(2, -1).clone()
    with caplog.at_level(logging.WARNING, "flwr"):
        results = [graphs.gradient(x, y, points, torch.empty_like(points)) for _ in range(4)]
    assert results == [None] * 4
    assert graphs.points.numel() == 0
    [warning] = caplog.messages
    assert "launched one by one" in warning
    assert "more" not in warning


def test_clients_without_the_memory_for_branches_are_computed_in_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []

    def fails(works: Sequence[Work]) -> Work:
        sizes.append(len(works))
        if len(works) > 1:
            raise torch.OutOfMemoryError
        return partial(run, works)

    monkeypatch.setattr(cuda_graphs, "GraphRecorder", lambda _: fails)
    model, graphs = graphs_in_use()
    for m in (2, 2, 1):
        x, y = batches(m, 4)
        points = model.w.expand(m, -1).clone()
        g = torch.empty_like(points)
        assert graphs.gradient(x, y, points, g) is not None
        assert torch.equal(g[0], of_autograd(model, x[0], y[0], model.w)[1])
    assert sizes == [2, 1]
    assert not caplog.messages


@pytest.mark.parametrize("first", [nn.LeakyReLU(inplace=True), nn.ELU(inplace=True)])
def test_a_first_layer_may_work_in_place(first: nn.Module, spy: Spy) -> None:
    model = FlatModel(nn.Sequential(first, nn.Flatten(), nn.Linear(16, 3)), dtype=torch.float64)
    graphs = GradientGraphs(model, F.cross_entropy, "float32")
    for graphs.visits in (1, 2, 3):
        x, y = batches(1, 4, seed=graphs.visits)
        g = torch.empty_like(model.w)
        assert graphs.gradient(x.clone(), y, model.w[None], g[None]) is not None
        assert torch.equal(g, of_autograd(model, x[0].clone(), y[0], model.w)[1])
    assert spy.replays == 2


def test_a_model_that_is_built_for_a_visit_is_not_recorded(everywhere: Spy) -> None:
    for recordings in (0, 1):
        model = FlatModel(network(), dtype=torch.float64)
        for _ in range(1 + recordings):
            graphs = graphs_of(model, F.cross_entropy, "float32")
            assert graphs is not None
            x, y = batches(1, 4)
            for _ in range(3):
                assert graphs.gradient(x, y, model.w[None], torch.empty_like(model.w)[None])
        assert len(everywhere.clients) == recordings


def test_a_model_is_freed_with_its_last_reference(everywhere: Spy) -> None:
    model = FlatModel(network(), dtype=torch.float64)
    graphs = graphs_of(model, F.cross_entropy, "float32")
    assert graphs is not None
    x, y = batches(1, 4)
    graphs.gradient(x, y, model.w[None], torch.empty_like(model.w)[None])
    dies = weakref.ref(model)
    del graphs
    gc.disable()
    try:
        del model
        assert dies() is None
    finally:
        gc.enable()


def test_python_frees_no_cycles_until_every_thread_has_recorded() -> None:
    began, block = Event(), cuda_graphs._without_collection

    def record() -> bool:
        with block():
            began.set()
            return gc.isenabled()

    with ThreadPoolExecutor(1) as pool:
        with block():
            other = pool.submit(record)
            assert not began.wait(0.3)
            assert not gc.isenabled()
        assert not other.result()
    assert gc.isenabled()


@dataclass
class Focal:  # which has no hash
    gamma: float = 2.0

    def __call__(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(predictions, targets) ** self.gamma


def test_a_loss_without_a_hash_is_launched_step_by_step(everywhere: Spy) -> None:
    assert graphs_of(FlatModel(network()), Focal(), "float32") is None


def test_a_stack_that_the_model_does_not_take_is_refused_as_before(everywhere: Spy) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.GroupNorm(8, 8), nn.Linear(8, 3))
    model = FlatModel(module, dtype=torch.float64)
    x, y = batches(2, 1)
    points = model.w.expand(2, -1).clone()
    stack = Stack(x, y, torch.ones(2).long())
    with pytest.raises(NotImplementedError, match="one at a time"):
        CohortSolver(model, [], F.cross_entropy).gradient(stack, torch.empty_like(points), points)


def test_shapes_beyond_the_limit_are_computed_without_recording(spy: Spy) -> None:
    model, graphs = graphs_in_use()
    point = model.w[None].clone()
    for _ in range(2):
        for n in range(1, MAX_SHAPES + 3):
            x, y = batches(1, n)
            g = torch.empty_like(point)
            assert graphs.gradient(x, y, point, g) is not None
            assert torch.equal(g[0], of_autograd(model, x[0], y[0], model.w)[1])
    assert len(spy.clients) == len(graphs.graphs) == MAX_SHAPES


# --- on a GPU that is there -----------------------------------------------------------------------


@gpu_only
@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_graphs_on_a_gpu_leave_the_same_weights(
    vectorize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(n, 1, 4, 4, generator=g, dtype=torch.float64), torch.arange(n) % 3)
        for n in (9, 8, 8, 5)
    ]
    sizes: list[int] = []
    record = cuda_graphs.GraphRecorder.__call__

    def counting(self: cuda_graphs.GraphRecorder, works: Sequence[Work]) -> Work:
        replay = record(self, works)
        sizes.append(len(works))
        return replay

    monkeypatch.setattr(cuda_graphs.GraphRecorder, "__call__", counting)
    weights = []
    for graphs in (True, False):
        if not graphs:
            monkeypatch.setattr(solver, "graphs_of", lambda *_: None)
            monkeypatch.setattr(cohort_solver, "graphs_of", lambda *_: None)
        history = simulate(
            "fedsam", clients=data, model=network(), rounds=4, batch_size=4, participation=1.0,
            record="weights", dtype=torch.float64, device="cuda", vectorize=vectorize,
        )  # fmt: skip
        weights.append(history.weights)
    assert max(sizes) == (4 if vectorize == "on" else 1)
    torch.testing.assert_close(*weights, rtol=1e-11, atol=1e-11)


@gpu_only
def test_graphs_on_a_gpu_share_their_memory() -> None:
    module = nn.Sequential(nn.Conv2d(1, 64, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64 * 62 * 62, 3))
    model, reserved = FlatModel(module, device="cuda"), []
    graphs, point = GradientGraphs(model, F.cross_entropy, "float32"), model.w[None].clone()
    graphs.visits = 2
    for n in (64, 63, 62, 61, 60):
        x, y = torch.randn(1, n, 1, 64, 64).cuda(), torch.zeros(1, n).long().cuda()
        for _ in range(2):
            assert graphs.gradient(x, y, point, torch.empty_like(point)) is not None
        assert sum(graph.replay is not None for graph in graphs.graphs.values()) == 65 - n
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] < 1.5 * reserved[0]


@gpu_only
def test_more_clients_on_a_gpu_are_recorded_anew() -> None:
    model, (x, y) = FlatModel(network().cuda(), dtype=torch.float64), batches(5, 4)
    graphs = GradientGraphs(model, F.cross_entropy, "float32")
    graphs.visits = 2
    for m in (1, 2, 5, 1, 2):
        points = torch.randn(m, len(model.w), dtype=torch.float64).cuda()
        for _ in range(2):
            g = torch.empty_like(points)
            assert graphs.gradient(x[:m].cuda(), y[:m].cuda(), points, g) is not None
            for i in range(m):
                alone = of_autograd(model, x[i].cuda(), y[i].cuda(), points[i])[1]
                torch.testing.assert_close(g[i], alone, rtol=1e-11, atol=1e-11)


class Reading(nn.Module):
    """Synchronises, as a library's layer might."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().sum() > 0)


@gpu_only
def test_a_layer_that_synchronises_is_one_warning_and_others_are_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = (part.cuda() for part in batches(1, 4))
    for layers in ((Reading(),), ()):
        model = FlatModel(network(*layers).cuda(), dtype=torch.float64)
        graphs = GradientGraphs(model, F.cross_entropy, "float32")
        graphs.visits, g = 2, torch.empty_like(model.w)
        with caplog.at_level(logging.WARNING, "flwr"):
            results = [graphs.gradient(x, y, model.w[None], g[None]) for _ in range(2)]
        assert [losses is None for losses in results] == [bool(layers)] * 2
        loss, alone = of_autograd(model, x[0], y[0], model.w)
        assert loss.isfinite()
        if not layers:
            torch.testing.assert_close(g, alone, rtol=1e-11, atol=1e-11)
        torch.cuda.empty_cache()
    assert len(caplog.messages) == 1


@gpu_only
def test_dropout_on_a_gpu_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "GraphRecorder", lambda _: pytest.fail("recorded"))
    data = [(torch.randn(8, 1, 4, 4), torch.arange(8) % 3)] * 2
    simulate(
        "fedavg", clients=data, model=network(nn.Dropout()), rounds=2, batch_size=4, device="cuda"
    )
