"""Runs in this process: `run` for a configuration, `simulate` for tensors and notebooks."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.backends import cpu

from fedaccord import recorded_run
from fedaccord.config import RunConfig, in_use, method_keys, task_keys
from fedaccord.config import keys as known_keys
from fedaccord.core.cohort import Cohorts
from fedaccord.core.options import plain
from fedaccord.data import partition
from fedaccord.engine import store_choice
from fedaccord.engine import vectorize as vectorized
from fedaccord.engine.checks import check_examples, check_functions, load_checked
from fedaccord.engine.faults import Faults, FaultyFleet
from fedaccord.engine.fleet import LocalFleet
from fedaccord.engine.history import History, Recorder
from fedaccord.engine.keywords import cohorts_of, keys_of, make_config, module_of, refusal_beside
from fedaccord.engine.own_task import own_task
from fedaccord.federation.round import Round
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.process import threads
from fedaccord.process.allocator import give_back_memory
from fedaccord.runs import RunDirectory, logbook, named_contents
from fedaccord.runs.checkpoint import Checkpoints
from fedaccord.strategies import METHODS
from fedaccord.task import Clients, Task, load_task
from fedaccord.task.batches import PAIRS, BatchFormat, Forward
from fedaccord.task.losses import AUTO
from fedaccord.task.multiplications import threads_of_task
from fedaccord.task.solver import Loss
from fedaccord.task.sources import is_function

if TYPE_CHECKING:
    from fedaccord.engine.workers import WorkersFleet

log = logging.getLogger("flwr")


def run(
    config: RunConfig,
    *,
    on_round: Callable[[Round], None] | None = None,
    cohorts: Cohorts | None = None,
    on_client: Callable[[int], None] | None = None,
    at: int | None = None,
) -> RunDirectory:
    """Run a configuration in this process, without a ClientApp; see `recorded_run.run`.

    config: of `RunConfig.make`; on_round: called with each round, from the evaluation of w^0 as
    round 0; cohorts: the clients of each round, instead of drawn ones; on_client: called with a
    client's number after its local round; at: the round of the checkpoint from which a config with
    ``resume`` goes on, None: the last one. Raises ValueError, in one line, on settings that do not
    fit, FederationError if the run fails.
    """
    check_functions(on_round=on_round, on_client=on_client)
    if at is not None and not config.resume:
        raise ValueError(f"at: expected None without resume=true in the configuration, got {at}")
    task = load_checked(config, cohorts)  # errors are raised before a file is written
    report = partition_report(task)
    counts = {"duplicated": report.duplicated, "unused": report.unused}
    facts = {name: count for name, count in counts.items() if count is not None}
    chosen = threads_of_task(config.threads, task, config.strategy, config.workers)
    with chosen.in_use():
        setting = logbook.as_begun(config, at)
        size = config.strategy.cohort_size(config.num_clients)
        choice = vectorized.choose(setting, task, config.strategy, size)
        if setting == "auto":
            log.info("%s", choice)
        config = config.having("vectorize", choice.as_set)
        load = partial(load_task, config.task, num_clients=config.num_clients)
        try:
            with _clients(config, task, load, choice.vectorize, on_client) as clients:
                return recorded_run.run(
                    clients, config, task, on_round, at, cohorts=cohorts, partition=facts
                )
        finally:
            give_back_memory()  # another run may follow in this process


def run_with(algo: str = RunConfig.algo, **keys: Any) -> Path:
    """Run a federation as `fedaccord run` does, without its log, and return its run directory.

    algo, keys: as of `simulate`, whose other arguments are not run-config keys. Raises ValueError
    on settings that do not fit, FederationError as `simulate`.
    """
    config = make_config(keys_of(keys) | {"algo": algo})
    with quiet():
        return run(config).path


@contextmanager
def _clients(
    config: RunConfig,
    task: Task,
    load: Callable[[], Task] | None,
    vectorize: bool,
    on_client: Callable[[int], None] | None = None,
    drawn: bool = True,
) -> Iterator[Callable[[logbook.Logbook | None], "LocalFleet | WorkersFleet"]]:
    """A function that makes the clients, in this process or in workers, from the run's logbook.

    load: makes a worker's task, None: it is sent this one; drawn: whether cohorts are drawn.
    """
    if config.state_dir and not config.resume:
        why = "Flower's clients read it, client-state those of this process"
        log.warning("state-dir=%s has no effect here: %s", config.state_dir, why)
    if not config.workers:
        _note_precision(config.strategy.precision, torch.device(task.device))

        def here(book: logbook.Logbook | None) -> LocalFleet:
            folder = book.directory.path if book else None
            setting, rounds = config.client_state, config.num_server_rounds
            store = store_choice.make_store(setting, config.strategy, task, rounds, folder, drawn)
            return LocalFleet(task, on_client, vectorize, store, task.device)

        yield here
        return
    loss = config.task.loss if load else ""  # else workers are sent the function
    for key, value in (("metrics", config.task.metrics), ("loss", loss)):
        if "__main__:" in value:
            raise ValueError(
                f"{key}: expected functions of a module that workers can import, got {value!r}: "
                "write them into a file, or set workers=0"
            )
    try:
        from fedaccord.engine.workers import workers_fleet  # with Ray, which takes a second
    except ImportError as error:
        raise ValueError(
            f"workers: expected Ray, found none ({error}); pip install 'flwr[simulation]'"
        ) from None
    with workers_fleet(
        task,
        load,
        workers=config.workers,
        address=config.ray_address,
        threads=torch.get_num_threads(),
        gpus=config.gpus_per_worker,
        vectorize=vectorize,
        on_client=on_client,
    ) as fleet:
        yield lambda _: fleet


def partition_report(task: Task) -> partition.Report:
    clients = task.clients
    assert isinstance(clients, Clients)
    assert clients.parts is not None
    assert isinstance(clients.y, Tensor)
    return partition.report(clients.parts, clients.y.numpy())


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Let only warnings, or only records of a higher level, through Flower's logger."""

    def loud(record: logging.LogRecord) -> bool:
        return record.levelno >= level

    log.addFilter(loud)  # of its own, so that blocks in several threads do not disturb each other
    try:
        yield
    finally:
        log.removeFilter(loud)


