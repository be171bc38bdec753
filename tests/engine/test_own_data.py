"""`simulate` on Datasets, functions that give batches, dicts and tokens: the weights of tensors."""

import logging
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedaccord import simulate
from fedaccord.config import RunConfig
from fedaccord.core.vectors import leaves
from fedaccord.engine import History, quiet, run
from fedaccord.strategies import Scaffold
from tests import own

SIZES = (7, 12, 5, 9)
WORDS, LENGTH, CLASSES = 11, 6, 3
STEPS: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "batch_size": 4, "lr": 0.5}
Samples = tuple[Tensor, Tensor]


def tokens(n: int, seed: int) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (n, LENGTH), generator=generator)
    return x, x.sum(1) % CLASSES


CLIENTS = [tokens(n, i) for i, n in enumerate(SIZES)]
TEST = tokens(30, 99)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.int64
        scores: Tensor = self.head(self.embedding(x).mean(-2))
        return scores


class Rows(Dataset[Any]):
    """Rows as dicts."""

    def __init__(self, samples: Samples) -> None:
        self.x, self.y = samples

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"ids": self.x[i], "name": f"row {i}", "topic": int(self.y[i])}


class Noisy(TensorDataset):
    """Its transform draws from the generators of PyTorch, NumPy and Python."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        shift = int(np.random.randint(len(x))) + random.randrange(len(x))
        return x[(torch.randperm(len(x))[:3] * 7 + shift) % len(x)], y


def drawn() -> float:
    """From 0 to 3, from all default generators."""
    return float(np.random.rand() + torch.rand(())) + random.random()


class NoisyWords(Words):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * drawn()


def noisy_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(predictions, targets) * drawn()


MODEL = Words()


def shuffled(samples: Samples) -> Any:
    def batches(generator: torch.Generator) -> Iterator[Samples]:
        order = torch.randperm(len(samples[1]), generator=generator)
        for rows in torch.split(order, 4):
            yield samples[0][rows], samples[1][rows]

    return batches


def noisy(samples: Samples) -> Any:
    def batches(generator: torch.Generator) -> Iterator[Samples]:
        shift = int(3 * drawn())  # its first part runs with the first batch
        for rows in torch.arange(len(samples[1])).split(4):
            yield (samples[0][rows] + int(9 * drawn()) + shift) % WORDS, samples[1][rows]

    return batches


def history(clients: Any, algo: str = "scaffold", **changes: Any) -> History:
    arguments = {"test": TEST, "model": MODEL, "record": "weights", **STEPS, **changes}
    if isinstance(clients, list) and all(map(callable, clients)):
        del arguments["batch_size"]
    return simulate(algo, clients=clients, **arguments)


def weights(clients: Any, *args: Any, **changes: Any) -> Tensor:
    vectors = history(clients, *args, **changes).weights
    assert vectors is not None
    return vectors


def ids(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores: Tensor = model(batch["ids"])
    return scores


AS_TENSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Datasets": ([TensorDataset(*c) for c in CLIENTS], {}),
    "some of each": ([CLIENTS[0], *(TensorDataset(*c) for c in CLIENTS[1:])], {}),
    "functions": ([shuffled(c) for c in CLIENTS], {}),
    "dicts": ([Rows(c) for c in CLIENTS], {"forward": ids, "targets": "topic"}),
    "a Dataset to test": (CLIENTS, {"test": TensorDataset(*TEST)}),
}


@pytest.mark.parametrize("name", AS_TENSORS)
def test_other_forms_give_the_weights_of_tensors(name: str) -> None:
    clients, changes = AS_TENSORS[name]
    if "forward" in changes:
        changes = {**changes, "test": Rows(TEST)}
    one, other = history(CLIENTS, eval_train=True), history(clients, eval_train=True, **changes)
    assert torch.equal(one.weights, other.weights)
    for column in ("test-loss", "test-accuracy", "train-accuracy"):
        assert one.metrics[column].to_list() == pytest.approx(other.metrics[column].to_list())


@pytest.mark.parametrize("clients", [CLIENTS, [TensorDataset(*c) for c in CLIENTS]])
def test_token_ids_in_one_call_of_many_clients(
    clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedaccord.task.cohort_solver import CohortSolver

    calls: list[Any] = []
    gradient = CohortSolver.gradient

    def counting(self: CohortSolver, *args: Any) -> Tensor:
        calls.append(args)
        return gradient(self, *args)

    monkeypatch.setattr(CohortSolver, "gradient", counting)
    together = weights(clients, vectorize="on", dtype=torch.float64)
    assert calls
    assert torch.allclose(together, weights(CLIENTS, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("vectorize", ["on", "auto"])
def test_batches_of_a_function_are_taken_one_client_at_a_time(vectorize: str) -> None:
    clients = [shuffled(c) for c in CLIENTS]
    assert torch.equal(weights(clients, vectorize=vectorize), weights(CLIENTS))


NOISY: dict[str, tuple[Any, dict[str, Any]]] = {
    "a transform": ([Noisy(*c) for c in CLIENTS], {}),
    "a function of batches": ([noisy(c) for c in CLIENTS], {}),
    "a model": (CLIENTS, {"model": NoisyWords()}),
    "a loss": (CLIENTS, {"loss": noisy_loss}),
}


@pytest.mark.parametrize("name", NOISY)
def test_random_numbers_are_a_function_of_seed_round_and_client(name: str) -> None:
    clients, noise = NOISY[name]
    for seed_of in (torch.manual_seed, np.random.seed, random.seed):
        seed_of(1)
    one = weights(clients, **noise)
    for seed_of in (torch.manual_seed, np.random.seed, random.seed):
        seed_of(2)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(weights(clients, **noise), one)
    after = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]
    assert not torch.equal(weights(clients, **noise, seed=3), one)
    assert not torch.equal(weights(CLIENTS), one)
    assert torch.allclose(weights(clients, **noise, vectorize="on"), one, atol=1e-5)


def test_transforms_draw_other_numbers_in_every_batch() -> None:
    numbers = []

    class Noting(TensorDataset):
        def __getitem__(self, i: int) -> Any:
            if torch.initial_seed():  # else a look at the samples before round 1
                numbers.append(torch.rand(()).item())
            return super().__getitem__(i)

    weights([Noting(*c) for c in CLIENTS], rounds=1, local_epochs=2)
    assert len({*numbers}) == len(numbers) >= sum(SIZES)


def test_a_data_loader_that_a_function_makes() -> None:
    def loader(samples: Samples) -> Any:
        data = TensorDataset(*samples)
        return lambda g: DataLoader(data, batch_size=4, shuffle=True, generator=g)

    clients = [loader(c) for c in CLIENTS]
    one = weights(clients)
    assert torch.equal(weights(clients), one)
    assert not torch.equal(weights(clients, seed=3), one)


def test_floating_inputs_follow_the_dtype_and_others_do_not() -> None:
    dtypes: set[torch.dtype] = set()

    def forward(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, scale, y = batch
        dtypes.update({x.dtype, scale.dtype, y.dtype})
        scores: Tensor = model(x) * scale
        return scores

    clients = [TensorDataset(x, torch.ones(len(y), 1), y) for x, y in CLIENTS]
    exact = weights(clients, forward=forward, test=None, dtype=torch.float64)
    assert dtypes == {torch.int64, torch.float64}
    assert torch.equal(exact, weights(CLIENTS, dtype=torch.float64))


class ByClient:
    num_partitions = len(SIZES)

    def load_partition(self, partition_id: int) -> own.Rows:
        x, y = CLIENTS[partition_id]
        return own.Rows(ids=[*x], label=[*y])


def by_client() -> Any:
    return {"train": ByClient(), "test": TEST, "classes": CLASSES, "vocabulary": WORDS}


FORMS = {"Datasets": TensorDataset, "functions": lambda x, y: shuffled((x, y))}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_resumes_from_the_checkpoint_of_a_run_to_the_bit(form: Any, tmp_path: Path) -> None:
    """The run has the same samples from a partitioner."""
    steps = {"local_epochs": 2, "batch_size": 4, "lr": 0.5}
    method = Scaffold(**steps, optimizer="adamw", optimizer_state="keep")
    config = {"dataset": f"{__name__}:by_client", "partition": "natural"}
    config |= {"model": f"{__name__}:Words", "num-clients": len(SIZES), "num-server-rounds": 2}
    with quiet():
        path = run(RunConfig.make(config | {"out-dir": str(tmp_path)}, method)).path
    clients = [form(*c) for c in CLIENTS]
    arguments: dict[str, Any] = {"clients": clients, "model": MODEL, "test": TEST, "rounds": 4}
    whole, rest = simulate(method, **arguments), simulate(method, **arguments, resume=path)
    assert rest.metrics["round"].tolist() == [3, 4]
    assert all(torch.equal(rest.model[name], tensor) for name, tensor in whole.model.items())
    assert any(next(leaves(state), None) for state in rest.clients)
    for one, other in zip(whole.clients, rest.clients, strict=True):
        pairs = zip(leaves(one), leaves(other), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    with pytest.raises(
        ValueError, match=r"^resume: expected lr=0\.5, as at the run's start, got 0"
    ):
        simulate(replace(method, lr=0.1), **arguments, resume=path)


def test_a_batch_size_beside_functions_alone_has_no_effect_and_is_refused() -> None:
    def counted(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        raise AssertionError("its samples were counted")

    with pytest.raises(TypeError, match=r"^batch-size: expected it without functions as clients"):
        simulate("fedavg", clients=[counted] * 2, model=MODEL, batch_size=4)
    functions = [shuffled(c) for c in CLIENTS]
    assert torch.equal(weights([*functions[:2], *CLIENTS[2:]]), weights(CLIENTS))


@pytest.mark.flower
@pytest.mark.slow  # it starts Ray
def test_workers_read_the_same_batches() -> None:
    for clients in ([Noisy(*c) for c in CLIENTS], [shuffled(c) for c in CLIENTS]):
        assert torch.equal(weights(clients, workers=2, rounds=2), weights(clients, rounds=2))


def test_losses_by_name_and_metrics() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    metrics = simulate(
        "fedavg",
        clients=iter([(x, y), (x, y)]),
        test=TensorDataset(x, y),
        model=nn.Linear(3, 1),
        loss="mean-squared-error",
        metrics="mae",
        rounds=1,
    ).metrics
    assert {"test-loss", "test-mae"} <= {*metrics}
    named = history(CLIENTS, loss="cross-entropy", metrics="f1, accuracy")
    assert torch.equal(named.weights, weights(CLIENTS))
    assert {"test-f1", "test-accuracy"} <= {*named.metrics}


ROWS = [Rows(c) for c in CLIENTS]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([3], {}, r"clients: client 0: expected .* a torch Dataset, or a function .* int"),
    ([CLIENTS[0][0]], {}, "clients: client 0: expected tensors .* got Tensor"),
    ([{"x": 1, "y": 2}], {}, "clients: client 0: expected tensors .* got dict"),
    ("ab", {}, "clients: expected a list of the samples of each client, got str"),
    ([(torch.tensor(1.0), torch.tensor(1))], {}, "client 0: expected equally many inputs"),
    (
        [CLIENTS[0], (1, 2, 3)],
        {},
        r"client 1: expected .* TensorDataset\(a, b, y\), got a tuple of 3",
    ),
    ([CLIENTS[0], lambda g: []], {}, "client 1: expected at least one sample, got none"),
    ([lambda g: [3]], {}, r"client 0: batch: expected \(inputs, targets\) or a dict, got a int"),
    (ROWS, {}, "expected the targets under 'label', got a dict of 'ids', 'name', 'topic'; give "),
    (ROWS, {"targets": "topic"}, "expected .* of 'img' and 'topic', got .* give forward="),
    (ROWS, {"targets": "name", "forward": ids}, "expected targets .* in a tensor, got a list"),
    (CLIENTS, {"loss": "cross-entropi"}, "loss: expected one of auto, .* .did you mean"),
    (CLIENTS, {"metrics": "mae"}, "metrics: expected names among accuracy"),
    (CLIENTS, {"forward": lambda m, b: {"logits": m(b[0])}}, "expected predictions in a tensor"),
    (ROWS, {"model": "mlp", "forward": ids, "targets": "topic"}, "model: expected a module, as"),
]


def used_up(g: torch.Generator) -> Any:
    return ONCE


def no_parameter() -> Any:
    return [CLIENTS[0]]


class Broken(Rows):
    def __getitem__(self, i: int) -> dict[str, Any]:
        raise OSError(f"no file {i}\nat all")


class Ragged(Rows):
    def __getitem__(self, i: int) -> Any:
        return torch.ones(i + 1), 0


class Lists(Rows):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"label": 1, "img": [[0.0, 1.0], [1.0, 0.0]]}


ONCE = iter([CLIENTS[0]])
X, Y = CLIENTS[1]
with torch.inference_mode():
    FEATURES = X.clone()
REFUSED += [
    ([CLIENTS[0], (FEATURES, Y)], {}, "^clients: client 1: .* made under torch.inference_mode"),
    (CLIENTS, {"test": (FEATURES, Y)}, "^test: .* made under torch.inference_mode"),
    ([CLIENTS[0], (X.to_sparse(), Y)], {}, "^clients: client 1: expected dense tensors, got a sp"),
    ([CLIENTS[0], lambda g: None], {}, "^clients: client 1: expected .* that returns NoneType; "),
    ([CLIENTS[0], lambda g: 3], {}, "^clients: client 1: expected .* that returns int; return or"),
    ([CLIENTS[0], used_up], {}, "^clients: client 1: expected 7 samples in every pass, .* got 0;"),
    ([CLIENTS[0], no_parameter], {}, "^clients: client 1: expected .* fails: TypeError: no_param"),
    ([CLIENTS[0], lambda g: 1 / 0], {}, "^clients: client 1: expected .* ZeroDivisionError: .* at"),
    ([CLIENTS[0], Broken(CLIENTS[1])], {}, "^clients: client 1: expected .* OSError: no file 0 at"),
    (CLIENTS, {"test": Broken(CLIENTS[1])}, "^test: expected .* OSError: no file 0 at all at /"),
    (
        [Ragged(CLIENTS[1])],
        {},
        r"^expected a Dataset .* one form .* \(RuntimeError: .* pad",
    ),
    ([DataLoader(TensorDataset(X, Y))], {}, "^clients: .* DataLoader; .* lambda generator: loader"),
    ([(pd.DataFrame(X.numpy()), Y)], {}, r"^clients: .* torch.as_tensor\(table.to_numpy\(\)\)$"),
    (3, {}, "^clients: expected a list of the samples of each client, got int; "),
    (CLIENTS, {"model": nn.LazyLinear(3)}, "^model: expected parameters with values, LazyLinear"),
    ([CLIENTS[0], (X, Y - 1)], {}, "^clients: client 1: expected labels from 0 on, got -1; number"),
    ([TensorDataset(x, y - 3) for x, y in CLIENTS], {}, "^clients: client 0: expected labels"),
    (CLIENTS, {"test": (TEST[0], TEST[1] - 1)}, "^test: expected labels from 0 on, got -1; number"),
    (
        [Lists(CLIENTS[0])],
        {"model": nn.Linear(4, 2)},
        "^model: .* .of lists. make them tensors, as .*with_f",
    ),
]


def test_a_call_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match=r"^simulate: .*inference_mode"):
        history(CLIENTS)


@pytest.mark.parametrize(("clients", "changes", "message"), REFUSED)
def test_refused_in_one_line(clients: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        history(clients, **{"test": None, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [1, -1])
def test_a_pass_of_another_number_of_samples_does_not_count(
    change: int, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = tokens(20, 0)
    passes: list[int] = []

    def growing(g: torch.Generator) -> Any:
        passes.append(1)
        n = 10 + change * (len(passes) > 3)
        return zip(x[:n].split(4), y[:n].split(4), strict=True)

    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        row = history([CLIENTS[0], growing], rounds=1, participation=1.0).metrics.iloc[-1]
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert (row["replies"], row["dropped"]) == (1, 1)
    number = "at least 11" if change > 0 else "9"
    assert (
        f"expected 10 samples in every pass, as in the one that was counted, got {number}; give"
        in (caplog.text)
    )


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("form", [lambda *s: s, TensorDataset, lambda *s: shuffled(s)])
def test_labels_of_any_integer_type(kind: torch.dtype, form: Any) -> None:
    clients = [form(x, y.to(kind)) for x, y in CLIENTS]
    assert torch.equal(weights(clients, test=(TEST[0], TEST[1].to(kind))), weights(CLIENTS))


def test_labels_that_are_true_or_false() -> None:
    clients = [(x, y > 0) for x, y in CLIENTS]
    assert torch.equal(weights(clients), weights([(x, y.long()) for x, y in clients]))


def test_a_label_that_cross_entropy_ignores() -> None:
    masked = [(x, y.masked_fill(torch.arange(len(y)) == 1, -100)) for x, y in CLIENTS]
    assert not torch.equal(weights(masked), weights(CLIENTS))


def test_labels_below_zero_are_for_the_loss_to_read() -> None:
    clients = [(x, 2 * (y > 0) - 1) for x, y in CLIENTS]
    weights(clients, test=None, loss=lambda p, y: (p[:, 0] - y).square().mean())


@pytest.mark.parametrize(("name", "ids"), [("transformer", WORDS), ("tests.own:bag_of_tokens", 12)])
def test_a_model_by_name_of_the_tokens_that_occur(name: str, ids: int) -> None:
    last = [(torch.full_like(TEST[0], WORDS), TEST[1])] if ids > WORDS else []
    tensors = history([*CLIENTS, *last], model=name, rounds=1, local_epochs=1).model
    assert ids in {len(tensor) for tensor in tensors.values()}


SMALL_INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32]


@pytest.mark.parametrize("dtype", SMALL_INTEGERS)
def test_tokens_of_any_integers_are_those_of_64_bits(dtype: torch.dtype) -> None:
    def small(x: torch.Tensor, y: torch.Tensor) -> Samples:
        return x.to(dtype), y

    clients, test = [small(*each) for each in CLIENTS], small(*TEST)
    keys: dict[str, Any] = {"model": "transformer", "rounds": 1, "local_epochs": 1}
    for tests in ((TEST, test), ([TEST] * len(CLIENTS), [test] * len(CLIENTS))):
        evaluation = "clients" if isinstance(tests[0], list) else "server"
        first, second = (
            history(samples, test=part, evaluation=evaluation, **keys)
            for samples, part in zip((CLIENTS, clients), tests, strict=True)
        )
        assert all(torch.equal(first.model[name], second.model[name]) for name in first.model)


@pytest.mark.parametrize("dtype", SMALL_INTEGERS)
def test_a_module_gets_the_integers_that_it_was_given(dtype: torch.dtype) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == dtype
            return super().forward(x.float() / torch.iinfo(x.dtype).max)

    x, y = torch.ones(6, 4).to(dtype), torch.arange(6) % 2
    history([(x, y)], test=(x, y), model=Scaled(4, 2), rounds=1)


def test_token_ids_below_zero_are_refused() -> None:
    x, y = CLIENTS[0]
    with pytest.raises(ValueError, match=r"^model: expected token ids from 0 on .*, got -1$"):
        history([(x.where(x > 0, -1), y)], model="transformer", rounds=1)


def test_a_model_by_name_predicts_as_many_numbers_as_there_are() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 2)
    tensors = simulate(
        "fedavg", clients=[(x, y)], test=(x, y), model="linear", loss="mean-squared-error", rounds=1
    ).model
    assert [tuple(tensor.shape) for tensor in tensors.values()] == [(2, 3), (2,)]


@pytest.mark.parametrize("evaluation", ["clients", "both"])
def test_clients_that_evaluate_need_test_samples(evaluation: str) -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    line = (
        rf"^test: expected samples, as evaluation={evaluation}, got none; give test=\(x, y\), or "
    )
    with pytest.raises(ValueError, match=line):
        simulate("fedavg", clients=[(x, y)], model=nn.Linear(4, 3), evaluation=evaluation)


@pytest.mark.parametrize("test", [None, shuffled(TEST)], ids=["none", "function"])
def test_clients_that_never_evaluate_need_no_test_samples(test: Any) -> None:
    result = history(CLIENTS, test=test, evaluation="clients", fraction_evaluate=0)
    assert math.isfinite(result.metrics["train-loss"].iloc[-1])


def test_test_labels_that_the_model_has_no_output_for_are_refused() -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(ValueError, match=r"^test: expected labels below 3, the model's .* got 7$"):
        simulate("fedavg", clients=[(x, y)], model=nn.Linear(4, 3), rounds=1, test=(x, y + 5))


def test_a_client_s_label_or_input_that_cannot_be_trained_on_is_refused_before_a_round() -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])

    def refused(line: str, *second: Any, **more: Any) -> None:
        rounds: list[Any] = []
        with pytest.raises(ValueError, match=line):
            simulate(
                "fedavg",
                clients=[(x, y if len(y.shape) == second[1].ndim else second[1]), second],
                model=nn.Linear(4, more.pop("outputs", 3)),
                rounds=1,
                on_round=rounds.append,
                **more,
            )
        assert not rounds

    refused("^clients: client 1: expected labels below 3, the model's outputs, got 4$", x, y + 2)
    line = "^test of client 1: expected labels below 3, the model's outputs, got 4$"
    refused(line, x, y, test=[(x, y), (x, y + 2)])
    line = "^test of client 1: expected labels from 0 on, got -3; number the classes"
    refused(line, x, y, test=[(x, y), (x, y - 3)])
    refused("^clients: client 1: expected finite inputs, got nan or inf$", x / 0, y)
    refused("^clients: client 1: expected finite targets, got nan or inf$", x, y / 0)
    numbers = torch.rand(6, 1)
    line = r"^model: expected two or more outputs with loss=cross-entropy, .* \(2, 1\): use \(n, "
    refused(line, x, numbers, outputs=1, loss="cross-entropy")
    holes = TensorDataset(x / 0, y)
    line = "^clients: client 0: expected finite inputs, got nan or inf$"
    with pytest.raises(ValueError, match=line):
        simulate("fedavg", clients=[holes], model=nn.Linear(4, 3), rounds=1)
    for form in (TensorDataset, lambda *parts: parts):  # what is NaN is left out by this loss
        targets = numbers.clone()
        targets[0] = torch.nan
        result = simulate(
            "fedavg", clients=[form(x, targets)], model=nn.Linear(4, 1), loss=own.of_known, rounds=1
        )
        assert math.isfinite(result.metrics["train-loss"].iloc[-1])


class OneInARow(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).flatten()


def test_a_model_that_cross_entropy_or_a_copy_does_not_fit_is_refused() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 2
    line = r"^model: expected two or more outputs with loss=cross-entropy, got predictions \(2,\):"
    with pytest.raises(ValueError, match=line):
        simulate(
            "fedavg",
            model=OneInARow(4, 1),
            clients=[(x, y.float())],
            loss="cross-entropy",
            rounds=1,
        )
    model = nn.Linear(4, 2)
    model.computed = model.weight * 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^model: expected a module that can be copied, Linear"):
        simulate("fedavg", model=model, clients=[(x, y)], rounds=1)


class InPlace(nn.Module):
    def __init__(self, only_in_training: bool = False) -> None:
        super().__init__()
        self.layer, self.only_in_training = nn.Linear(4, 3), only_in_training

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self.only_in_training:
            x -= 1
        return self.layer(x)


class Grows(nn.Module):
    """It makes a layer in its first forward pass, with random numbers of that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        if self.head is None:
            self.head = nn.Linear(h.shape[1], 3)
        return self.head(h)


