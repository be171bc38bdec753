"""`fedaccord doctor`: versions, devices, Flower's daemon, Ray, space, and whether a run fits."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedaccord.cli.check import Check, fail, ok, show, size, warn
from fedaccord.cli.console import Json
from fedaccord.cli.settings import ConfigFile, Pairs, Preset, read_begun, read_settings, unread
from fedaccord.process import threads
from fedaccord.process.extras import install

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from fedaccord.config import RunConfig
    from fedaccord.data.kind import Facts
    from fedaccord.task import Task
    from fedaccord.task.flat_model import FlatModel


def doctor(
    pairs: Pairs = None,
    config: ConfigFile = None,
    preset: Preset = None,
    deployment: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Check only this machine's folder of `fedaccord deploy init`."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check versions, devices, Flower's daemon, Ray, disk space, and whether settings fit here.

    Settings are written as for `fedaccord run`. No data are fetched or decoded. The exit code is 1
    if a check fails. On a server or a device of a deployment it checks ports, certificates, keys,
    clocks, versions and space:

    fedaccord doctor --deployment ~/device-0
    """
    if deployment is not None:
        from fedaccord.cli.deployment import check_deployment

        show([*check_deployment(deployment.expanduser().absolute())], as_json)
        return
    from fedaccord.config import RunConfig

    settings = None
    checks = [*check_versions(), *check_devices(), check_daemon(), check_ray()]
    try:
        begun = read_begun(config, preset)
        settings = RunConfig.make(read_settings(pairs or [], begun))
        for line in unread(settings, pairs or [], begun):
            checks.append(warn("settings", line))
    except (ValueError, FileNotFoundError) as error:
        checks.append(fail("settings", error))
    own = settings.out_dir if settings else ""
    checks += check_disks(Path(own) if own else Path.home() / "fedaccord-runs")
    if settings:
        checks += check_settings(settings)
    show(checks, as_json)


def check_versions() -> Iterator[Check]:
    from importlib.metadata import PackageNotFoundError, version

    yield ok("python", platform.python_version())
    for package in ("fedaccord", "flwr", "torch", "torchvision", "ray"):
        try:
            have = version(package)
        except PackageNotFoundError:
            without = {
                "fedaccord": "not installed as a package; in its clone type `uv sync`",
                "ray": f"not installed: `flwr run` cannot simulate; {install('run')}",
                "torchvision": f"not installed: no images, no ResNet-18; {install('data')}",
            }
            yield warn(package, without.get(package, f"unknown; pip install {package}"))
            continue
        pin = flower_versions() if package == "flwr" else None
        if pin is not None and have not in pin:
            advice = f"FedAccord is written for {pin}; pip install 'flwr{pin}'"
            yield warn(package, f"{have}, but {advice}")
        else:
            yield ok(package, have)


def flower_versions() -> "SpecifierSet | None":
    """The releases of Flower that FedAccord's metadata name; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    with suppress(PackageNotFoundError):
        for text in requires("fedaccord") or []:
            requirement = Requirement(text)
            if requirement.name == "flwr":
                return requirement.specifier
    return None


def check_devices() -> Iterator[Check]:
    import torch

    yield ok("cpu", f"{os.cpu_count()} cores, {threads.cores()} for this process")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield ok(f"cuda:{i}", f"{gpu.name}, {size(gpu.total_memory)}")
    if not torch.cuda.device_count():
        yield ok("cuda", "no GPU")


def check_daemon() -> Check:
    """Whether Flower's local daemon runs, since when, its folder, and how to end it.

    It keeps the folder and the environment in which it started, and does not end by itself.
    """
    from fedaccord.compat.flower import LOCAL_PORT, LOCAL_PORT_VARIABLE

    what, port = "flower daemon", os.environ.get(LOCAL_PORT_VARIABLE, LOCAL_PORT)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return fail(what, f"expected a port, got {port!r}; unset {LOCAL_PORT_VARIABLE}")
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
    except OSError:
        first = "the first `flwr run` starts it in its folder and environment"
        return ok(what, f"none on port {port}; {first}")
    if (daemon := _find_daemon(port)) is None:
        other = f"is used by another program or user; set {LOCAL_PORT_VARIABLE}"
        return warn(what, f"port {port} {other} to a free one for `flwr run`")
    since = datetime.fromtimestamp(daemon["create_time"])
    text = f"runs since {since:%Y-%m-%d %H:%M} in {daemon['cwd']} on port {port}; "
    text += f"`kill {daemon['pid']}` ends it, and the next `flwr run` starts another"
    python = Path(daemon["cmdline"][0])
    if python.parent != Path(sys.executable).parent:
        return warn(what, f"of another Python environment, {python}, {text}")
    return ok(what, text)


def _find_daemon(port: str) -> dict[str, Any] | None:
    """Facts of the process that serves Flower's local runs on ``port``; None: not found."""
    import psutil

    from fedaccord.compat.flower import LOCAL_PORT_OPTION, LOCAL_PROGRAM

    for process in psutil.process_iter(["pid", "cmdline", "cwd", "create_time"]):
        words: list[str] = process.info["cmdline"] or []
        names = [Path(word).name for word in words[:2]]  # a script, after its interpreter
        if LOCAL_PROGRAM in names and (LOCAL_PORT_OPTION, port) in pairwise(words):
            return process.info
    return None


