"""`simulate` on batches that a function gives in any form, and on models with state of their own:
the weights of plain steps of PyTorch, one client at a time and many at once."""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

from fedaccord import simulate

SIZES, STEPS, LR, CLASSES = (4, 6, 3), 3, 0.3, 3
PLAIN: dict[str, Any] = {"participation": 1.0, "rounds": 2, "lr": LR, "local_steps": STEPS}
PLAIN |= {"clip_norm": 0.0, "weight_decay": 0.0, "lr_decay": 1.0, "threads": 1}
Forward = Callable[[nn.Module, Any], Tensor]


def averaged(
    module: nn.Module, batches: list[Any], forward: Forward, loss: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """FedAvg's model after the rounds of `PLAIN`, each client with one batch."""
    state = deepcopy(module.state_dict())
    for _ in range(PLAIN["rounds"]):
        local = []
        for batch in batches:
            model = deepcopy(module)
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(STEPS):
                optimizer.zero_grad()
                targets = batch["label"] if isinstance(batch, dict) else batch[-1]
                loss(forward(model, batch), targets).backward()
                optimizer.step()
            local.append(model.state_dict())
        state = {name: torch.stack([one[name] for one in local]).mean(0) for name in state}
    return state


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


class Graphs(nn.Module):
    """Classes of graphs that stand in one union."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.node, self.head = nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = torch.relu(self.node(batch["x"]))
        hidden = hidden.index_add(0, batch["edges"][1], hidden[batch["edges"][0]])
        pooled = hidden.new_zeros(len(batch["label"]), 8).index_add(0, batch["graph"], hidden)
        scores: Tensor = self.head(pooled) * batch["scale"]
        return scores


def graphs(n: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)
    edges = [3 * i + torch.randint(3, (2, 5), generator=g) for i in range(n)]
    return {
        "x": torch.randn(3 * n, 4, generator=g),
        "edges": torch.cat(edges, 1),
        "graph": torch.arange(n).repeat_interleave(3),
        "scale": torch.tensor(2.0),
        "label": torch.randint(CLASSES, (n,), generator=g),
    }


Pair = namedtuple("Pair", "features label")


def named(n: int) -> Pair:
    g = torch.Generator().manual_seed(n)
    return Pair(torch.randn(n, 4, generator=g), torch.randint(CLASSES, (n,), generator=g))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.head = nn.GRU(4, 5), nn.Linear(5, CLASSES)

    def forward(self, sequences: Any) -> Tensor:
        scores: Tensor = self.head(self.recurrent(sequences)[1][0])
        return scores


def packed(n: int) -> Any:
    g = torch.Generator().manual_seed(n)
    lengths = [1 + int(torch.randint(5, (), generator=g)) for _ in range(n)]
    sequences = [torch.randn(length, 4, generator=g) for length in lengths]
    labels = torch.randint(CLASSES, (n,), generator=g)
    return pack_sequence(sequences, enforce_sorted=False), labels


def time_first(n: int) -> Any:
    g = torch.Generator().manual_seed(n)
    return torch.randn(7, n, 4, generator=g), torch.randint(CLASSES, (n,), generator=g)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, CLASSES)


FORMS: dict[str, tuple[Callable[[int], Any], Callable[[], nn.Module], Forward]] = {
    "a union of graphs": (graphs, Graphs, lambda model, batch: model(batch)),
    "named tuples": (named, linear, lambda model, batch: model(batch.features)),
    "packed sequences": (packed, Packed, lambda model, batch: model(batch[0])),
    "time first": (time_first, linear, lambda model, batch: model(batch[0].mean(0))),
}


@pytest.mark.parametrize("algo", ["fedavg", "fedsam"])
@pytest.mark.parametrize("form", FORMS)
def test_a_functions_batches_are_used_as_they_are(form: str, algo: str) -> None:
    make, module, forward = FORMS[form]
    batches = [make(n) for n in SIZES]
    clients = [lambda generator, batch=batch: [batch] for batch in batches]
    if algo == "fedsam":  # two passes over a batch
        simulate(algo, clients=clients, model=module(), forward=forward, **PLAIN)
        return
    history = simulate(algo, clients=clients, model=module(), forward=forward, **PLAIN)
    assert_same(history.model, averaged(module(), batches, forward, F.cross_entropy))
    unlike = PLAIN | {"threads": 0}  # chosen from the first batch
    more = simulate(algo, clients=clients, model=module(), forward=forward, **unlike)
    assert_same(more.model, history.model)


class Dicts(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.pair = named(n)

    def __len__(self) -> int:
        return len(self.pair.label)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input": self.pair.features[i], "label": self.pair.label[i]}


def test_a_forward_may_take_keys_out_of_its_dict() -> None:
    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch.pop("label")
        predictions: Tensor = model(**batch)
        return predictions

    clients = [Dicts(n) for n in SIZES]
    for algo in ("fedavg", "fedsam"):  # the second has two passes over a batch
        history = simulate(algo, clients=clients, model=linear(), forward=forward, **PLAIN)
        assert history.metrics["replies"].iloc[-1] == len(SIZES)


class MaxNorm(nn.Module):
    """Its forward pass changes a weight in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8, max_norm=0.5)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(x).mean(-2))
        return scores


