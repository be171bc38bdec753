"""n clients in one call take the steps that each of them takes alone."""

import random
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import strategies as S
from fedaccord.core.client_half import ClientHalf, GradientHook
from fedaccord.core.cohort import Reply
from fedaccord.core.rounds import (
    ClientRound,
    Solution,
    broadcast,
    client_round,
    first_state,
    server_round,
)
from fedaccord.core.rule import Direction, LocalConfig, LocalRule, Stateless
from fedaccord.core.vectors import leaves, row, stack
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.task.cohort_solver import IGNORED, CohortSolver, stacked
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.solver import Batch, Loss, SequentialSolver
from tests.strategies.test_stacks import make, methods

SIZES = (11, 7, 6, 2)  # samples; in batches of 4, twice: K = 6, 4, 4, 2
N = len(SIZES)
FLOAT64 = torch.float64


def network(*first: nn.Module, dtype: torch.dtype = FLOAT64) -> FlatModel:
    torch.manual_seed(1)
    layers = (*first, nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return FlatModel(nn.Sequential(*layers), dtype=dtype)


def batches(seed: int = 2, dtype: torch.dtype = FLOAT64) -> list[list[Batch]]:
    """Of every client: a short last batch in each of two passes."""
    torch.manual_seed(seed)
    clients = []
    for n in SIZES:
        x, y = 3 * torch.randn(n, 3, dtype=dtype), torch.randint(3, (n,))
        clients.append([*zip(x.split(4), y.split(4), strict=True)] * 2)
    return clients


TAKEN = [len(data) for data in batches()]
SHAPES = [tuple(shape) for shape in network().shapes]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def alone(half: ClientHalf, t: int, downs: Any, states: Any, method: Any) -> list[ClientRound]:
    model = network()
    rounds = []
    for i, data in enumerate(batches(t)):
        solver = SequentialSolver(model, data, F.cross_entropy)
        rounds.append(client_round(half, downs[i], states[i], config(method, t, i), solver))
    return rounds


def config(method: FederatedStrategy, t: int, client: Any) -> LocalConfig:
    bound = method.clip_norm / 8  # some gradients are longer, others are not
    steps: Any = (
        TAKEN[client]
        if isinstance(client, int)
        else torch.tensor(TAKEN, dtype=torch.float64)[:, None]
    )
    return LocalConfig(t, 3, 0.1, 0.05, bound, client, 0, SHAPES, steps=steps)


# --- every method ---------------------------------------------------------------------------------


def rotated() -> list[Any]:
    """Every method with one of the plug-ins that it takes, in turn, and its variants."""
    cases = []
    for n, (_, group) in enumerate(groupby(methods(), lambda case: case.values[0])):
        own = [*group]
        plugged = [case for case in own if "plugins" in case.values[1]]
        cases += [plugged[n % len(plugged)], *own[len(plugged) :]]
    return cases


@pytest.mark.parametrize(("kind", "own"), rotated())
def test_a_cohort_is_each_of_its_clients(
    kind: type[FederatedStrategy], own: dict[str, Any]
) -> None:
    """In a second round, of clients that take 6, 4, 4 and 2 steps, with batches of 4, 3 and 2."""
    method = make(kind, own)
    half, w0 = method.client_half(), network().w.clone()
    s = first_state(method, w0, N)
    downs = [broadcast(method, s, i) for i in range(N)]
    states = [half.init(down.w, w0, config(method, 0, i)) for i, down in enumerate(downs)]
    results = alone(half, 0, downs, states, method)
    replies = []
    for i, one in enumerate(results):
        decoded = half.decode(one.up, None, w0.to("meta"))
        replies.append(Reply(i, decoded.up, int(one.result.steps), SIZES[i], decoded.w_i0))
    s = server_round(method, half, s, replies).state
    downs, states = [broadcast(method, s, i) for i in range(N)], [one.state for one in results]
    expected = alone(half, 1, downs, states, method)

    down, state = stack(downs), stack(states)
    before = [v.clone() for _, v in (*leaves(down), *leaves(state))]
    solver = CohortSolver(network(), stacked(batches(1)), F.cross_entropy)
    together = client_round(half, down, state, config(method, 1, tuple(range(N))), solver)
    for i, one in enumerate(expected):
        same(row(together.up, i), one.up)
        same(row(together.state, i), one.state)
        close(together.result.w_K[i], one.result.w_K)
        close(together.result.loss[i], one.result.loss)
        assert together.result.steps[i].tolist() == [one.result.steps]
    after = [v for _, v in (*leaves(down), *leaves(state))]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def same(values: Any, expected: Any) -> None:
    a, b = dict(leaves(values)), dict(leaves(expected))
    assert a.keys() == b.keys()
    for name in a:
        close(a[name], b[name])


# --- one rule, other models, losses and batches ---------------------------------------------------


def cohort(
    model: FlatModel, data: Sequence[Sequence[Batch]], loss: Loss = F.cross_entropy, **more: Any
) -> Solution:
    """Steps of FedAvg's rule from the model's w."""
    n = len(data)
    settings = LocalConfig(0, 1, 0.1, 0.01, 0.0, tuple(range(n)), 0, model.shapes)
    hook = GradientHook(ClientHalf(LocalRule()), None, Stateless(), settings)
    solver = CohortSolver(model, stacked(data), loss, **more)
    return solver(model.w.expand(n, -1), Direction(), hook)


def compare(
    model: FlatModel,
    data: Sequence[Sequence[Batch]],
    loss: Loss = F.cross_entropy,
    tolerance: float = 1e-10,
    precision: str = "float32",
) -> None:
    together, w = cohort(model, data, loss, precision=precision), model.w.clone()
    assert together.w_K.shape == (len(data), len(w))
    for i, mine in enumerate(data):
        settings = LocalConfig(0, 1, 0.1, 0.01, 0.0, i, 0, model.shapes)
        hook = GradientHook(ClientHalf(LocalRule()), None, Stateless(), settings)
        one = SequentialSolver(model, mine, loss, precision)(w, Direction(), hook)
        close(together.w_K[i], one.w_K, tolerance)
        close(together.loss[i], one.loss, tolerance)
        assert together.steps[i].item() == one.steps


def test_float32_agrees_to_1e_5() -> None:
    compare(network(dtype=torch.float32), batches(dtype=torch.float32), tolerance=1e-5)


def sum_of_squares(predictions: Tensor, targets: Tensor) -> Tensor:
    return 0.01 * (predictions - F.one_hot(targets, 3)).square().sum()


@pytest.mark.parametrize(
    "loss", [sum_of_squares, nn.CrossEntropyLoss(label_smoothing=0.1)], ids=["sum", "smoothed"]
)
def test_a_loss_of_the_callers_sees_each_clients_batch_alone(loss: Loss) -> None:
    compare(network(), batches(), loss)


def test_regression_targets() -> None:
    data = [[(x, x.sum(1, keepdim=True)) for x, _ in client] for client in batches()]
    compare(network(), data, F.mse_loss)


def test_class_probabilities_are_no_classes_to_be_masked() -> None:
    data = [[(x, F.one_hot(y, 3).to(x) * 0.9) for x, y in client] for client in batches()]
    compare(network(), data)


def test_targets_that_cross_entropy_ignores_do_not_count() -> None:
    data = batches()
    for client in data:
        client[0][1][0] = IGNORED
    compare(network(), data)


def test_a_model_that_looks_at_the_whole_batch_gets_no_filled_batches() -> None:
    compare(network(nn.BatchNorm1d(3, track_running_stats=False)), [c[:2] for c in batches()])


class Centred(nn.Module):
    """Looks at its whole batch, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


def test_a_model_that_looks_at_the_batch_in_training_gets_no_filled_batches() -> None:
    compare(network(Centred()), [c[:2] for c in batches()])


@pytest.mark.parametrize("on", ["parameter", "module"])
def test_a_model_with_hooks_of_its_backward_pass_takes_no_stack(on: str) -> None:
    model = network()
    if on == "module":
        model.module[0].register_full_backward_hook(lambda *_: None)
    else:
        model.module[0].weight.register_hook(lambda g: 0 * g)
    with pytest.raises(NotImplementedError, match="without hooks of its backward pass"):
        cohort(model, batches())


def test_convolutions_pools_and_groups() -> None:
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = FlatModel(nn.Sequential(*layers, nn.Linear(16, 3)), dtype=FLOAT64)
    data = [
        [(torch.randn(len(y), 1, 6, 6, dtype=FLOAT64), y) for _, y in client]
        for client in batches()
    ]
    compare(model, data)


def test_bfloat16_is_for_the_forward_pass_only() -> None:
    model, data = network(dtype=torch.float32), batches(dtype=torch.float32)
    exact, rounded = cohort(model, data), cohort(model, data, precision="bfloat16")
    assert rounded.w_K.dtype == torch.float32
    assert not torch.equal(rounded.w_K, exact.w_K)
    compare(model, data, precision="bfloat16", tolerance=0.02)


def test_one_client_is_a_cohort_too() -> None:
    compare(network(), batches()[:1])


def test_the_models_own_vectors_stay_as_they_are() -> None:
    model = network()
    w, g = model.w.clone(), model.g.fill_(7.0).clone()
    model.module.eval()
    cohort(model, [client[:1] for client in batches()[:3]])
    assert model.module.training
    cohort(model, batches())
    assert model.module.training
    assert torch.equal(model.w, w)
    assert torch.equal(model.g, g)


# --- what is refused ------------------------------------------------------------------------------


def test_random_numbers_are_refused_and_none_is_drawn() -> None:
    model, data = network(nn.Dropout(0.5)), batches()
    before = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match=r"got Sequential: .*random.*one at a time"):
        cohort(model, [data[0][:1], data[3][:1]])  # of 4 and 2 samples: predictions are compared
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "python"])
def test_so_are_those_that_only_later_steps_draw(draw: Callable[[], float]) -> None:
    """All clients would have one draw."""
    passes: list[int] = []

    class Later(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(len(passes))
            return super().forward(x) + (draw() if len(passes) > 5 else 0.0)

    with pytest.raises(NotImplementedError, match="without random numbers, got Later, where NumPy"):
        cohort(FlatModel(Later(3, 3), dtype=FLOAT64), batches())
    assert len(passes) == 6


class Halting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.sum() > 0 else 1.0)


def test_a_model_that_branches_on_its_data_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="that many clients can share a call of, got"):
        cohort(FlatModel(Halting(3, 3), dtype=FLOAT64), batches())


def test_clients_out_of_order_are_refused() -> None:
    one = "expected clients in the order of falling numbers of steps"
    with pytest.raises(ValueError, match=one):
        cohort(network(), batches()[::-1])

    class Unordered(CohortSolver):
        def gradients(self, g: Tensor) -> Any:
            first, *_, last = super().gradients(g)
            return iter([first, last, first])

    settings = LocalConfig(0, 1, 0.1, 0.0, 0.0, tuple(range(N)), 0, ())
    hook = GradientHook(ClientHalf(LocalRule()), None, Stateless(), settings)
    solver = Unordered(network(), stacked(batches()), F.cross_entropy)
    with pytest.raises(ValueError, match=one):
        solver(network().w.expand(N, -1), Direction(), hook)


@pytest.mark.parametrize("data", [[[], []], [batches()[0], []]], ids=["all", "one"])
def test_a_client_without_batches_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="expected at least one batch of training data, got none"):
        cohort(network(), data)


def test_what_the_cohorts_above_can_show() -> None:
    """Every step has another gradient, and the clip bounds some of the gradients only."""
    method = S.FedAvg(clip_norm=7.2)
    model, norms = network(), []
    for data in batches(1):
        for x, y in data:
            model.g.zero_()
            F.cross_entropy(model.module(x), y).backward()
            norms.append(float(model.g.norm()))
    assert min(norms) < config(method, 0, 0).clip_norm < max(norms)
