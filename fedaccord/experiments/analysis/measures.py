"""Measures of a saved model that need gradients, data or the clients' states.

docs/measures.md has their formulas, with model, data and round.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedaccord.config import RunConfig
from fedaccord.core.client_half import state_like
from fedaccord.core.metrics import over_clients
from fedaccord.core.request import ModelSettings
from fedaccord.core.rounds import broadcast
from fedaccord.core.vectors import dtype_of, fill
from fedaccord.experiments.analysis import curvature
from fedaccord.experiments.analysis.curvature import Surface
from fedaccord.experiments.analysis.saved_model import check_frozen, read_card
from fedaccord.federation.checkpoint import unpack
from fedaccord.process import threads
from fedaccord.runs import load_model, logbook, reader
from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.runs.directory import MODEL
from fedaccord.task import Clients, Task, load_task
from fedaccord.task.evaluation import evaluate
from fedaccord.task.solver import tf32_as

FILE = "measures.json"  # in a run directory, if it was measured with others
TOLERANCE = 1e-3  # residual at which power iteration ends
STEPS = 200  # of power iteration, at most
GRID, SPAN = 21, 1.0  # of the landscape: points of an axis, and half its width in filters' lengths


class MeasureOptions(NamedTuple):
    samples: int = 2000  # training samples of curvature and landscape; 0: all
    probes: int = 20  # random vectors of the trace
    radius: float = 0.05  # L2, of sharpness


class Measure(NamedTuple):
    name: str
    value: float
    note: str  # its data and precision
    is_exact: bool = True  # False: an iteration ended before its tolerance was reached


class Saved:
    """The model of a run directory with its clients' data.

    more: run-config keys instead of the run's, such as data-dir. Raises ValueError, in one line, if
    it is not a run, or if its data or its model do not fit.
    """

    def __init__(self, path: Path, more: Mapping[str, Any]) -> None:
        self.path, self.run = path, reader.read(path)
        if "clients" not in self.run.summary:
            got = f"got one that is {self.run.summary['status']}: wait for it, or resume it"
            raise ValueError(f"{path}: expected a run that has ended, {got}")
        self.config = RunConfig.make(self.run.settings | dict(more))
        self.num_clients = int(self.run.summary["clients"])
        threads.check(self.config.threads)
        self.task = load_task(self.config.task, num_clients=self.num_clients)
        settings = self.config.strategy.model_settings
        exact = str(dtype_of(settings.precision)).removeprefix("torch.")
        self.settings = settings._replace(precision=exact)
        self.w, self.buffers = saved_vectors(path, self.task, self.settings)
        self.model = self.task.model(self.settings)
        self.model.write_buffers(self.buffers)

    def surface(self, options: MeasureOptions) -> Surface:
        """The loss over training samples of all clients, or over some drawn by the seed."""
        clients = self.task.clients
        assert isinstance(clients, Clients)
        x, y = clients.x, clients.y
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        assert clients.parts is not None
        rows = torch.cat([torch.from_numpy(part) for part in clients.parts])
        if 0 < options.samples < len(rows):
            rows = rows[torch.randperm(len(rows), generator=self.generator())[: options.samples]]
        return self._surface(x[rows], y[rows])

    def of_client(self, client: int) -> Surface:
        clients = self.task.clients
        assert isinstance(clients, Clients)
        return self._surface(*clients.samples(client))

    def _surface(self, x: Tensor, y: Tensor) -> Surface:
        return Surface(self.model, self.task.loss, [*self.task.batches((x, y), self.w.dtype)])

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.config.task.seed)


def saved_vectors(
    path: Path, task: Task, settings: ModelSettings, name: str = MODEL
) -> tuple[Tensor, Tensor]:
    """The saved parameters (d,) and averaged buffers (d_b,) in the order of the task's model."""
    if not (path / name).is_file():
        raise ValueError(f"{path}: expected a run directory with {name}, found none")
    saved, layout = load_model(path, name), task.model(settings)
    if frozen := layout.frozen_hashes():
        check_frozen(frozen, read_card(path))
    shapes = dict(zip(layout.names, map(tuple, layout.shapes), strict=True))
    for key, shape in shapes.items():
        if key not in saved or tuple(saved[key].shape) != shape:
            has = tuple(saved[key].shape) if key in saved else "none"
            raise ValueError(
                f"{path}: expected {name} to hold {key!r} of shape {shape}, as the model of "
                f"config.toml on these data, got {has}: use the model's code and the data-dir of "
                "the run"
            )
    like = layout.w

    def vector(names: Sequence[str]) -> Tensor:
        return torch.cat([like[:0], *(saved[name].reshape(-1).to(like) for name in names)])

    return vector(layout.names), vector(layout.buffer_names)


def measure(
    saved: Saved, options: MeasureOptions, reference: Path | None = None
) -> Iterator[Measure]:
    """All measures that the run supports, one after another."""
    with tf32_as("float32", saved.w.device):
        yield from risk(saved, reference)
        yield from fairness(saved)
        yield from duals(saved)
        yield from shape(saved, options)