def simulate(
    algo: str | FederatedStrategy,
    *,
    clients: Iterable[Any] | None = None,
    test: Any = None,
    model: str | nn.Module | Callable[[], nn.Module] = "mlp",
    loss: str | Loss = AUTO,
    forward: Forward | None = None,
    targets: str = PAIRS.targets,
    rounds: int = 30,
    participation: float | Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | None = None,
    record: str = "metrics",
    faults: Faults | None = None,
    resume: str | Path | None = None,
    vectorize: str = "off",
    on_round: Callable[[Round], None] | None = None,
    **keys: Any,
) -> History:
    """Run a federation in this process: the rounds of `fedaccord run`, without a run directory.

    There are no messages and no ClientApp: the clients' local rounds are called directly.

    algo: a name from METHODS, or a strategy, which has its own settings: these cannot be given
    beside it.

    clients: the samples of each; by default the partition of ``dataset`` by the run config. A
    client has a tuple of tensors (inputs, targets), a map-style torch Dataset, from which batches
    are drawn as from tensors, or a function that gives the batches of a pass when it is called with
    a torch.Generator, whose state depends only on seed, round, client and pass, as do the default
    generators of PyTorch, NumPy and Python: a function without other randomness gives the same
    weights when a run resumes and with ``workers``. It is also
    called before round 1 to count its samples; every pass must end and have as many. Its batches
    are used unchanged for any ``batch_size``, which is refused if all clients are functions.
    test: samples to evaluate on, with ``clients``, in one of these forms, of which each client
    that evaluates has a share (not of a function's); or a list of each client's own, None for a
    client without, all of which the server uses.

    model: a module, whose parameters are the initial ones, a function that returns one (it is
    called once, and its random numbers come from ``seed``), or a name of `fedaccord run
    --list-keys`. forward: ``forward(model, batch)``, the
    predictions for batches of another form than (inputs, targets) or a dict of ``img`` and
    ``label``: any dict or tuple with tensors. targets: the key of the targets in a dict; in a tuple
    they are the last element. loss: ``loss(predictions, targets)``, a mean over a batch, or the run
    config's ``loss``; ``metrics="accuracy, f1"`` is measured beside it, or functions of a module.

    participation: the share of clients a round, or the clients of every round (if buffered, those
    that fill free slots, in this order). dtype: float32 (the default) or float64, of floating
    inputs, model and every vector; integer inputs, as token ids, are unchanged. record: "weights"
    keeps w^t, the averages and the client states of every round. faults: (round from 0, client) ->
    None, or a fault: "lost-message", "lost-reply", "duplicate", "late" or "crash" (the client's
    memory is lost). resume: a run directory; resume from its last checkpoint, to ``rounds`` in all.
    The History begins there. vectorize: many clients in one call, which is faster for small models
    and may differ in the last bits: "off", "on", or "auto", by a rule of sizes. on_round: called
    with every round, its state and its metrics; the first has number 0. keys: any run-config key,
    as ``local_steps=10`` or ``**{"scaffold.server-lr": 1.0}``; missing ones have the run config's
    defaults; ``clip_norm=None`` is off.

    Nothing is written to disk, except client states that do not fit into memory (``client_state``),
    in files that are removed with the process. Raises ValueError on settings, samples and models
    that do not fit, TypeError on arguments without effect, FileNotFoundError without a checkpoint
    to resume from, FederationError if no round counted or the model diverged.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "simulate: expected a call outside of torch.inference_mode(), got one in it"
        )
    if not isinstance(algo, str | FederatedStrategy):
        example = f"{algo.__name__}()" if isinstance(algo, type) else "Scaffold(lr=0.05)"
        raise ValueError(f"algo: expected a name, or a strategy, as {example}, got {algo!r}")
    check_functions(on_round=on_round, faults=faults)
    method = None if isinstance(algo, str) else algo
    values, cohorts = keys_of(keys), None
    settings: dict[str, Any] = {"num-server-rounds": rounds, "vectorize": vectorize}
    who: Any = plain(participation)
    if isinstance(who, int | float) and not isinstance(who, bool):
        settings["fraction-train"] = float(who)
    elif who is not None:
        cohorts = cohorts_of(who)
    if not isinstance(resume, str | Path | None):
        raise ValueError(f"resume: expected a run directory, or None, got {resume!r}")
    if record not in ("metrics", "weights"):
        raise ValueError(f"record: expected 'metrics' or 'weights', got {record!r}")
    if dtype is not None:
        settings["precision"] = _precision(dtype)
    explicit = {*values, *({"fraction-train", "precision"} & settings.keys())}
    own_model = not isinstance(model, str)
    refusal = partial(_refusal, method=method, own_data=clients is not None, own_model=own_model)
    for why in filter(None, map(refusal, sorted(explicit))):
        raise TypeError(why)
    if method is None:
        settings["algo"] = algo
        kind = METHODS.get(str(algo))
        if cohorts is not None and kind is not None and kind.all_clients:
            settings["fraction-train"] = 1.0  # whether the cohorts have all is checked
    if isinstance(model, str):
        settings["model"] = model
    if isinstance(loss, str):
        settings["loss"] = loss
    if clients is None:
        if not isinstance(model, str):
            raise ValueError("model: expected a name with dataset=, or a module with clients=")
        set_here = {"test": test is not None, "forward": forward is not None}
        set_here |= {"loss": not isinstance(loss, str), "targets": targets != PAIRS.targets}
        for name in (name for name, is_set in set_here.items() if is_set):
            raise TypeError(f"{name}: expected it with clients=, got it without")
    else:
        if not isinstance(clients, Iterable) or isinstance(clients, Mapping | str):
            raise ValueError(
                "clients: expected a list of the samples of each client, got "
                f"{type(clients).__name__}; num_clients=... deals out a dataset="
            )
        clients = [*clients]
        settings["num-clients"] = len(clients)
    own_keys = {*settings, *(("fraction-train", "sampling") if cohorts is not None else ())}
    for key in sorted(values.keys() & own_keys):
        raise TypeError(f"{key}: expected it or {ARGUMENTS[key]}=, got both")
    values |= settings
    arguments = {key: name for key, name in ARGUMENTS.items() if key in own_keys}
    config = make_config(values, method, arguments=arguments, refusal=refusal)
    rounds = config.num_server_rounds
    for key, why in config.unread_keys().items():
        if key in explicit and not (key == "fraction-train" and values[key] == 1):
            raise TypeError(f"{arguments.get(key, key)}: {why}; leave it out")

    threads.check(config.threads)
    by_functions = bool(clients) and all(map(is_function, clients or ()))
    if by_functions and "batch-size" in explicit:
        raise TypeError(
            "batch-size: expected it without functions as clients, whose batches are used as they "
            "are; leave it out"
        )
    if clients is not None:
        module = model if isinstance(model, str) else module_of(model, config.strategy.seed)
        task = own_task(config, clients, test, module, loss, BatchFormat(forward, targets))
    else:
        task = load_task(config.task, num_clients=config.num_clients)
    method = config.strategy
    check_examples(task, method)
    chosen = threads_of_task(config.threads, task, method, config.workers)
    checkpoint = None if resume is None else Checkpoints(Path(resume) / logbook.FOLDER).load()
    if checkpoint is not None and vectorize == "auto":
        vectorize = logbook.vectorize_of(checkpoint.facts)
    sizes = map(len, cohorts) if cohorts else [method.cohort_size(len(task.clients))]
    choice = vectorized.choose(vectorize, task, method, round(fmean(sizes)))
    config = config.having("vectorize", choice.as_set)
    clients_of = _clients(config, task, None, choice.vectorize, drawn=cohorts is None)
    with chosen.in_use(), quiet(), clients_of as make:
        own = make(None)
        recorder = Recorder(
            own.store.state, record == "weights", on_round, last_state_of=own.store.last_state
        )
        run = recorded_run.run_of(
            method,
            own if faults is None else FaultyFleet(own, faults),
            task,
            rounds,
            config.eval_train,
            cohorts=cohorts,
            on_round=recorder,
        )
        state = None
        if checkpoint is not None:
            besides = {*({"fraction-train", "sampling"} if cohorts is not None else ())}
            besides |= {"batch-size"} if by_functions else set()
            if clients is not None and not isinstance(algo, str):
                # the run may have named its data and model
                besides |= known_keys().keys() - method_keys() - {"algo"}
            if isinstance(algo, str) or type(algo) in METHODS.values():
                logbook.check_resumed(config, checkpoint.facts["settings"], besides)
            if checkpoint.number >= rounds:
                raise logbook.is_done("resume", checkpoint.number, "rounds")
            logbook.check_states(config, checkpoint)
            logbook.check_budget(config, checkpoint, Path(str(resume)))
            if clients is None:
                now = named_contents.of_run(config, task.fingerprint)
                logbook.with_earlier_code(now, checkpoint.facts, in_use(config))
            state = logbook.restore(run.session, checkpoint)
        result = run.play(state)
        recorded_run.check_result(run, result, recorded_run.loss_of(method, task))
        return recorder.history(run.output(), in_use(config))


def _note_precision(precision: str, device: torch.device) -> None:
    """Warn of one that this device does not gain by."""
    if precision == "tf32" and device.type != "cuda":
        log.warning("precision=tf32 has no effect on %s: it is float32 there", device)
    if precision == "bfloat16" and device.type == "cpu" and cpu.get_cpu_capability() == "AVX2":
        log.warning(
            "precision=bfloat16 is several times slower than float32 on a processor without "
            "AVX-512: set float32"
        )


# of a run directory
WRITTEN = ("name", "out-dir", "tracker", "checkpoint-every", "state-dir", "keep-best")
ARGUMENTS = {  # keys that arguments of `simulate` set, or leave without effect
    **{"num-server-rounds": "rounds", "num-clients": "clients", "precision": "dtype"},
    **{"fraction-train": "participation", "sampling": "participation"},
}
MODEL = ("model", "stem", "device", "metrics")  # keys of a task whose samples are arguments


def _refusal(key: str, method: FederatedStrategy | None, *, own_data: bool, own_model: bool) -> str:
    """Why a key has no effect beside the other arguments, in one line; empty if it has one."""
    if method is not None and key in method_keys():
        return refusal_beside(key, method)
    if key in WRITTEN:
        return f"{key}: simulate writes no run directory; use fedaccord.run"
    if own_data and key in task_keys() and key not in MODEL:
        return f"{key}: expected it without clients=, whose samples are used as given"
    if own_model and key == "stem":
        return "stem: expected it with model='resnet18', got a module"
    return ""


def _precision(dtype: torch.dtype) -> str:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    return str(dtype).removeprefix("torch.")
