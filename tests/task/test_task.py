"""A client's batches, the test samples, the tasks of a configuration, and device names."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord.core.request import ModelSettings
from fedaccord.core.rule import LocalConfig
from fedaccord.data.partition import matching_share
from fedaccord.data.transforms import augment
from fedaccord.task import Clients, Task, TaskConfig, find_device, load_task
from fedaccord.task.flat_model import FlatModel
from fedaccord.task.generators import seed_of

SIZES = (23, 40, 5)
FLOAT64 = torch.float64


def task(**more: Any) -> Task:
    """Client i holds the numbers 100 i, 100 i + 1, ..., whose targets are 0 or 1."""
    xs = [100.0 * i + torch.arange(n)[:, None] for i, n in enumerate(SIZES)]
    ys = [x[:, 0].long() % 2 for x in xs]
    return Task(lambda: nn.Linear(1, 2), Clients(xs, ys), **more)


def epochs(
    seed: int = 0, round: int = 0, client: int = 0, passes: int = 1, batch_size: int = 10
) -> list[list[list[int]]]:
    """The inputs of every batch of every pass."""
    batches = task().train_batches(client, round, batch_size, seed, torch.float32)
    return [[x[:, 0].int().tolist() for x, _ in batches] for _ in range(passes)]


def flat(epoch: list[list[int]]) -> list[int]:
    return [number for batch in epoch for number in batch]


def test_batches_are_a_function_of_seed_round_and_client() -> None:
    first = epochs(passes=3)
    assert epochs(passes=3) == first
    torch.manual_seed(99)  # no global generator has a say
    assert epochs(passes=3) == first
    assert epochs(seed=1, passes=3) != first
    assert epochs(round=1, passes=3) != first


def test_clients_draw_independently() -> None:
    """Two clients with equally many samples take them in different orders."""
    twins = Task(lambda: nn.Linear(1, 2), Clients([torch.arange(40.0)] * 2, [torch.arange(40)] * 2))
    orders = [
        torch.cat([y for _, y in twins.train_batches(i, 0, 10, 0, torch.float32)]).tolist()
        for i in range(2)
    ]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_seed_round_and_client_are_not_mixed_up() -> None:
    """(seed, round) = (1, 2) is another stream than (2, 1)."""
    assert epochs(seed=1, round=2) != epochs(seed=2, round=1)


def test_every_pass_is_a_new_permutation_of_all_samples() -> None:
    passes = epochs(client=1, passes=3)
    assert all(sorted(flat(epoch)) == list(range(100, 140)) for epoch in passes)
    assert len({tuple(flat(epoch)) for epoch in passes}) == 3
    assert list(range(100, 140)) not in [flat(epoch) for epoch in passes]


def test_the_last_batch_of_a_pass_is_what_is_left() -> None:
    assert [len(batch) for batch in epochs(client=0)[0]] == [10, 10, 3]
    assert [len(batch) for batch in epochs(client=1)[0]] == [10, 10, 10, 10]
    assert [len(batch) for batch in epochs(client=2)[0]] == [5]


def test_batch_size_0_is_the_whole_client_in_order_at_every_pass() -> None:
    assert epochs(client=0, batch_size=0, passes=2) == [[list(range(23))]] * 2


def test_inputs_and_targets_stay_together_in_the_dtype_of_the_run() -> None:
    for batch_size in (0, 10):
        for x, y in task().train_batches(0, 0, batch_size, 0, FLOAT64):
            assert x.dtype == FLOAT64
            assert y.dtype == torch.int64
            assert (x[:, 0].long() % 2).tolist() == y.tolist()


def test_regression_targets_take_the_dtype_of_the_run() -> None:
    clients = Clients([torch.ones(3, 1)], [torch.ones(3, 1)])
    one = Task(lambda: nn.Linear(1, 1), clients, test=(torch.ones(3, 1), torch.ones(3, 1)))
    for batch_size in (0, 2):
        assert {y.dtype for _, y in one.train_batches(0, 0, batch_size, 0, FLOAT64)} == {FLOAT64}
    one.loss = F.mse_loss
    w = torch.tensor([2.0, 0.5], dtype=FLOAT64)
    assert one.evaluate(w) == {"test-loss": 1.5**2}


def test_random_numbers_of_layers_are_not_those_of_the_order_of_the_batches() -> None:
    config = LocalConfig(2, 3, 0.1, 0.0, 0.0, client=1, seed=4, shapes=())
    batches = task().train_batches(1, 2, 10, 4, torch.float32)
    assert batches.generator.initial_seed() != seed_of(config)


def test_augmentation_draws_from_the_clients_generator_and_spares_full_batches() -> None:
    def shake(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=generator) / 2

    def inputs(batch_size: int) -> Tensor:
        batches = task(augment=shake).train_batches(0, 0, batch_size, 0, torch.float32)
        return torch.cat([x for x, _ in batches])

    assert torch.equal(inputs(10), inputs(10))
    assert inputs(10).frac().any()
    assert not inputs(0).frac().any()


def test_batches_of_few_samples_are_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a client holds few they are prepared once, and cut afterwards."""

    def batches(calls: list[Tensor]) -> list[Tensor]:
        def prepare(x: Tensor, dtype: torch.dtype) -> Tensor:
            calls.append(x)
            return (x.to(dtype) - 3) / 7

        client = task(prepare=prepare).train_batches(0, 0, 10, 0, FLOAT64)
        return [x for _ in range(2) for x, _ in client]

    once: list[Tensor] = []
    few = batches(once)
    monkeypatch.setattr("fedaccord.task.task.MAX_PREPARED_VALUES", 0)
    monkeypatch.setattr("fedaccord.task.task.AHEAD", 0)
    each: list[Tensor] = []
    assert all(torch.equal(a, b) for a, b in zip(few, batches(each), strict=True))
    assert (len(once), len(each)) == (1, 6)