class Anneals(nn.Module):
    """Its temperature falls with each pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, CLASSES)
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes = self.passes + 1
        scores: Tensor = self.head(x) / (1 + self.passes)
        return scores


def unequal(kind: type[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    for n in SIZES:
        x, y = named(n)
        yield (torch.randint(11, (n, 5)) if kind is MaxNorm else x), y


def smoothed(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(predictions, targets, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [F.cross_entropy, smoothed])
@pytest.mark.parametrize("kind", [MaxNorm, Anneals])
def test_many_clients_of_unequal_size_at_once(kind: type[nn.Module], loss: Any) -> None:
    clients = [*unequal(kind)]
    keys: dict[str, Any] = PLAIN | {"batch_size": 0, "loss": loss}
    one, many = (
        simulate("fedavg", clients=clients, model=kind(), vectorize=how, **keys).model
        for how in ("off", "on")
    )
    assert_same(many, one)
    expected = averaged(kind(), clients, lambda model, batch: model(batch[0]), loss)
    assert_same(one, expected)


class Padded(nn.Module):
    def __init__(self, **of_embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8, **of_embedding)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(x).mean(-2))
        return scores


class PaddedByFunction(Padded):
    def forward(self, x: Tensor) -> Tensor:
        rows = F.embedding(x, self.embedding.weight, padding_idx=0)
        scores: Tensor = self.head(rows.mean(-2))
        return scores


@pytest.mark.parametrize("sizes", [(4, 4, 4), SIZES])
@pytest.mark.parametrize(
    "make",
    [partial(Padded, padding_idx=0), partial(Padded, scale_grad_by_freq=True), PaddedByFunction],
    ids=["padding", "by frequency", "padding of a function"],
)
def test_rows_of_an_embedding_that_have_another_gradient(
    make: Callable[[], nn.Module], sizes: tuple[int, ...]
) -> None:
    clients = []
    for n in sizes:
        words = torch.randint(1, 11, (n, 5), generator=torch.Generator().manual_seed(n))
        words[:, 3:] = 0
        clients.append((words, words[:, 0] % CLASSES))
    keys: dict[str, Any] = PLAIN | {"batch_size": 0}
    one, many = (
        simulate("fedavg", clients=clients, model=make(), vectorize=how, **keys).model
        for how in ("off", "on")
    )
    assert_same(many, one)
    row, first = one["embedding.weight"][0], make().state_dict()["embedding.weight"][0]
    assert torch.equal(row, first) == ("scale" not in str(make))


def test_classes_without_an_output_are_not_counted_by_metrics() -> None:
    """As 255 of void pixels, which a loss of one's own ignores."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 4, generator=g), torch.randint(CLASSES, (40,), generator=g)
    void = torch.where(torch.rand(40, generator=g) < 0.4, 255, y)
    counted = void != 255
    scores = []
    for targets, rows in ((void, slice(None)), (y, counted)):
        history = simulate(
            "fedavg",
            clients=[(x, y)],
            test=(x[rows], targets[rows]),
            model=linear(),
            loss=nn.CrossEntropyLoss(ignore_index=255),
            metrics="accuracy, top-5-accuracy, f1, perplexity",
            **PLAIN,
        )
        names = ("accuracy", "top-5-accuracy", "f1", "perplexity")
        scores.append([float(history.metrics[f"test-{name}"].iloc[-1]) for name in names])
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)