def risk(saved: Saved, reference: Path | None) -> Iterator[Measure]:
    """Excess risk test(w) - train(w_ref) = [train(w) - train(w_ref)] + [test(w) - train(w)]."""
    task, at = saved.task, (saved.w, saved.settings, 1, saved.buffers)
    test, train = task.evaluate(*at), task.evaluate_train(*at)
    split = saved.task.split
    yield Measure("train-loss", train["train-loss-of-model"], "of the model, on all training data")
    gap = test.get(f"{split}-loss", math.nan) - train["train-loss-of-model"]
    if test:
        yield Measure(f"{split}-loss", test[f"{split}-loss"], f"of the model, on the {split} data")
        yield Measure("generalisation-error", gap, f"{split}-loss less train-loss")
    if test and "train-accuracy" in train:
        accuracy = train["train-accuracy"] - test[f"{split}-accuracy"]
        yield Measure("generalisation-gap", accuracy, f"train accuracy less {split} accuracy")
    column = saved.run.metrics.get("train-loss-of-model")
    if reference is not None:
        w, buffers = saved_vectors(reference, task, saved.settings)
        best = task.evaluate_train(w, saved.settings, 1, buffers)["train-loss-of-model"]
        saved.model.write_buffers(saved.buffers)  # the task's one model had the reference's
        of = f"that of {reference.name}"
    elif column is not None and column.notna().any():
        best, of = float(column.min()), "the smallest of this run"
    else:
        return
    error = train["train-loss-of-model"] - best
    yield Measure("optimisation-error", error, f"train-loss less {of}, {best:.6g}")
    if test:
        yield Measure("excess-risk", error + gap, "optimisation-error plus generalisation-error")


def fairness(saved: Saved) -> Iterator[Measure]:
    """The model's accuracy on each client's part of the test samples."""
    if not saved.task.num_tests:
        return
    accuracies, examples = list[float](), list[float]()
    for client in range(saved.num_clients):
        samples = saved.task.client_test(client)
        assert isinstance(samples, tuple)
        batches = saved.task.batches(samples, saved.w.dtype)
        task = saved.task
        of_client = evaluate(saved.model, saved.w, batches, task.loss, metrics=task.metrics)
        if (accuracy := of_client.get("accuracy")) is not None:
            accuracies.append(accuracy)
            examples.append(len(samples[1]))
    if not accuracies:
        return
    of = f"of the model on the shares of {len(accuracies)} clients in the {saved.task.split} data"
    notes = f"mean, {of}", "mean of the tenth of the clients with the lowest", "over the clients"
    values = over_clients("client-accuracy", accuracies, examples)
    for (name, value), note in zip(values.items(), notes, strict=True):
        yield Measure(name, value, note)


def duals(saved: Saved) -> Iterator[Measure]:
    """The distance of the clients' dual variables from -(grad f_i(w) + wd w), their value at a
    stationary point; from the last checkpoint."""
    checkpoints = Checkpoints(saved.path / logbook.FOLDER)
    if not checkpoints.numbers():
        return
    checkpoint, method = checkpoints.load(), saved.config.strategy
    s, half = unpack(method, checkpoint.server, checkpoint.facts), method.client_half()
    like = state_like(half, tuple(map(tuple, checkpoint.facts["shapes"])))
    squares, sizes, total = [], [], torch.zeros_like(saved.w)
    for client in sorted(i for i in checkpoint.clients if s.accepted[i] >= 0):  # not reset since
        _, tensors = checkpoint.clients[client]
        state = fill(like, tensors)
        dual = half.dual(broadcast(method, s, client), state)
        if dual is None:
            return
        lam = dual.to(saved.w)
        if half.keeps_local:  # f_i is of its own parts, too
            saved.model.write_local(state.local.to(saved.w))
        target = saved.of_client(client).gradient(saved.w)
        saved.model.write_local(saved.model.initial_local)
        target += saved.config.strategy.weight_decay * saved.w
        squares.append(float((lam + target).square().sum()))
        sizes.append(float(target.square().sum()))
        total += lam
    if squares:
        of = f"{len(squares)} clients' duals after round {checkpoint.number}"
        drift = sum(squares) / max(sum(sizes), 1e-30)
        yield Measure("dual-drift", drift, f"relative, {of}: 0 at a stationary point")
        mean = float((total / len(squares)).square().sum()) / max(sum(sizes) / len(sizes), 1e-30)
        yield Measure(
            "dual-mean", mean, "||mean dual||^2 in the same unit: 0 at a stationary point"
        )


def shape(saved: Saved, options: MeasureOptions) -> Iterator[Measure]:
    """Curvature and sharpness of the training loss."""
    surface, w, generator = saved.surface(options), saved.w, saved.generator()
    product = surface.product(w)
    top = curvature.top_eigenvalue(product, generator, w, TOLERANCE, STEPS)
    of = f"of the loss on {surface.num_samples} training samples"
    note = f"{of}; residual {top.residual:.1e} after {top.steps} products"
    yield Measure("hessian-top-eigenvalue", top.value, note, top.residual <= TOLERANCE)
    trace = curvature.trace(product, curvature.signs(options.probes, generator, w))
    note = f"{of}; standard error {trace.error:.2g} of {trace.probes} probes"
    yield Measure("hessian-trace", trace.mean, note)
    sharp = curvature.sharpness(surface, w, options.radius, top.vector)
    yield Measure("sharpness", sharp, f"{of}, at radius {options.radius:g}; a lower bound")


class Landscape(NamedTuple):
    """The training loss around a model."""

    at: list[float]  # (n,), places on both axes, in lengths of the filters
    losses: Tensor  # (n, n)


def landscape(saved: Saved, options: MeasureOptions) -> Landscape:
    """The landscape in filter-normalised directions."""
    surface, generator = saved.surface(options), saved.generator()
    one, two = (curvature.filter_normalised(surface.model, saved.w, generator) for _ in range(2))
    at = torch.linspace(-SPAN, SPAN, GRID, dtype=torch.float64).tolist()
    with tf32_as("float32", saved.w.device):
        return Landscape(at, curvature.landscape(surface, saved.w, one, two, at))