def test_torchscript_is_refused() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    with pytest.raises(ValueError, match=r"^model: expected a module in Python, got TorchScript"):
        simulate("fedavg", clients=[(x, y)] * 2, model=torch.jit.script(nn.Linear(4, 3)), rounds=1)


def test_a_model_that_normalises_over_its_batch_chooses_its_threads() -> None:
    """They are counted with one sample, of which there is no deviation."""
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(norm, nn.Linear(4, 3))
    history = simulate("fedavg", clients=[(x, y)] * 2, model=model, rounds=1, batch_size=3)
    assert history.metrics["train-loss"].iloc[-1] > 0


def test_a_model_that_grows_is_refused() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    line = (
        r"^model: expected all parameters before the first forward pass, which makes head\.weight"
    )
    with pytest.raises(ValueError, match=line):
        simulate("fedavg", clients=[(x, y)] * 2, model=Grows(), rounds=1)


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
@pytest.mark.parametrize("form", [lambda *s: s, TensorDataset, lambda *s: shuffled(s)])
@pytest.mark.parametrize("where", ["clients", "test", "test of client 1"])
def test_targets_of_another_shape_are_refused(where: str, form: Any, kind: torch.dtype) -> None:
    """(n,) beside (n, 1) would be broadcast to (n, n), and the loss be another one."""
    x = torch.randn(6, 4)
    alike, other = form(x, x[:, :1]), form(x, x[:, 0].to(kind))
    tests = {"clients": None, "test": other, "test of client 1": [alike, other]}
    clients = [alike, other if where == "clients" else alike]
    what = "clients: client 1" if where == "clients" else where
    line = rf"^{what}: expected targets \(n, ...\) as at client 0, \(1,\) torch.float32, got \(\)"
    with pytest.raises(ValueError, match=f"{line} {kind}$"):
        simulate(
            "fedavg",
            model=nn.Linear(4, 1),
            loss=F.mse_loss,
            rounds=1,
            clients=clients,
            test=tests[where],
        )


