"""Recorded gradients: on a CPU by a recorder that calls what it was given, on a GPU as graphs."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import simulate
from fedaccord.core.plugin import ClientHalf, GradientSeat
from fedaccord.core.rounds import Solution
from fedaccord.core.rule import Direction, LocalConfig, LocalRule, Model, Stateless
from fedaccord.core.vectors import leaves
from fedaccord.engine import History
from fedaccord.plugins.sam import SAM
from fedaccord.task import Task
from fedaccord.task.cohort_solver import CohortSolver, Stack
from fedaccord.task.cuda_graphs import WORTH, CohortGraphs, Graphs, GraphSolver, Work, recorder
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.solver import Batch, SequentialSolver
from tests.wire.methods import COMBINATIONS, make

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network(*more: nn.Module, device: str = "cpu") -> FlatModel:
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 2, 3), nn.Tanh(), *more, nn.Flatten(), nn.Linear(8, 3))
    return FlatModel(nn.Sequential(*layers), dtype=torch.float64, device=device)


def some_batches(sizes: Sequence[int] = (4, 4, 4, 3, 4, 3, 4)) -> list[Batch]:
    g = torch.Generator().manual_seed(2)
    return [
        (
            3 * torch.randn(n, 1, 4, 4, generator=g, dtype=torch.float64),
            torch.randint(3, (n,), generator=g),
        )
        for n in sizes
    ]


def solve(
    model: FlatModel, batches: Sequence[Batch], graphs: Graphs | None, *plugins: Any
) -> Solution:
    config = LocalConfig(0, 1, 0.3, 0.01, 1.0, 0, 0, model.shapes)
    w, half = model.w.clone(), ClientHalf(LocalRule(), plugins)
    seat = GradientSeat(half, Model(w), Stateless(), config)
    plain = SequentialSolver(model, batches, F.cross_entropy)
    solver = plain if graphs is None else GraphSolver(graphs, batches)
    done = solver(w, Direction(shift=torch.ones_like(w) / 100), seat, config)
    model.w.copy_(w)
    return done


class Recorder:
    """Calls what was recorded, and looks where things lie whenever it does."""

    def __init__(self, model: FlatModel) -> None:
        self.model = model
        self.works: list[Work] = []
        self.replays: list[int] = []
        self.places: set[tuple[int, ...]] = set()

    def __call__(self, work: Work) -> Work:
        number = len(self.works)
        self.works.append(work)

        def replay() -> None:
            places = (self.model.w, self.model.g, *self.model.parameters, *self.model.gradients)
            self.places.add(tuple(tensor.data_ptr() for tensor in places))
            self.replays.append(number)
            work()

        return replay


def graphs_of(model: FlatModel) -> tuple[Graphs, Recorder]:
    spy = Recorder(model)
    return Graphs(model, F.cross_entropy, "float32", spy), spy


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("plugins", [(), (SAM(rho=0.2),)], ids=["bare", "sam"])
def test_the_solution_is_that_of_the_plain_solver(plugins: Any) -> None:
    model, batches = network(), some_batches()
    graphs, spy = graphs_of(model)
    plain, ours = solve(model, batches, None, *plugins), solve(model, batches, graphs, *plugins)
    assert torch.equal(plain.w_K, ours.w_K)
    assert torch.equal(plain.loss, ours.loss)
    assert plain.steps == ours.steps == len(batches)
    # 5 batches of 4 samples and 2 of 3, of which the first is not replayed
    assert len(spy.works) == 2 * (1 + len(plugins))
    assert len(spy.replays) == (4 + 1) * (1 + len(plugins))


@pytest.mark.parametrize("vectorize", ["off", "on"])
@pytest.mark.parametrize(("name", "plugins"), COMBINATIONS)
def test_every_method(
    name: str, plugins: str, vectorize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client at a time, and many together."""
    kept: dict[str, Graphs] = {}

    def graphs(task: Task, precision: str) -> Graphs:
        if precision not in kept:
            kept[precision] = Graphs(task.model(precision), task.loss, precision, lambda work: work)
        return kept[precision]

    plain = run(name, plugins, vectorize)
    monkeypatch.setattr(Task, "graphs", graphs)
    ours = run(name, plugins, vectorize)
    alone = vectorize == "off" or make(name, plugins).pools
    assert (kept["float64"] if alone else kept["float64"].cohort).recorded
    assert plain.weights is not None
    assert ours.weights is not None
    assert torch.equal(plain.weights, ours.weights)
    for before, after in zip(plain.clients, ours.clients, strict=True):
        for (_, one), (_, other) in zip(leaves(before), leaves(after), strict=True):
            assert torch.equal(one, other)


