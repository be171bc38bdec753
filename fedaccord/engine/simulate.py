"""`simulate`: a run in this process from tensors, modules and notebooks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from fedaccord import recorded_run
from fedaccord.config import RunConfig, in_use, method_keys, task_keys
from fedaccord.config import keys as known_keys
from fedaccord.core.options import plain
from fedaccord.engine import fleet_choice
from fedaccord.engine import vectorize as vectorized
from fedaccord.engine.checks import check_examples, check_functions
from fedaccord.engine.faults import Faults, FaultyFleet
from fedaccord.engine.history import History, Recorder
from fedaccord.engine.keywords import cohorts_of, keys_of, make_config, module_of, refusal_beside
from fedaccord.engine.own_task import own_task
from fedaccord.engine.run import quiet
from fedaccord.federation.round import Round
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.process import threads
from fedaccord.runs import logbook, named_contents
from fedaccord.runs.checkpoint import Checkpoint, Checkpoints
from fedaccord.strategies import METHODS
from fedaccord.task import forget_tasks, load_task
from fedaccord.task.batches import PAIRS, BatchFormat, Forward
from fedaccord.task.losses import AUTO
from fedaccord.task.multiplications import threads_of_task
from fedaccord.task.solver import Loss
from fedaccord.task.sources import is_function

ARGUMENTS = {  # keys that arguments of `simulate` set, or leave without effect
    "num-server-rounds": "rounds",
    "num-clients": "clients",
    "precision": "dtype",
    "fraction-train": "participation",
    "sampling": "participation",
}
DIRECTORY = (  # keys of a run directory
    "name",
    "out-dir",
    "tracker",
    "checkpoint-every",
    "state-dir",
    "keep-best",
)
MODEL = ("model", "stem", "device", "metrics")  # keys of a task whose samples are arguments


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

    algo: a name from METHODS, or a strategy; settings that are a strategy's arguments are refused
    beside it.

    clients: the samples of each; by default the partition of ``dataset`` by the run config. A
    client has a tuple of tensors (inputs, targets), a map-style torch Dataset, from which batches
    are drawn as from tensors, or a function. The function receives a torch.Generator and returns
    the batches of a pass. The generator's state depends only on seed, round, client and pass, as do
    the default generators of PyTorch, NumPy and Python: without other randomness the weights are
    the same when a run resumes and with ``workers``. The function is also called before round 1 to
    count its samples; every pass must end and have as many. Its batches are used unchanged for any
    ``batch_size``, which is refused if all clients are functions.
    test: samples to evaluate on, with ``clients``, in one of these forms, of which each client
    that evaluates has a share (not of a function's); or a list with each client's own samples, None
    for a client without any, all of which the server uses.

    model: a module with the initial parameters, a function that returns one (it is called once, and
    its random numbers come from ``seed``), or a name of `fedaccord run --list-keys`. forward:
    ``forward(model, batch)`` returns the predictions for batches of another form than (inputs,
    targets) or a dict of ``img`` and ``label``: any dict or tuple with tensors. targets: the key of
    the targets in a dict; in a tuple they are the last element. loss: ``loss(predictions,
    targets)``, a mean over a batch, or the run config's ``loss``; ``metrics="accuracy, f1"`` is
    measured beside it, or functions of a module.

    participation: the share of clients a round, or the clients of every round (if buffered, those
    that fill free slots, in this order). dtype: float32 (the default) or float64, of floating
    inputs, model and every vector; integer inputs, as token ids, stay integers. record: "weights"
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
        raise ValueError("simulate: expected a call outside torch.inference_mode(), got one inside")
    if not isinstance(algo, str | FederatedStrategy):
        example = f"{algo.__name__}()" if isinstance(algo, type) else "Scaffold(lr=0.05)"
        raise ValueError(f"algo: expected a name, or a strategy, e.g. {example}, got {algo!r}")
    check_functions(on_round=on_round, faults=faults)
    if not isinstance(resume, str | Path | None):
        raise ValueError(f"resume: expected a run directory, or None, got {resume!r}")
    if record not in ("metrics", "weights"):
        raise ValueError(f"record: expected 'metrics' or 'weights', got {record!r}")
    settings: dict[str, Any] = {"num-server-rounds": rounds, "vectorize": vectorize}
    share: Any = plain(participation)
    cohorts = None
    if isinstance(share, int | float) and not isinstance(share, bool):
        settings["fraction-train"] = float(share)
    elif share is not None:
        cohorts = cohorts_of(share)
    if dtype is not None:
        settings["precision"] = _precision(dtype)
    if isinstance(model, str):
        settings["model"] = model
    if isinstance(loss, str):
        settings["loss"] = loss
    if clients is not None:
        clients = _listed(clients)
        settings["num-clients"] = len(clients)
    elif not isinstance(model, str):
        raise ValueError("model: expected a name with dataset=, or a module with clients=")
    else:
        own = {"test": test is not None, "forward": forward is not None}
        own |= {"loss": not isinstance(loss, str), "targets": targets != PAIRS.targets}
        for name in (name for name, is_set in own.items() if is_set):
            raise TypeError(f"{name}: expected it with clients=, got it without")
    values = keys_of(keys)
    config = _config(algo, values, settings, has_cohorts=cohorts is not None)
    rounds, method = config.num_server_rounds, config.strategy

    threads.check(config.threads)
    by_functions = bool(clients) and all(map(is_function, clients or ()))
    if by_functions and "batch-size" in values:
        raise TypeError(
            "batch-size: expected it without functions as clients, whose batches are used as they "
            "are; leave it out"
        )
    if clients is not None:
        module = model if isinstance(model, str) else module_of(model, method.seed)
        task = own_task(config, clients, test, module, loss, BatchFormat(forward, targets))
    else:
        forget_tasks()  # files, and what functions read, may have changed
        task = load_task(config.task, num_clients=config.num_clients)
    check_examples(task, method)
    chosen = threads_of_task(config.threads, task, method, config.workers)
    checkpoint = None if resume is None else Checkpoints(Path(resume) / logbook.FOLDER).load()
    if checkpoint is not None and vectorize == "auto":
        vectorize = logbook.vectorize_of(checkpoint.facts)
    sizes = map(len, cohorts) if cohorts else [method.cohort_size(len(task.clients))]
    choice = vectorized.choose(vectorize, task, method, round(fmean(sizes)))
    config = config.having("vectorize", choice.as_set)
    fleets = fleet_choice.choose(config, task, None, choice.vectorize, drawn=cohorts is None)
    with chosen.in_use(), quiet(), fleets as fleet_for:
        fleet = fleet_for(None)
        recorder = Recorder(
            fleet.store.state, record == "weights", on_round, last_state_of=fleet.store.last_state
        )
        run = recorded_run.run_of(
            method,
            fleet if faults is None else FaultyFleet(fleet, faults),
            task,
            rounds,
            config.eval_train,
            cohorts=cohorts,
            on_round=recorder,
        )
        state = None
        if checkpoint is not None:
            if isinstance(algo, str) or type(algo) in METHODS.values():
                besides = {*({"fraction-train", "sampling"} if cohorts is not None else ())}
                besides |= {"batch-size"} if by_functions else set()
                if clients is not None and not isinstance(algo, str):
                    # the run may have named its data and model
                    besides |= known_keys().keys() - method_keys() - {"algo"}
                logbook.check_resumed(config, checkpoint.facts["settings"], besides)
            _check_resumable(config, checkpoint, Path(str(resume)))
            if clients is None:
                now = named_contents.of_run(config, task.fingerprint)
                logbook.with_earlier_code(now, checkpoint.facts, in_use(config))
            state = logbook.restore(run.session, checkpoint)
        result = run.play(state)
        recorded_run.check_result(run, result, recorded_run.loss_of(method, task))
        return recorder.history(run.output(), in_use(config))


def _refusal(key: str, method: FederatedStrategy | None, *, own_data: bool, own_model: bool) -> str:
    """Why a key has no effect beside the other arguments, in one line; empty if it has one."""
    if method is not None and key in method_keys():
        return refusal_beside(key, method)
    if key in DIRECTORY:
        return f"{key}: simulate writes no run directory; use fedaccord.run"
    if own_data and key in task_keys() and key not in MODEL:
        return f"{key}: expected it without clients=, whose samples are used as given"
    if own_model and key == "stem":
        return "stem: expected it with model='resnet18', got a module"
    return ""


def _listed(clients: Any) -> list[Any]:
    """The samples of each client. Raises ValueError, in one line, for anything but a list."""
    if not isinstance(clients, Iterable) or isinstance(clients, Mapping | str):
        raise ValueError(
            "clients: expected a list of the samples of each client, got "
            f"{type(clients).__name__}; num_clients=... partitions a dataset="
        )
    return [*clients]


def _config(
    algo: str | FederatedStrategy,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    has_cohorts: bool,
) -> RunConfig:
    """The configuration of a call. values: of run-config keys; settings: of other arguments.

    Raises TypeError, in one line, for a key that has no effect beside the arguments or is given by
    both, ValueError as `RunConfig.make`.
    """
    method = None if isinstance(algo, str) else algo
    own_data, own_model = "num-clients" in settings, "model" not in settings
    refusal = partial(_refusal, method=method, own_data=own_data, own_model=own_model)
    explicit = {*values, *({"fraction-train", "precision"} & settings.keys())}
    for why in filter(None, map(refusal, sorted(explicit))):
        raise TypeError(why)
    settings = dict(settings)
    if isinstance(algo, str):
        settings["algo"] = algo
        kind = METHODS.get(algo)
        if has_cohorts and kind is not None and kind.all_clients:
            settings["fraction-train"] = 1.0  # whether the cohorts have all is checked
    own_keys = {*settings, *(("fraction-train", "sampling") if has_cohorts else ())}
    for key in sorted(values.keys() & own_keys):
        if key == "num-server-rounds":  # rounds= has a default
            raise TypeError(f"{key}: expected it as rounds=, got num_server_rounds=")
        raise TypeError(f"{key}: expected it or {ARGUMENTS[key]}=, got both")
    values = {**values, **settings}
    arguments = {key: name for key, name in ARGUMENTS.items() if key in own_keys}
    config = make_config(values, method, arguments=arguments, refusal=refusal)
    for key, why in config.unread_keys().items():
        if key in explicit and not (key == "fraction-train" and values[key] == 1):
            raise TypeError(f"{arguments.get(key, key)}: {why}; leave it out")
    return config


def _check_resumable(config: RunConfig, checkpoint: Checkpoint, folder: Path) -> None:
    """Raise ValueError, in one line, if no round is left, or states or privacy do not allow one."""
    if checkpoint.number >= config.num_server_rounds:
        raise logbook.is_done("resume", checkpoint.number, "rounds")
    logbook.check_states(config, checkpoint)
    logbook.check_budget(config, checkpoint, folder)


def _precision(dtype: torch.dtype) -> str:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    return str(dtype).removeprefix("torch.")
