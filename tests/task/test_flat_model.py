"""A module and its flat vector share memory; every tensor of a module has one role."""

import json
from collections.abc import Callable
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaccord import load, run, simulate
from fedaccord.task.flat_model import FlatModel

D = 3 * 4 + 4 + 4 * 2  # parameters of `net`


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def by_hand(w: Tensor, x: Tensor) -> Tensor:
    """`net` with its parameters read off a vector in the order weight, bias, weight."""
    hidden = torch.tanh(x @ w[:12].view(4, 3).T + w[12:16])
    return hidden @ w[16:].view(2, 4).T


def test_w_holds_the_parameters_in_their_order() -> None:
    module = net()
    before = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    x = torch.randn(5, 3)
    output = module(x).detach()
    model = FlatModel(module)
    assert model.module is module
    assert torch.equal(model.w, before)
    assert torch.equal(module(x), output)
    torch.testing.assert_close(by_hand(model.w, x), output)
    assert model.names == ["0.weight", "0.bias", "2.weight"]
    assert model.shapes == [(4, 3), (4,), (2, 4)]


def test_a_step_on_w_is_a_step_of_the_model() -> None:
    model = FlatModel(net())
    x = torch.randn(5, 3)
    for w in (torch.randn(D), torch.randn(D)):
        model.w.copy_(w)
        torch.testing.assert_close(model.module(x), by_hand(w, x))
    model.w.add_(1.0)
    torch.testing.assert_close(model.module(x), by_hand(w + 1, x))


def test_the_module_visits_another_point() -> None:
    model, x = FlatModel(net()), torch.randn(5, 3)
    w, point = model.w.clone(), torch.randn(D)
    copy = point.clone().requires_grad_()
    (expected,) = torch.autograd.grad(by_hand(copy, x).square().sum(), copy)
    with model.at(point):
        model.module(x).square().sum().backward()
    torch.testing.assert_close(model.g, expected)
    with pytest.raises(RuntimeError), model.at(point):
        raise RuntimeError
    assert torch.equal(model.w, w)
    torch.testing.assert_close(model.module(x), by_hand(w, x))


def test_a_change_of_the_model_is_a_change_of_w() -> None:
    model = FlatModel(net())
    with torch.no_grad():
        model.module[0].bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert model.w[12:16].tolist() == [1, 2, 3, 4]


def test_a_backward_pass_adds_into_g() -> None:
    model = FlatModel(net())
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    w = model.w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(by_hand(w, x), y), w)
    g = model.g
    assert not g.any()
    for times in (1, 2, 3):
        F.cross_entropy(model.module(x), y).backward()
        torch.testing.assert_close(g, times * expected)
    assert model.g is g
    assert torch.equal(model.w, w)


def test_state_dict_names_and_views_shape_a_vector() -> None:
    model = FlatModel(net())
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in net().state_dict().items()
    }
    for name, value in net().state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    vector = torch.arange(float(D))
    pieces = model.views(vector)
    assert pieces[0].tolist() == vector[:12].view(4, 3).tolist()
    assert pieces[2].tolist() == vector[16:].view(2, 4).tolist()
    pieces[1][0] = -1.0
    assert vector[12] == -1.0  # a view


def test_dtype_of_parameters_vectors_and_buffers() -> None:
    module = net()
    module.register_buffer("centre", torch.ones(3), persistent=False)
    model = FlatModel(module, dtype=torch.float64)
    assert model.w.dtype == model.g.dtype == torch.float64
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert module(torch.randn(2, 3, dtype=torch.float64)).dtype == torch.float64
    assert module.centre.dtype == torch.float64


def test_a_single_parameter_has_a_vector_of_its_own() -> None:
    weight = torch.ones(1, 3)
    module = nn.Linear(3, 1, bias=False)
    module.weight.data = weight
    FlatModel(module).w.fill_(7.0)
    assert weight.tolist() == [[1, 1, 1]]
    assert module.weight.tolist() == [[7, 7, 7]]


def test_buffers_that_are_not_saved_are_accepted() -> None:
    module = net()
    module.register_buffer("centre", torch.ones(3), persistent=False)
    assert FlatModel(module).w.numel() == D
    assert FlatModel(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))).w.numel() == 48


def batch_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def counter() -> nn.Module:
    module = net()
    module.register_buffer("steps", torch.zeros(()))
    return module


def hooked() -> nn.Module:
    module = net()
    module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