def test_numbers_beside_classes_are_refused() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    clients = [TensorDataset(x, y), TensorDataset(x, y.float())]
    line = r"^clients: client 1: expected targets .* \(\) torch.int64, got \(\) torch.float32$"
    with pytest.raises(ValueError, match=line):
        simulate("fedavg", model=nn.Linear(4, 3), clients=clients, rounds=1)


@pytest.mark.parametrize("loss", ["cross-entropy", nn.CrossEntropyLoss(label_smoothing=0.1)])
@pytest.mark.parametrize("form", [lambda *s: s, TensorDataset])
def test_classes_beside_their_probabilities(form: Any, loss: Any) -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    soft, model = F.one_hot(y, 3).float(), nn.Linear(4, 3)
    keys: dict[str, Any] = {"loss": loss, "model": model, "test": form(x, y), "rounds": 2}
    one, other = (
        simulate("fedavg", clients=[form(x, soft), form(x, targets)], participation=1.0, **keys)
        for targets in (y, soft)
    )
    for name, value in one.model.items():
        torch.testing.assert_close(other.model[name], value)


def test_whole_numbers_beside_other_numbers() -> None:
    x, y, model = torch.randn(6, 4), torch.arange(6)[:, None], nn.Linear(4, 1)
    keys: dict[str, Any] = {"loss": F.mse_loss, "model": model, "participation": 1.0, "rounds": 2}
    one, other = (
        simulate("fedavg", clients=[(x, y + 0.5), (x, targets)], **keys).model
        for targets in (y, y.float())
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


class Shifted(Dataset[Any]):
    """Raw labels from 1, as torchvision's letters, and a transform that returns them from 0."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.targets = x, y + 1
        self.target_transform = lambda label: label - 1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.target_transform(self.targets[i])


def test_labels_are_those_that_a_dataset_returns() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    simulate("fedavg", clients=[Shifted(x, y)] * 2, model=nn.Linear(4, 3), rounds=1)


class Parity(TensorDataset):
    """Whether digits are odd; 0 for values that are missing."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x.nan_to_num(), y % 2


class Remainders(Dataset[Any]):
    """Labels modulo ``classes``, while all are stored."""

    def __init__(self, x: Tensor, y: Tensor, classes: int) -> None:
        self.x, self.targets, self.classes = x, y, classes

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.targets[i] % self.classes


class Named(Remainders):
    """In dicts, as those of Flower Datasets."""

    def __getitem__(self, i: int) -> Any:
        return dict(zip(("img", "label"), super().__getitem__(i), strict=True))


def test_samples_are_those_that_a_dataset_returns_not_those_that_it_stores() -> None:
    x, y = torch.randn(6, 4), torch.arange(6) - 1
    missing = torch.where(x > 0, x, math.nan)
    for rows in (Parity(missing, y), Remainders(x, y, 2), Named(x, y, 2)):
        simulate("fedavg", clients=[rows] * 2, test=rows, model=nn.Linear(4, 2), rounds=1)
    line = r"^clients: client 0: expected labels below 2, the model's outputs, got 5$"
    for kind in (Remainders, Named):
        with pytest.raises(ValueError, match=line):
            simulate("fedavg", clients=[kind(x, y + 1, 9)], model=nn.Linear(4, 2), rounds=1)


def test_what_no_copy_or_no_second_pass_survives_is_refused() -> None:
    hooked = nn.Linear(4, 3)
    hooked.weight.register_hook(lambda g: 0 * g)
    for model, line in (
        (hooked, r"parameters without hooks, weight has one"),
        (InPlace(), r"TypeError: it changes its arguments in place; copy them"),
        (InPlace(only_in_training=True), r"in training mode it changes them in place: write x ="),
        (nn.Sequential(nn.Dropout(inplace=True), nn.Linear(4, 3)), r"and set inplace=False"),
    ):
        x, y = torch.randn(6, 4), torch.arange(6) % 3
        before = x.clone()
        with pytest.raises(ValueError, match=line) as error:
            simulate("fedavg", clients=[(x, y)] * 2, model=model, rounds=1)
        assert "\n" not in str(error.value)
        assert torch.equal(x, before)


def test_a_label_of_a_sequence_without_an_output_is_refused_before_a_round() -> None:
    x, y = torch.randn(6, 4), torch.randint(3, (6, 2))
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))
    for second in ((x, y + 3), TensorDataset(x, y + 3)):
        line = "^clients: client 1: expected labels below 3, the model's outputs, got "
        with pytest.raises(ValueError, match=line):
            simulate("fedavg", clients=[(x, y), second], model=model, rounds=1)
    classes_first = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)))
    with pytest.raises(ValueError, match=r"^clients: client 1: .* below 3, .*, got "):
        simulate("fedavg", clients=[(x, y), (x, y + 3)], model=classes_first, loss="cross-entropy")
    simulate("fedavg", clients=[(x, y)], model=classes_first, loss="cross-entropy", rounds=1)


@pytest.mark.parametrize("loss", ["auto", "cross-entropy"])
def test_outputs_with_the_classes_second_are_named(loss: str) -> None:
    """(n, classes, h, w), as of segmentation."""
    x, y = torch.randn(4, 2, 5, 5), torch.zeros(4, 5, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^model: .*; put the classes last, with output.movedim"):
        simulate("fedavg", clients=[(x, y)], test=(x, y), model=nn.Conv2d(2, 3, 1), loss=loss)


def test_labels_of_another_shape_than_the_scores_are_refused_before_a_round() -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])[:, None]
    rounds: list[int] = []
    with pytest.raises(ValueError, match=r"of shape \(2, 1\), got \(2, 3\); give labels as \(n,\)"):
        simulate(
            "fedavg",
            clients=[(x, y)],
            model=nn.Linear(4, 3),
            rounds=1,
            test=(x, y),
            loss="sequence-cross-entropy",
            on_round=lambda r: rounds.append(r.number),
        )
    assert not rounds
