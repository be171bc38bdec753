"""The vectors (d,) that a visit holds, counted in the events of PyTorch's allocator."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn import functional as F

from fedaccord.client.train import Data, local_round
from fedaccord.core.client_half import ClientHalf
from fedaccord.core.request import TrainInstruction, TrainRequest
from fedaccord.strategies.scaffold import ClientState, Down, ScaffoldClient
from fedaccord.task import flat_model
from fedaccord.task.evaluation import evaluate
from fedaccord.task.flat_model import FlatModel

WIDTH, LAYERS = 64, 8  # no activation and no layer's gradient is a fifth of a vector
D = LAYERS * WIDTH * (WIDTH + 1)
HALF = ClientHalf(ScaffoldClient())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def squares(predictions: Tensor, targets: Tensor) -> Tensor:
    """A loss of which the package knows no gradients: autograd computes them."""
    return F.mse_loss(predictions, F.one_hot(targets, WIDTH).to(predictions))


def batches(n: int = 3) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(2, WIDTH), torch.randint(WIDTH, (2,))) for _ in range(n)]


def request(model: FlatModel) -> TrainRequest:
    instruction = TrainInstruction(
        *(0, 3, HALF, tuple(map(tuple, model.shapes)), 0.1, 0.01, 10.0),
        **{"local_epochs": 1, "local_steps": 0, "batch_size": 0, "seed": 0},
        **{"precision": "float32", "client": 0, "accepted": -1},
    )
    torch.manual_seed(2)
    return TrainRequest(instruction, Down(model.w.clone(), 0.01 * torch.randn(D)), None, None)


def peak(loss: Any) -> float:
    """The most vectors at once in a visit that begins with a state: those of the model, which are
    w and its gradient, and what beside them is received, remembered, computed and returned."""
    with profile(profile_memory=True) as trace:  # all of it: what was there before shows no end
        model = FlatModel(network())
        one, state = request(model), ClientState(torch.zeros(D))
        local_round(one, state, Data(model, batches(), loss))
    events = sorted(trace.kineto_results.events(), key=lambda event: event.start_ns())
    most = now = 0
    for event in events:
        if event.name() == "[memory]":
            most = max(most, now := now + event.nbytes())
    return most / (4 * D)


@pytest.mark.parametrize("loss", [squares, F.cross_entropy], ids=["autograd", "own gradients"])
def test_a_scaffold_visit_holds_four_vectors_beside_a_large_model(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w^t, c, c_i and c - c_i in the steps; then w^t, c, c_i, dc_i and c_i+ without a gradient."""
    assert peak(loss) > 7.9  # a small one is copied, and keeps its memory
    monkeypatch.setattr(flat_model, "LARGE_MODEL_BYTES", 0)
    assert 6 <= peak(loss) < 6.3


def test_a_large_model_gives_the_same_replies_and_keeps_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def visits() -> list[Any]:
        """Two with one model, evaluated after each, as in a simulation."""
        model, vectors = FlatModel(network()), list[Any]()
        one, state = request(model), ClientState(torch.zeros(D))
        for _ in range(2):
            reply, state = local_round(one, state, Data(model, batches(), squares))
            vectors.append((*reply.up, *state))
            vectors.append([vector.clone() for vector in vectors[-1]])
            evaluate(model, torch.ones(D), batches(1), F.cross_entropy)
        return vectors

    expected = visits()
    monkeypatch.setattr(flat_model, "LARGE_MODEL_BYTES", 0)
    for one, other in zip(visits(), expected, strict=True):
        assert all(map(torch.equal, one, other))