def frozen() -> nn.Sequential:
    module = net()
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("make", "more", "parts"),
    [
        (batch_norm, {}, ["'1.running_mean' and 2 more", "buffers=freeze", "mean", "local"]),
        (counter, {}, ["'steps': "]),
        (batch_norm, {"buffers": "sum"}, ["refuse, freeze, mean, local", "'sum'"]),
        (nn.ReLU, {}, ["parameters to train", "ReLU has none"]),
        (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), {}, ["0 has sparse=True"]),
        (lambda: net().requires_grad_(False), {}, ["Sequential has none"]),
        (net, {"local_parameters": "*"}, ["has none beside local-parameters='*'"]),
        (net, {"local_parameters": "head.*"}, ["'head.*' matches none", "0.weight, 0.bias"]),
        (frozen, {"local_parameters": "0.*"}, ["'0.*' matches none", "2.weight"]),
        (net, {"frozen_parameters": "*"}, ["has none beside frozen-parameters='*'"]),
        (net, {"frozen_parameters": "1.*"}, ["'1.*' matches none", "0.weight, 0.bias"]),
        (net, {"frozen_parameters": "0.*", "local_parameters": "0.*"}, ["'0.*' matches none"]),
        (lambda: held(torch.zeros(2, dtype=torch.cfloat)), {"buffers": "mean"}, ["held is", "com"]),
        (lambda: held(torch.tensor(2**24 + 1)), {"buffers": "local"}, ["float32", "in held"]),
        (hooked, {}, ["on accumulated gradients, 0.weight has one", "register_hook"]),
        (lambda: net().to(torch.cfloat), {}, ["real numbers, 0.weight is torch.complex64"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    make: Callable[[], nn.Module], more: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ValueError, match=r": expected") as error:
        FlatModel(make(), dtype=torch.float32, **more)
    assert all(part in str(error.value) for part in parts)
    assert "\n" not in str(error.value)


class Smallest(nn.Linear):
    """It keeps the smallest of its inputs."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("smallest", torch.tensor(float("inf")))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.smallest = torch.minimum(self.smallest, x.min())
        return super().forward(x)


def test_a_mask_of_infinite_numbers_has_no_mean() -> None:
    """As a causal mask, which is a constant."""
    mask = torch.full((4, 4), float("-inf")).triu(1)
    x, y = torch.randn(6, 3), torch.zeros(6, 2)
    for policy in ("local", "freeze"):
        history = simulate("fedavg", clients=[(x, y)], model=held(mask), buffers=policy, rounds=2)
        assert history.metrics["replies"].iloc[-1] == 1
    line = (
        r"^model: expected finite numbers with buffers=mean, held has inf or nan: register it with "
        r"persistent=False, or set buffers=freeze$"
    )
    with pytest.raises(ValueError, match=line):
        simulate("fedavg", clients=[(x, y)], model=held(mask), buffers="mean", rounds=2)
    smallest = Smallest()
    model = simulate("fedavg", clients=[(x, y)], model=smallest, buffers="mean", rounds=2).model
    assert torch.equal(model["smallest"], x.min())


def held(buffer: Tensor, persistent: bool = True) -> nn.Module:
    module = net()
    module.register_buffer("held", buffer, persistent=persistent)
    return module


def test_a_single_number_is_a_parameter() -> None:
    """As a temperature, or the scale of CLIP."""
    module = net()
    module.scale = nn.Parameter(torch.tensor(3.0))
    model = FlatModel(module, local_parameters="0.bias")
    assert model.shapes[0] == ()
    assert model.views(torch.zeros(2, len(model.w)))[0].shape == (2,)
    model.load(torch.full_like(model.w, 5.0))
    assert module.scale.item() == 5


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, "cfloat"), (torch.float64, "cdouble")])
@pytest.mark.parametrize(("policy", "persistent"), [("refuse", False), ("freeze", True)])
def test_complex_buffers_keep_their_imaginary_parts(
    dtype: torch.dtype, wide: str, policy: str, persistent: bool
) -> None:
    values = torch.polar(torch.ones(3), torch.arange(3.0))
    model = FlatModel(held(values, persistent), dtype=dtype, buffers=policy)
    assert model.module.held.dtype == getattr(torch, wide)
    assert torch.equal(model.module.held, values.to(getattr(torch, wide)))


class Teacher(nn.Module):
    """Its teacher follows its student in training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        teacher, student = self.teacher.weight, self.student.weight
        if self.how == "in place":
            teacher.lerp_(student, 0.1)
        elif self.how == "data in place":
            teacher.data.lerp_(student.data, 0.1)
        else:
            teacher.data = teacher.data.lerp(student.data, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow()
        return self.student(x) + self.teacher(x)


DATA = torch.randn(8, 6), torch.arange(8) % 3


@pytest.mark.parametrize("how", ["in place", "data in place", "data replaced"])
def test_a_frozen_tensor_that_training_changes_is_refused(how: str) -> None:
    """Else it would pass from one client to the next."""
    with pytest.raises(ValueError, match=r"frozen teacher.weight to keep its values, a"):
        simulate("fedavg", clients=[DATA] * 3, model=Teacher(how), rounds=2, participation=1.0)


class Bounded(nn.Linear):
    """A layer with a bound on its weights, which it keeps in one of two ways, from a call on."""

    def __init__(self, how: str, first: int = 1) -> None:
        super().__init__(6, 3)
        self.how, self.calls = how, count(1)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) >= self.first:
            bounded = torch.renorm(self.weight.data, 2, 0, 0.5)
            if self.how == "replaced":
                self.weight.data = bounded
            else:
                self.weight.data.copy_(bounded)
        return super().forward(x)


@pytest.mark.parametrize("local", ["", "weight"])
def test_a_parameter_whose_data_are_replaced_is_refused(local: str) -> None:
    """No step would change it any more."""
    settings: dict[str, Any] = {"local_parameters": local, "clients": [DATA] * 3, "rounds": 1}
    with pytest.raises(
        ValueError, match=r"^model: expected weight to keep .* data.copy_\(\.\.\.\)$"
    ):
        simulate("fedavg", model=Bounded("replaced"), **settings)
    bounded = Bounded("in place")
    bounded.weight.data.mul_(20)
    history = simulate("fedavg", model=bounded, weight_decay=0.0, **settings)
    assert local or float(history.model["weight"].norm(dim=1).max()) < 2
    assert history.metrics["drift"].iloc[-1] > 0


@pytest.mark.parametrize("after", ["load", "take"])
def test_data_that_only_some_passes_replace_are_found_at_the_end_of_a_visit(after: str) -> None:
    model = FlatModel(Bounded("replaced", first=2))
    model.load(model.w.clone())
    model.module(DATA[0])
    model.take()
    model.module(DATA[0])
    with pytest.raises(ValueError, match="expected weight to keep"):
        model.load(model.w.clone()) if after == "load" else model.take()


def test_a_frozen_table_may_be_sparse() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    model = FlatModel(nn.Sequential(table, nn.Linear(2, 1)), frozen_parameters="0.*")
    assert model.names == ["1.weight", "1.bias"]


def test_tied_weights_are_one_part_of_w() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    model = FlatModel(module)
    assert model.is_tied
    assert model.w.numel() == 16
    model.w.fill_(1.0)
    assert module(torch.ones(1, 4)).tolist() == [[16.0] * 4]


def test_other_parameters_of_a_layer_with_several_names() -> None:
    """PyTorch's own function leaves them in its place."""
    layer, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.weight = layer.weight
    model = FlatModel(nn.Sequential(layer, nn.Sequential(layer, nn.ReLU(), layer), other))
    assert model.names == ["0.weight"]
    model.w.copy_(torch.eye(2).flatten())
    for _ in range(2):
        doubled = model.with_parameters([2 * torch.eye(2)], torch.ones(1, 2))
        assert doubled.tolist() == [[16.0, 16.0]]
        assert model(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_every_name_of_a_tied_tensor_counts(name: str) -> None:
    def tied() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
        module[1].weight = module[0].weight
        return module

    local = FlatModel(tied(), local_parameters=name)
    assert (local.names, local.local_names) == (["1.bias"], ["0.weight"])
    frozen = FlatModel(tied(), frozen_parameters=name)
    assert (frozen.names, [*frozen.frozen]) == (["1.bias"], ["0.weight"])


def test_frozen_tensors_are_not_in_w_and_known_by_hash() -> None:
    model = FlatModel(frozen())
    assert model.names == ["2.weight"]
    assert model.w.numel() == 8
    before = model.frozen_hashes()
    assert [*before] == ["0.weight", "0.bias"]
    model.module(torch.ones(1, 3)).sum().backward()
    model.w.sub_(model.g)
    assert model.frozen_hashes() == before
    with torch.no_grad():
        model.module[0].bias[1] += 1e-7
    after = model.frozen_hashes()
    assert [name for name in before if before[name] != after[name]] == ["0.bias"]


def test_parameters_are_frozen_by_their_names() -> None:
    named, module = net(), frozen()
    for _ in range(2):  # a module that an earlier run has frozen
        model, marked = FlatModel(named, frozen_parameters="0.*"), FlatModel(module)
    assert model.layout == marked.layout
    assert [*model.frozen] == ["0.weight", "0.bias"]


def test_local_parameters_are_trained_beside_w() -> None:
    model = FlatModel(net(), local_parameters="2.*, 0.bias")
    whole = {name: p.detach().clone() for name, p in net().named_parameters()}
    assert model.names == ["0.weight"]
    assert model.local_names == ["0.bias", "2.weight"]
    assert torch.equal(model.w_local, torch.cat([whole[n].view(-1) for n in model.local_names]))
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    F.cross_entropy(model.module(x), y).backward()
    expected = FlatModel(net())
    F.cross_entropy(expected.module(x), y).backward()
    assert torch.equal(model.g, expected.g[:12])
    assert torch.equal(model.g_local, expected.g[12:])
    mine = model.read_local()
    model.write_local(torch.zeros(12))
    assert not model.module[2].weight.any()
    model.write_local(mine)
    with model.at(torch.zeros(12)):  # another w, the same local part
        assert torch.equal(model.module[2].weight, whole["2.weight"])
        assert not model.module[0].weight.any()


def statistics(model: FlatModel) -> tuple[list[float], list[float], int]:
    norm = model.module[1]
    return norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)


@pytest.mark.parametrize("policy", ["mean", "local"])
def test_buffers_are_read_and_written(policy: str) -> None:
    model = FlatModel(batch_norm(), buffers=policy, dtype=torch.float64)
    assert len(model.read_buffers()) == (9 if policy == "mean" else 0)
    assert len(model.read_local()) == (9 if policy == "local" else 0)
    read, write = {
        "mean": (model.read_buffers, model.write_buffers),
        "local": (model.read_local, model.write_local),
    }[policy]
    before, first = read(), statistics(model)
    assert before.shape == (9,)
    model.train()
    model.module(torch.randn(8, 3, dtype=torch.float64))
    assert statistics(model)[2] == 1
    after = read()
    write(before)
    assert statistics(model) == first
    write((before + 3 * after) / 4)
    assert statistics(model)[2] == 1  # 0.75 rounded
    with pytest.raises(ValueError, match="expected 9 values of tensors beside the model, got 8"):
        write(before[1:])


class Centre(nn.Module):
    """Keeps a mean of its outputs in a buffer, by assignment or in place."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.net, self.assigns = nn.Linear(3, 3), assigns
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        mean = 0.9 * self.mean + z.mean(0)
        if self.training and self.assigns:
            self.mean = mean
        elif self.training:
            self.mean.copy_(mean.detach())
        return z - self.mean.detach()


@pytest.mark.parametrize("policy", ["mean", "local", "freeze"])
@pytest.mark.parametrize("algo", ["fedavg", "fedsam"])  # the second has two passes a step
def test_a_buffer_that_a_forward_pass_assigns_is_one_that_it_changes(
    policy: str, algo: str
) -> None:
    results = []
    keys = {"buffers": policy, "participation": 1.0, "rounds": 3, "local-epochs": 2}
    for assigns in (True, False)[: 1 if policy == "freeze" else 2]:
        torch.manual_seed(0)
        data = [(torch.randn(8, 3) + i, torch.arange(8) % 3) for i in range(3)]
        first = Centre(assigns)
        history = simulate(
            algo, model=deepcopy(first), clients=data, test=data[0], **keys, **{"batch-size": 4}
        )
        losses = history.metrics["test-loss"].tolist()
        results.append([*history.model.values(), torch.tensor(losses)])
        first.load_state_dict(history.model, strict=policy == "mean")
        loss = F.cross_entropy(first.eval()(data[0][0]), data[0][1])
        assert losses[-1] == pytest.approx(loss.item(), rel=1e-5)
        assert bool(first.mean.any()) is (policy == "mean")
    for mine, in_place in zip(results[0], results[-1], strict=True):
        assert torch.equal(mine, in_place)


@pytest.mark.parametrize("policy", ["mean", "freeze"])
def test_a_visit_begins_with_the_buffers_of_their_roles(policy: str) -> None:
    model = FlatModel(Centre(assigns=True), buffers=policy)
    buffer = model.module.mean
    model.module.mean = torch.ones(3)
    model.load(model.w.clone())
    assert model.module.mean is buffer
    assert buffer.tolist() == [float(policy == "mean")] * 3


def test_a_buffer_that_is_assigned_another_shape_is_named() -> None:
    model = FlatModel(Centre(assigns=True), buffers="mean")
    model.module.mean = torch.zeros(2)
    message = r"^model: expected the buffer mean to keep its shape \(3,\) in training, got \(2,\)"
    with pytest.raises(ValueError, match=message):
        model.read_buffers()


def test_frozen_statistics_never_change() -> None:
    model = FlatModel(batch_norm(), buffers="freeze")
    before, hashes = statistics(model), model.frozen_hashes()
    model.train()
    assert model.module.training
    assert not model.module[1].training
    model.module(torch.randn(8, 3))
    assert statistics(model) == before
    assert len(hashes) == 3
    assert model.frozen_hashes() == hashes
    assert model.is_plain


@pytest.mark.parametrize("stays", [True, False])
def test_a_part_is_in_evaluation_mode_only_if_it_says_so_itself(
    stays: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the module was evaluated before."""
    module = net()
    if stays:
        monkeypatch.setattr(nn.Tanh, "train", lambda self, mode=True: nn.Module.train(self, False))
    module[1].training = False
    for warned in (not stays, False):
        caplog.clear()
        model = FlatModel(module)
        assert module.training
        assert module[1].training is not stays
        assert ("model: 1 is in evaluation mode, but clients" in caplog.text) == warned
        model.module.eval()


@pytest.mark.parametrize("whole", [True, False])
def test_a_part_that_never_leaves_training_mode_is_a_warning(
    whole: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name = (nn.Sequential, "Sequential") if whole else (nn.Tanh, "1")
    monkeypatch.setattr(kind, "train", lambda self, mode=True: self)
    x, y = torch.randn(6, 3), torch.zeros(6, 2)
    simulate("fedavg", clients=[(x, y)], test=(x, y), model=net(), rounds=2)
    assert caplog.text.count("stays in training mode after eval()") == 1
    assert f"model: {name} stays in training mode" in caplog.text


def test_dropout_that_a_part_turns_off_is_off_in_steps_and_evaluations(tmp_path: Path) -> None:
    runs = [
        run(
            "fedavg",
            model=f"tests.own:{name}",
            num_clients=3,
            num_server_rounds=2,
            local_steps=3,
            out_dir=str(tmp_path),
            name=name,
        )
        for name in ("still_dropout", "no_dropout")
    ]
    one, other = map(load, runs)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    losses = [json.loads((path / "summary.json").read_text())["test-loss-last"] for path in runs]
    assert losses[0] == losses[1]
    x = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(one(x), one(x))


def words() -> nn.Sequential:
    table, normed, head = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    return nn.Sequential(table, nn.Linear(4, 4), normed, nn.Linear(4, 4, bias=False), head)


@pytest.mark.parametrize(
    ("settings", "shared", "local"),
    [
        ({}, ["1.weight", "3.weight"], []),
        ({"local_parameters": "4.*"}, ["1.weight", "3.weight"], []),
        ({"frozen_parameters": "4.*"}, ["1.weight", "3.weight"], []),
        ({"local_parameters": "1.*"}, ["3.weight"], ["1.weight"]),
        ({"local_parameters": "0.*,1.*,2.*,3.*"}, [], ["1.weight", "3.weight"]),
        ({"local_parameters": "3.*", "frozen_parameters": "1.*"}, [], ["3.weight"]),
    ],
)
def test_the_output_layer_is_the_last_matrix_of_the_whole_model(
    settings: dict[str, str], shared: list[str], local: list[str]
) -> None:
    """Muon steps along hidden matrices alone, wherever the embeddings and the head are."""
    model = FlatModel(words(), **settings)  # type: ignore[arg-type]
    assert [model.names[i] for i in model.hidden] == shared
    assert [model.local_names[i] for i in model.local_hidden] == local


def test_an_output_layer_may_be_tied_to_the_embedding() -> None:
    first, last = words(), words()
    for module in (first, last):
        module[4] = nn.Linear(4, 9, bias=False)
    last[4].weight = last[0].weight  # the table's name comes first
    first[0].weight = first[4].weight
    for module in (first, last):
        model = FlatModel(module)
        assert model.names[0] == "0.weight"
        assert [model.names[i] for i in model.hidden] == ["1.weight", "3.weight"]