def check_ray() -> Check:
    """Whether the Ray cluster that simulations here join responds; Ray waits if it does not."""
    from fedaccord.federation import ray_cluster

    what, address = "ray cluster", ray_cluster.named().address
    if problem := ray_cluster.unreachable():
        return warn(what, problem)
    if not address:
        return ok(what, "none: a simulation starts its own")
    joined = ":" in address and "/" not in address
    return ok(what, f"at {address}, which simulations join" if joined else address)


def check_disks(out_dir: Path) -> Iterator[Check]:
    from fedaccord.data.cache import cache_folder
    from fedaccord.storage.files import nearest

    for what, folder in (("run folder", out_dir), ("cache folder", cache_folder())):
        existing = nearest(folder)
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            yield fail(what, f"{folder} cannot be written; choose another")
            continue
        free = shutil.disk_usage(existing).free
        text = f"{size(free)} free in {folder}"
        yield ok(what, text) if free > 1e9 else warn(what, f"only {text}")


def check_settings(settings: "RunConfig") -> Iterator[Check]:
    """Whether the settings are valid and fit into memory in process."""
    from fedaccord.federation.budget import first_of
    from fedaccord.federation.device_profiles import NONE
    from fedaccord.federation.evaluation import check_tests
    from fedaccord.runs.best import Best
    from fedaccord.task import find_device

    strategy, clients = settings.strategy, settings.num_clients
    try:
        yield ok("device", str(find_device(settings.task.device)))
        threads.check(settings.threads)
        strategy.check_clients(clients)
        if graph := strategy.topology.describe(clients):
            yield ok("graph", graph)
        if guarantee := strategy.guarantee:
            at = strategy.fraction_train, settings.num_server_rounds, clients
            yield ok("privacy", f"noise multiplier {first_of(guarantee, *at).multiplier:.4g}")
    except ValueError as error:
        yield fail("settings", error)
        return
    try:
        _check_start(settings)
    except (ValueError, OSError) as error:
        yield fail("settings", error)
    if strategy.is_buffered and strategy.device_profile == NONE:
        yield warn("schedule", "buffered without device-profile: SuperNodes alone support it")
    facts, loaded = yield from _check_data(settings)
    try:
        if loaded:
            check_tests(strategy, loaded.num_tests)
    except ValueError as error:  # devices may have test samples of their own
        yield (warn if strategy.evaluation == "clients" else fail)("evaluation", str(error))
    try:
        if settings.keep_best:
            Best(settings, (loaded or settings.task).metrics)
    except ValueError as error:
        yield fail("keep-best", error)
    if facts is None:
        return
    model = yield from _check_model(settings, facts, loaded)
    if model is not None:
        yield from _check_memory(settings, model, facts.size)


def _check_start(settings: "RunConfig") -> None:
    """Raises ValueError or OSError, in one line, if `fedaccord run` refuses the workers, the file
    of devices or the run directory."""
    from fedaccord.federation.clock import simulated_devices
    from fedaccord.federation.device_profiles import NONE
    from fedaccord.runs.logbook import check_directory

    threads.check_workers(settings.workers, settings.ray_address)
    if settings.strategy.device_profile != NONE:
        simulated_devices(settings.strategy, settings.num_clients)
    check_directory(settings)