def run(name: str, plugins: str, vectorize: str) -> History:
    steps = 1 if name == "dpsgd" else 0
    more = {"batch_size": 2, "local_epochs": 2, "local_steps": steps}
    method = replace(make(name, plugins), lr=0.05, **more)
    g = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(n, 1, 4, 4, generator=g, dtype=torch.float64), torch.arange(n) % 3)
        for n in (5, 4, 3)
    ]
    clients = data[:1] if method.pools else data
    return simulate(
        method,
        clients=clients,
        model=network().module,
        rounds=2,
        participation=[[*range(len(clients))]] * 2,
        record="weights",
        vectorize=vectorize,
    )


# --- many clients together ------------------------------------------------------------------------


def cohort(
    graphs: CohortGraphs | None, n: int, *plugins: Any, steps: int = 4, device: str = "cpu"
) -> Solution:
    """Client i has 4 samples, i of them with its own number for a class."""
    model = network(device=device)
    g = torch.Generator().manual_seed(n)
    x = torch.randn(steps, n, 4, 1, 4, 4, generator=g, dtype=torch.float64)
    y = torch.randint(3, (steps, n, 4), generator=g)
    sizes = torch.tensor([4] * (n - 1) + [3])
    stacks = [Stack(x_k.to(device), y_k.to(device), sizes) for x_k, y_k in zip(x, y, strict=True)]
    config = LocalConfig(0, 1, 0.3, 0.01, 1.0, tuple(range(n)), 0, model.shapes)
    w, half = model.w.expand(n, -1), ClientHalf(LocalRule(), plugins)
    seat = GradientSeat(half, Model(w), Stateless(), config)
    solve = CohortSolver(model, stacks, F.cross_entropy, graphs=graphs)
    return solve(w, Direction(), seat, config)


@pytest.mark.parametrize("plugins", [(), (SAM(rho=0.2),)], ids=["bare", "sam"])
def test_a_step_of_a_cohort_is_a_replay(plugins: Any) -> None:
    """The filling of the short batch is masked in the recording too."""
    spy = Recorder(network())
    graphs = CohortGraphs(network().w, spy)
    for n in (3, 2, 3):
        ours, plain = cohort(graphs, n, *plugins), cohort(None, n, *plugins)
        assert torch.equal(ours.w_K, plain.w_K)
        assert torch.equal(ours.loss, plain.loss)
    assert len(spy.works) == 2 * (1 + len(plugins))
    assert len(spy.replays) == (3 + 3 + 4) * (1 + len(plugins))


def test_the_models_of_a_cohort_outlast_its_round() -> None:
    graphs = CohortGraphs(network().w, lambda work: work)
    first = cohort(graphs, 3)
    before, place = first.w_K.clone(), graphs.w.data_ptr()
    cohort(graphs, 3, steps=7)
    assert torch.equal(first.w_K, before)
    assert graphs.w.data_ptr() == place


def test_more_clients_than_ever_get_other_buffers() -> None:
    graphs = CohortGraphs(network().w, lambda work: work)
    cohort(graphs, 2)
    assert torch.equal(cohort(graphs, 5).w_K, cohort(None, 5).w_K)
    assert len(graphs.w) == 5
    assert torch.equal(cohort(graphs, 2).w_K, cohort(None, 2).w_K)  # recorded anew


def test_clients_that_are_not_the_first_ones_are_computed_as_before() -> None:
    graphs, spoken = CohortGraphs(network().w, lambda work: work), []

    def plain(x: Tensor, y: Tensor, g: Tensor, point: Tensor) -> Tensor:
        spoken.append(g.storage_offset())
        return torch.zeros(len(g))

    w, g = graphs.room(4)
    x = torch.zeros(2, 1)
    for _ in range(5):
        graphs.gradient(plain, x, x, g[2:], w[2:])
    assert not graphs.recorded
    assert spoken == [2 * g.shape[1]] * 5


def test_no_more_shapes_are_recorded_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedaccord.task.cuda_graphs.MOST", 2)
    model = network()
    graphs, _ = graphs_of(model)
    batches = some_batches((4, 4, 3, 3, 2, 2, 2))
    assert torch.equal(solve(model, batches, graphs).w_K, solve(model, batches, None).w_K)
    assert len(graphs.recorded) == 2


# --- buffers --------------------------------------------------------------------------------------


def test_nothing_moves_between_two_replays() -> None:
    model = network()
    graphs, spy = graphs_of(model)
    buffers = {}
    for _ in range(3):
        solve(model, some_batches(), graphs, SAM(rho=0.2))
        for key, found in graphs.recorded.items():
            places = tuple(t.data_ptr() for t in found if isinstance(t, Tensor))
            assert buffers.setdefault(key, places) == places
    assert len(buffers) == 4
    assert len(spy.places) == 1  # the model is at w again after each gradient elsewhere


def test_a_shape_that_came_once_is_not_recorded() -> None:
    model = network()
    graphs, spy = graphs_of(model)
    solve(model, some_batches((4, 4, 3, 2, 1)), graphs)
    assert [key[0][0] for key in graphs.recorded] == [4]
    assert spy.replays == [0]