def test_augmentation_sees_samples_before_they_are_prepared() -> None:
    dtypes: list[torch.dtype] = []

    def look(x: Tensor, generator: torch.Generator) -> Tensor:
        dtypes.append(x.dtype)
        return x

    for x, _ in task(augment=look).train_batches(0, 0, 10, 0, FLOAT64):
        assert x.dtype == FLOAT64
    assert dtypes == [torch.float32]  # of three batches, which are cut together


def test_batches_cut_ahead_are_those_cut_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(256, (23, 3, 8, 9), generator=torch.Generator().manual_seed(0)).byte()
    one = Task(lambda: nn.Linear(1, 1), Clients([x], [torch.arange(23)]), augment=augment)

    def batches() -> list[tuple[Tensor, Tensor]]:
        client = one.train_batches(0, 0, 5, 0, torch.float32)
        return [batch for _ in range(2) for batch in client]

    together = batches()
    for numbers in (0, 2 * 5 * 3 * 8 * 9):
        monkeypatch.setattr("fedaccord.task.task.AHEAD", numbers)
        for (x_1, y_1), (x_2, y_2) in zip(together, batches(), strict=True):
            assert torch.equal(x_1, x_2)
            assert torch.equal(y_1, y_2)
    assert [len(y) for _, y in together] == [5, 5, 5, 5, 3] * 2


def test_the_whole_client_as_a_batch_is_prepared_anew_in_every_pass() -> None:
    """A model may change its inputs in place."""
    client = task().train_batches(0, 0, 0, 0, FLOAT64)
    (first, _), (second, _) = (next(iter(client)) for _ in range(2))
    first.zero_()
    assert second.any()


def test_index_parts_select_the_clients_samples() -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    parts = [torch.tensor(rows).numpy() for rows in ([7, 2, 2], [0])]
    clients = Clients(x, y, parts)
    assert len(clients) == 2
    assert [clients.size(i) for i in range(2)] == [3, 1]
    inputs, targets = clients.samples(0)
    assert inputs[:, 0].tolist() == targets.tolist() == [7, 2, 2]