def _check_data(
    settings: "RunConfig",
) -> Generator[Check, None, "tuple[Facts | None, Task | None]"]:
    """Facts of the data without decoding them (None: unknown), and the task if they are decoded. A
    function is called."""
    from fedaccord.data import datasets
    from fedaccord.data.function import FUNCTION
    from fedaccord.data.kind import Facts
    from fedaccord.task import load_task
    from fedaccord.task.models import vocabulary_of

    task, clients, data, tokens = settings.task, settings.num_clients, None, 0
    loaded: Task | None = None
    kind = datasets.kind_of(task.dataset)
    if kind.origin == "user" and not task.data_dir and settings.strategy.evaluation == "clients":
        yield warn("data", "no data-dir: all training and evaluation is at devices with their own")
        return None, None
    facts, find = kind.facts, datasets.load if kind is FUNCTION else datasets.cached
    try:
        if data := find(task.dataset, task.data_dir, task.reading):
            tokens = data.vocabulary or vocabulary_of(task.model, data.x_train, data.x_test)
    except FileNotFoundError as error:
        yield warn("data", "to be fetched") if task.download and facts else fail("data", error)
        if facts is None:
            return None, None
    except ValueError as error:
        yield fail("data", error)
        return None, None
    if data:
        arrays = (data.x_train, data.y_train, data.x_test, data.y_test)
        shape, samples = tuple(data.x_train.shape[1:]), len(data.y_train)
        facts = Facts(shape, data.outputs, samples, sum(x.nbytes for x in arrays), tokens)
    if facts is None:
        yield warn("data", f"{task.dataset}: unknown until it is decoded; run once to check it")
        return None, None
    where = "decoded" if data else "not decoded yet"
    words = f"{task.dataset}, {facts.samples:,} training samples, {size(facts.size)}, {where}"
    yield ok("data size", words)
    if data:
        try:
            loaded = load_task(task, num_clients=clients)
            yield ok("partition", f"{task.partition}, {clients} clients")
        except (ValueError, FileNotFoundError) as error:
            key = str(error).partition(":")[0]
            if key in ("loss", "metrics"):
                yield fail(key, error)
            elif kind.origin == "user":
                yield warn("partition", f"{error}; devices with their own data have no part of it")
            else:
                yield fail("partition", error)
            return facts, None
        try:
            loaded.model(settings.strategy.model_settings)
        except ValueError as error:
            yield fail("model", error)
            return None, None
    elif clients > facts.samples and task.partition != "file" and not task.samples_per_client:
        words = f"{clients:,} clients for {facts.samples:,} samples"
        yield fail("partition", f"{words}; use fewer clients, or set samples-per-client")
    return facts, loaded


def _check_model(
    settings: "RunConfig", facts: "Facts", loaded: "Task | None"
) -> Generator[Check, None, "FlatModel | None"]:
    """The model; None if it does not fit the data."""
    import torch

    from fedaccord.core.vectors import dtype_of
    from fedaccord.task import models
    from fedaccord.task.flat_model import flat_model
    from fedaccord.task.multiplications import multiplications

    task, dtype = settings.task, dtype_of(settings.strategy.precision)
    try:
        if loaded:
            module, (inputs, _) = loaded.module(), loaded.example(1, dtype)
        else:
            more: dict[str, Any] = {"stem": task.stem, "vocabulary": facts.vocabulary}
            module = models.build(task.model, facts.shape, facts.outputs, **more)
            inputs = torch.zeros(1, *facts.shape, dtype=dtype)
        model = flat_model(module, settings.strategy.model_settings, "cpu")
    except ValueError as error:
        yield fail("model", error)
        return None
    words = f"{task.model}, d = {model.w.numel():,} parameters, {size(model.w.nbytes)} a vector"
    if local := model.initial_local.nbytes:
        words += f", and {size(local)} that stay at each client"
    yield ok("model", words)
    # with batch-size=0 a client is one batch
    batch = settings.strategy.batch_size or facts.samples // settings.num_clients
    used = threads.choose(
        settings.threads, lambda: batch * multiplications(model, inputs), settings.workers
    )
    yield ok("threads", str(used))
    return model


def _check_memory(settings: "RunConfig", model: "FlatModel", data: int) -> Iterator[Check]:
    """data: bytes of the decoded data."""
    from fedaccord.engine import store_choice
    from fedaccord.process.allocator import free_memory
    from fedaccord.storage.files import nearest

    strategy, clients = settings.strategy, settings.num_clients
    cost, active, vector = strategy.cost, strategy.cohort_size(clients), model.w.nbytes
    own = store_choice.state_bytes(strategy, model)
    stored = store_choice.choose(
        settings.client_state, strategy, clients, settings.num_server_rounds, own
    )
    state = clients * own
    # without a server the relay stores the vectors of every node
    vectors = cost.server * (clients if strategy.topology.is_decentralised else 1)
    server = vectors * vector
    messages = active * (cost.down + cost.up) * vector
    work = 4 * vector  # model, gradient, buffers
    need, free = server + messages + work + data, free_memory()
    words = f"{clients:,} x {own / vector:.3g} vectors, {size(state)}"
    if stored.on_disk:
        room = shutil.disk_usage(nearest(Path(settings.out_dir or Path.home()))).free
        words += f"; on disk: {size(stored.size)}, two for each that is visited, {size(room)} free"
        yield Check("fail" if stored.size > room else "ok", "client state", words)
    else:
        need += state
        yield ok("client state", words)
    yield ok("server state", f"{vectors:g} vectors, {size(server)}")
    words = f"at most {active:,} x {cost.down + cost.up:g} vectors a round, {size(messages)}"
    yield ok("messages", words)
    words = f"{size(need)} needed in process, without activations, {size(free)} free"
    if need > free:
        advice = "too big: use fewer clients, a smaller model or a method with less client state, "
        advice += "or spread the clients over machines by Flower's simulation or deployment"
        yield fail("memory", f"{words}; {advice}")
    else:
        tight = need > 0.7 * free
        yield Check("warn" if tight else "ok", "memory", words + ("; tight" if tight else ""))