def test_the_loss_of_a_step_outlasts_the_next_gradient() -> None:
    model, ((x, y), (x2, y2), *_) = network(), some_batches()
    graphs, _ = graphs_of(model)
    for _ in range(WORTH):
        graph = graphs.find(x, y, at_w=True)
    assert graph is not None
    loss = graph.gradient_at(x, y, model.w)
    before = loss.clone()
    assert not torch.equal(graph.gradient_at(x2, y2, model.w), before)
    assert torch.equal(loss, before)


def test_a_batch_and_a_point_are_copied_not_kept() -> None:
    model, ((x, y), *_) = network(), some_batches()
    graphs, _ = graphs_of(model)
    for _ in range(WORTH):
        graph = graphs.find(x, y, at_w=False)
    assert graph is not None
    point = torch.randn_like(model.w)
    loss = graph.gradient_at(x, y, point)
    with model.at(point), torch.no_grad():
        torch.testing.assert_close(loss, F.cross_entropy(model.module(x), y))
    first = model.g.clone()
    for tensor in (x, point):
        tensor.add_(1)
    graph.replay()
    assert torch.equal(model.g, first)


def test_a_parameter_that_the_loss_does_not_see_has_no_gradient() -> None:
    model, batches = network(), some_batches((4, 4, 4))
    model.g.fill_(7)

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        return predictions.sum() * 0 + 1

    graphs = Graphs(model, loss, "float32", lambda work: work)
    for x, y in batches:
        graph = graphs.find(x, y, at_w=True)
    assert graph is not None
    graph.gradient_at(x, y, model.w)
    assert not model.g.any()


def test_a_module_that_cannot_be_recorded_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batches = network(), some_batches()
    asked = []

    def refuses(work: Work) -> Work:
        asked.append(work)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    graphs = Graphs(model, F.cross_entropy, "float32", refuses)
    plain = solve(model, batches, None)
    with caplog.at_level(logging.WARNING, "flwr"):
        ours = solve(model, batches, graphs)
    assert torch.equal(plain.w_K, ours.w_K)
    assert len(asked) == 1
    told = [record.message for record in caplog.records]
    assert told == [
        "no CUDA graphs of this model: operation not permitted when stream is capturing"
    ]


def test_without_a_gpu_a_task_records_nothing() -> None:
    from fedaccord.config import RunConfig
    from fedaccord.task import load_task

    config = RunConfig.make({"device": "cpu"})
    assert load_task(config.task, num_clients=2).graphs("float32") is None


# --- on a GPU -------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("plugins", [(), (SAM(rho=0.2),)], ids=["bare", "sam"])
def test_graphs_on_a_gpu_are_the_plain_solver(plugins: Any) -> None:
    model = network(device="cuda")
    batches = [(x.cuda(), y.cuda()) for x, y in some_batches()]
    graphs = Graphs(model, F.cross_entropy, "float32", recorder())
    plain, ours = solve(model, batches, None, *plugins), solve(model, batches, graphs, *plugins)
    assert graphs.recorded
    torch.testing.assert_close(plain.w_K, ours.w_K, rtol=1e-12, atol=1e-12)
    exact = solve(network(), some_batches(), None, *plugins)
    torch.testing.assert_close(exact.w_K, ours.w_K.cpu(), rtol=1e-10, atol=1e-10)


@gpu
def test_dropout_on_a_gpu_draws_the_same_recorded_or_not() -> None:
    model = network(nn.Dropout(0.5), device="cuda")
    batches = [(x.cuda(), y.cuda()) for x, y in some_batches((4,) * 6)]
    graphs = Graphs(model, F.cross_entropy, "float32", recorder())
    plain = solve(model, batches, None)
    for _ in range(2):  # while it is recorded, and with what was recorded
        torch.testing.assert_close(solve(model, batches, graphs).w_K, plain.w_K)


@gpu
def test_a_step_on_a_gpu_does_not_wait_for_it() -> None:
    model = network(device="cuda")
    batches = [(x.cuda(), y.cuda()) for x, y in some_batches((4,) * 6)]
    graphs = Graphs(model, F.cross_entropy, "float32", recorder())
    solve(model, batches, graphs, SAM(rho=0.2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        solve(model, batches, graphs, SAM(rho=0.2))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("plugins", [(), (SAM(rho=0.2),)], ids=["bare", "sam"])
def test_a_cohorts_graphs_on_a_gpu_are_its_plain_steps(plugins: Any) -> None:
    graphs = CohortGraphs(network(device="cuda").w, recorder())
    for n in (3, 2, 3):
        ours, plain, exact = (
            cohort(graphs, n, *plugins, device="cuda"),
            cohort(None, n, *plugins, device="cuda"),
            cohort(None, n, *plugins),
        )
        torch.testing.assert_close(ours.w_K, plain.w_K, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.w_K.cpu(), exact.w_K, rtol=1e-10, atol=1e-10)
    assert graphs.recorded
