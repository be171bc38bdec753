"""Low-rank adapters: what is averaged, and what is sent and stored."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaccord import simulate
from fedaccord.core.vectors import leaves
from tests.lora import LoRA

WIDTH, OUT, RANK = 40, 30, 2
CLIENTS = [
    (torch.randn(12, WIDTH, generator=g).double(), torch.randn(12, OUT, generator=g).double())
    for g in (torch.Generator().manual_seed(i) for i in range(3))
]
SETTINGS: dict[str, Any] = {
    "rounds": 1,
    "local_steps": 4,
    "batch_size": 0,
    "lr": 0.05,
    "loss": "mean-squared-error",
    "dtype": torch.float64,
    "optimizer": "adamw",
}


def adapter(freeze_A: bool = False) -> LoRA:
    torch.manual_seed(0)
    return LoRA(nn.Linear(WIDTH, OUT).double(), RANK, freeze_A)


def merged(tensors: dict[str, Tensor], like: LoRA) -> Tensor:
    """B A."""
    return tensors["B"] @ tensors.get("A", like.A.detach())


@pytest.mark.parametrize(("freeze_A", "names"), [(True, ""), (False, "A"), (False, "")])
def test_the_mean_of_adapters_is_that_of_products_if_A_is_frozen(
    freeze_A: bool, names: str
) -> None:
    """By the model itself, or by its name."""
    model, keys = adapter(freeze_A), SETTINGS | {"frozen_parameters": names, "participation": 1.0}
    freeze_A = freeze_A or bool(names)

    def trained(clients: Any) -> dict[str, Tensor]:
        return simulate("fedavg", clients=clients, model=model, **keys).model

    alone = [trained([client]) for client in CLIENTS]
    together = trained(CLIENTS)
    for name, value in together.items():  # exact on (A, B) in any case
        mean = torch.stack([one[name] for one in alone]).mean(0)
        assert torch.allclose(value, mean, atol=1e-12, rtol=0)
    mean = torch.stack([merged(one, model) for one in alone]).mean(0)
    error = float((merged(together, model) - mean).abs().max())
    assert float(mean.abs().max()) > 0.1
    assert error <= 1e-12 if freeze_A else error > 1e-3


@pytest.mark.parametrize("freeze_A", [True, False])
def test_messages_and_client_states_are_of_the_adapters_size(freeze_A: bool) -> None:
    size = OUT * RANK + (0 if freeze_A else RANK * WIDTH)
    settings = {**SETTINGS, "rounds": 2, "optimizer_state": "keep", "participation": 1.0}
    history = simulate("scaffold", clients=CLIENTS, model=adapter(freeze_A), **settings)
    assert sum(tensor.numel() for tensor in history.model.values()) == size
    vectors = [v for state in history.clients for _, v in leaves(state) if v is not None]
    # of each client a control variate, AdamW's two moments and the number of its steps
    assert sum(v.numel() for v in vectors) == len(CLIENTS) * (3 * size + 1)
    # w and a control variate each way, in float64
    for key in ("up-bytes", "down-bytes"):
        assert history.metrics[key].dropna().tolist() == [len(CLIENTS) * 2 * size * 8] * 2
    assert {v.dtype for v in vectors if v.numel() > 1} == {torch.float64}