def test_evaluation_covers_test_samples_beyond_one_batch() -> None:
    n = 1007  # the last batch is smaller
    x, y = torch.randn(n, 1), torch.randint(2, (n,))
    w = torch.tensor([1.0, -1.0, 0.2, 0.0])
    metrics = task(test=(x, y)).evaluate(w)
    logits = x @ w[None, :2] + w[2:]
    assert metrics["test-loss"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    assert metrics["test-accuracy"] == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    assert task().evaluate(w) == {}


class NoBfloat16(nn.Linear):
    """As layers that a processor does not compute in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no primitive")
        return super().forward(x)


def test_the_model_is_tried_with_the_precision_of_the_run() -> None:
    one = Task(lambda: NoBfloat16(1, 2), task().clients)
    with pytest.raises(ValueError, match=r"^model: .*: no primitive; try precision=float32$"):
        one.model(ModelSettings("bfloat16"))
    assert one.model(ModelSettings("float32"))


def test_a_model_of_numbers_with_integer_inputs_is_told_so() -> None:
    clients = Clients([torch.ones(4, 3, dtype=torch.int64)], [torch.arange(4)])
    one = Task(lambda: nn.Linear(3, 4), clients, prepare=lambda x, _: x)
    with pytest.raises(ValueError, match=r"inputs are torch.int64: features must be floats, t"):
        one.model()


def test_the_model_is_made_once_for_each_dtype() -> None:
    one = task()
    assert one.model(ModelSettings("float32")) is one.model(ModelSettings("bfloat16"))
    assert one.model(ModelSettings("float64")).w.dtype == FLOAT64
    assert one.model(ModelSettings("float32")).w.dtype == torch.float32
    assert one.model(ModelSettings("float64")) is one.model(ModelSettings("float64"))


# --- the task of a configuration ------------------------------------------------------------------


def digits(whole: bool = False, **settings: Any) -> Task:
    return load_task(TaskConfig(**settings), num_clients=20, whole=whole)


def test_the_default_task_is_digits_dealt_to_clients() -> None:
    own = digits()
    assert len(own.clients) == 20
    assert sum(own.num_examples(i) for i in range(20)) == 1438 // 20 * 20
    x, y = next(iter(own.train_batches(3, 0, 16, 0, torch.float32)))
    assert (x.shape, x.dtype, y.shape) == ((16, 1, 8, 8), torch.float32, (16,))
    everything = own.prepare(own.clients.x, torch.float32)
    assert everything.mean() == pytest.approx(0, abs=1e-5)
    assert everything.std() == pytest.approx(1, abs=1e-3)
    assert own.model().module(x).shape == (16, 10)
    metrics = own.evaluate(initial(own))
    assert metrics["test-loss"] == pytest.approx(2.3, abs=0.2)  # log 10: it knows nothing yet
    assert metrics["test-accuracy"] < 0.3


def initial(task: Task) -> Tensor:
    return FlatModel(task.module()).w


def test_a_task_is_loaded_once_and_depends_on_the_seed() -> None:
    assert digits() is digits()
    other = digits(seed=1)
    assert not torch.equal(initial(other), initial(digits()))
    a, b = digits().clients, other.clients
    assert [p.tolist() for p in a.parts] != [p.tolist() for p in b.parts]


def test_a_whole_task_gives_every_client_all_samples() -> None:
    own = digits(whole=True)
    assert {own.num_examples(i) for i in range(20)} == {1438}
    assert own.clients.samples(0)[1].bincount().min() > 100


@pytest.mark.parametrize("validation", [0.0, 0.1])
def test_the_parts_of_clients_that_hold_the_same_samples_are_one(validation: float) -> None:
    own = load_task(TaskConfig(validation=validation), num_clients=1000, whole=True)
    assert own.clients.parts is not None
    assert len(own.clients) == 1000
    assert len({part.ctypes.data for part in own.clients.parts}) == 1


# --- devices --------------------------------------------------------------------------------------


def test_find_device() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:99", "cpu:x", "mps:7", "vulkan", "hpu", "xla"])
def test_a_device_that_is_not_there_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device: expected one of cpu.*got '{name}'") as error:
        find_device(name)
    assert "\n" not in str(error.value)


def test_the_device_of_a_configuration_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^device: expected one of"):
        digits(device="warp")


def test_a_clients_test_share_is_as_large_as_its_share_of_the_training_samples() -> None:
    test = (torch.arange(200.0)[:, None], torch.arange(200) % 4)
    ys = [torch.zeros(30, dtype=torch.long), torch.arange(90) % 4]
    some = Task(lambda: nn.Linear(1, 4), Clients([torch.zeros(len(y), 1) for y in ys], ys), test)
    (_, few), (x, many) = some.client_test(0) or (), some.client_test(1) or ()
    assert few.bincount().tolist() == [50]
    assert sum(many.bincount()) == 150
    assert max(many.bincount()) - min(many.bincount()) <= 1
    assert torch.equal(x[:, 0] % 4, many.float())
    some.own_test = True
    assert (some.client_test(0) or ())[1] is test[1]
    assert task().client_test(0) is None


def test_the_training_samples_are_evaluated_whole_and_plain() -> None:
    """Also those that no client holds, and without augmentation."""
    settings = TaskConfig(model="linear", dirichlet_alpha=0.05, replacement="cyclic", seed=7)
    skewed = load_task(settings, num_clients=7)
    w = FlatModel(skewed.module(), dtype=torch.float32).w.clone()
    x, y = skewed.clients.x, skewed.clients.y
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    predictions = skewed.module()(skewed.prepare(x, torch.float32))
    expected = {
        "train-loss-of-model": F.cross_entropy(predictions, y).item(),
        "train-accuracy": (predictions.argmax(1) == y).float().mean().item(),
    }
    assert skewed.evaluate_train(w) == pytest.approx(expected)
    skewed.augment = lambda x, generator: x + 100.0
    assert skewed.evaluate_train(w) == pytest.approx(expected)
    lists = Task(skewed.module, Clients([x[:9], x[9:]], [y[:9], y[9:]]), prepare=skewed.prepare)
    assert lists.evaluate_train(w) == pytest.approx(expected)


def test_held_out_samples_leave_the_clients_as_they_were_dealt() -> None:
    """A share of all training samples belongs to no client; the rest stays where it was."""
    whole = load_task(TaskConfig(seed=3), num_clients=5)
    part = load_task(TaskConfig(seed=3, validation=0.1), num_clients=5)
    x, y = part.test
    assert len(y) == round(0.1 * len(whole.clients.y)) == len(whole.clients.y) - len(part.clients.y)

    def images(samples: tuple[Tensor, Tensor]) -> list[bytes]:
        return [image.numpy().tobytes() for image in samples[0]]

    test = set(images((x, y)))
    for i in range(5):
        before, after = images(whole.clients.samples(i)), images(part.clients.samples(i))
        assert after == [image for image in before if image not in test]
    assert {image for i in range(5) for image in images(part.clients.samples(i))}.isdisjoint(test)


def test_held_out_samples_depend_on_the_seed_and_are_named_after_what_they_are() -> None:
    part = load_task(TaskConfig(validation=0.1, model="linear"), num_clients=5)
    other = load_task(TaskConfig(validation=0.1, model="linear", seed=1), num_clients=5)
    assert not torch.equal(part.test[0], other.test[0])
    assert set(part.evaluate(part.model().w)) == {"validation-loss", "validation-accuracy"}


def test_clients_of_one_class_mixture_have_test_samples_of_their_own() -> None:
    x, y = torch.arange(60.0)[:, None], torch.arange(60) % 2
    clients = Clients([x[:10], x[10:20]], [y[:10], y[10:20]])
    test = x[20:], y[20:]
    first, second = shares_of(clients, test, seed=0)
    assert len(first) == len(second) == 20
    assert first != second


def shares_of(clients: Clients, test: Any, seed: int) -> list[list[float]]:
    own = Task(lambda: nn.Linear(1, 2), clients, test=test, seed=seed)
    return [own.client_test(i)[0].flatten().tolist() for i in range(len(clients))]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_shares_of_the_test_samples_depend_on_the_seed(dtype: torch.dtype) -> None:
    """Those by class and those of numbers."""
    x, y = torch.arange(60.0)[:, None], (torch.arange(60) % 2).to(dtype)
    clients, test = Clients([x[:10], x[10:20]], [y[:10], y[10:20]]), (x[20:], y[20:])
    shares = [shares_of(clients, test, seed) for seed in (0, 0, 1)]
    assert shares[0] == shares[1]
    assert shares[0] != shares[2]


def test_the_share_of_a_client_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Mock(side_effect=matching_share)
    monkeypatch.setattr("fedaccord.task.evaluation_shares.matching_share", draw)
    own = load_task(TaskConfig(model="linear"), num_clients=5)
    samples = [own.client_test(i) or () for i in (0, 1, 0)]
    assert draw.call_count == 2
    assert all(torch.equal(a, b) for a, b in zip(samples[0], samples[2], strict=True))


def test_a_client_without_samples_left_is_refused() -> None:
    config = TaskConfig(validation=0.9, partition="iid")
    with pytest.raises(ValueError, match=r"^validation: expected samples left for every client"):
        load_task(config, num_clients=700)
