"""The recorded run of every runtime: a configuration and its clients in, a run directory out."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from fedaccord.config import RunConfig, in_use, resolved
from fedaccord.core.cohort import Cohorts
from fedaccord.core.cost import upload_bytes
from fedaccord.core.request import ModelSettings
from fedaccord.core.rounds import RoundState, forget
from fedaccord.core.vectors import Vector, is_finite, leaves
from fedaccord.federation.clock import Clock, simulated_devices
from fedaccord.federation.device_profiles import NONE, Device
from fedaccord.federation.errors import FederationError
from fedaccord.federation.evaluation import check_tests
from fedaccord.federation.fleet import IN_PROCESS, SIMULATED, Fleet
from fedaccord.federation.replies import MAX_LOSS
from fedaccord.federation.round import Round
from fedaccord.federation.run import Run, check_real_time
from fedaccord.federation.session import Session
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.process.interrupts import Interrupts, interruptible
from fedaccord.runs import RunDirectory, trackers
from fedaccord.runs.best import BEST, Best
from fedaccord.runs.directory import COMPLETED, FAILED, MODEL
from fedaccord.runs.logbook import Logbook
from fedaccord.runs.origin import processor
from fedaccord.task import Task, find_device, task_of_card
from fedaccord.task.losses import AUTO, LOSSES
from fedaccord.wire.handshake import class_names
from fedaccord.wire.tensor_array import to_record, to_tensor

log = logging.getLogger("flwr")


def run(
    fleet_for: Callable[[Logbook], Fleet],
    config: RunConfig,
    task: Task | None,
    on_round: Callable[[Round], None] | None = None,
    at: int | None = None,
    cohorts: Cohorts | None = None,
    in_process: bool = True,
    **facts: Any,
) -> RunDirectory:
    """One run of the configuration, written to its run directory.

    fleet_for: the clients, once the run directory exists. task: None: the server has no data, and
    the clients report how their model is built. With ``config.resume`` the run resumes from its
    last checkpoint, or from that of ``at`` rounds. ``facts`` go into summary.json. A run that is
    interrupted, also by SIGTERM or SIGHUP, or that fails leaves a directory that can be read, with
    the model as it was then. in_process: checkpoints contain the clients' states.
    Raises ValueError, in one line, for settings that do not fit the task, the clients or a run that
    resumes, and FederationError if the run fails: no round counts, or the model diverges.
    """
    method = config.strategy
    trackers.check(config.tracker)
    if in_process and method.device_profile == NONE:
        check_real_time(method, deployed=False)
    simulated = None
    if in_process and method.device_profile != NONE:
        simulated = simulated_devices(method, config.num_clients)
    if task:
        check_tests(method, task.num_tests)
    data, metrics = (task.fingerprint, task.metrics) if task else ({}, config.task.metrics)
    used = machine(task.device if task else find_device(config.task.device))
    used |= {"gradients-per-step": method.cost.gradients} | resolved(method)
    if task and config.task.loss == AUTO:
        used["loss"] = next(name for name, loss in LOSSES.items() if loss is task.loss)
    with (
        interruptible() as interrupts,
        closing(Logbook(config, used, data, at, in_process, metrics)) as log_book,
        summarised(log_book.directory, interrupts, facts),
        followed(config, log_book) as tracker,
    ):
        directory = log_book.directory
        log.info("run directory: %s", directory.path)
        fleet = fleet_for(log_book)
        if task is None:
            least = 1 if log_book.after else 0  # `Run.begin` waits for those that a round needs
            reported = fleet.card(method.wait_timeout, method.model_settings, least)
            task = task_of_card(config.task, reported)
            log_book.best.check(config, task.metrics)  # the usual metric depends on the targets
        if not method.hides_clients and (counts := task.class_counts()) is not None:
            directory.save_classes(class_names(task.card), counts)
        card = card_of(task, method.model_settings)

        def save_best(best: Best) -> None:
            session = current.session
            save(directory, session.arrays(*best.vectors(session)), card, BEST)

        def record(round: Round) -> None:
            with interrupts.held():
                if log_book.best.is_new(round, current.session):
                    save_best(log_book.best)
                # with a checkpoint: a run that is killed has a model
                log_book.record(round, lambda: save(directory, current.output(), card))
                tracker.log(round.number, round.metrics)
            if on_round:
                on_round(round)

        current = run_of(
            method,
            fleet,
            task,
            config.num_server_rounds,
            config.eval_train,
            simulated,
            cohorts=cohorts,
            on_round=record,
            book=log_book,
        )
        try:
            state = log_book.restore(current.session)
            if log_book.best.facts():  # the file may be of a later round
                save_best(log_book.best)
            elif log_book.best.metric:
                directory.path.joinpath(BEST).unlink(missing_ok=True)
            result = current.play(state and with_lost_states(state, current.session, config))
            check_result(current, result, loss_of(method, task))
        finally:
            interrupts.ignore()
            if current.has_begun:
                facts |= current.facts()
            if best_model := log_book.best.facts():
                facts["best-model"] = best_model
            if current.has_begun or not log_book.after:
                save(directory, current.output(), card)
            log_book.checkpoint()
    return directory


@contextmanager
def summarised(
    directory: RunDirectory, interrupts: Interrupts, facts: dict[str, Any]
) -> Iterator[None]:
    """A block that ends with the run's summary: completed, interrupted or failed, and why."""
    status = FAILED
    try:
        yield
        status = COMPLETED
    except (KeyboardInterrupt, SystemExit):  # Flower stops an app by SystemExit
        status = "interrupted"
        raise
    except Exception as error:
        facts["reason"] = " ".join(str(error).split())
        raise
    finally:
        interrupts.ignore()
        directory.summarise(status, **facts)
        log.info("run %s: %s", status, directory.path)


@contextmanager
def followed(config: RunConfig, log_book: Logbook) -> Iterator[trackers.Tracker]:
    """A block with a tracker."""
    path, is_completed = log_book.directory.path, False
    tracker = trackers.start(config.tracker, path, in_use(config), log_book.after)
    try:
        yield tracker
        is_completed = True
    finally:
        tracker.end(is_completed)


def with_lost_states(state: RoundState, session: Session, config: RunConfig) -> RoundState:
    """The state from which a run resumes, if the states of its clients were in Flower's memory.

    A new simulation of Flower has none of them: without this, each client would report the loss in
    its first round, and that round would be lost.
    """
    is_simulated = session.fleet.place == SIMULATED
    clients = (state.accepted != -1).nonzero().flatten().tolist()
    stateless = next(leaves(session.client_state()), None) is None
    if not is_simulated or config.state_dir or stateless or not clients:
        return state
    log.warning(
        "resume: the clients' states were in the memory of the last simulation and are lost: all "
        "clients start afresh from the model of round %d; set state-dir to store them in files",
        state.t,
    )
    return forget(session.method, session.half, state, clients)


def card_of(task: Task, settings: ModelSettings) -> dict[str, Any]:
    """How to build and feed the model of the run, in JSON's types, as `Task.card`.

    For tensors that are not saved because they are frozen or stay at clients, it has the seed, a
    digest of each ``frozen`` one, and the names of the ``local`` ones.
    """
    card, model = {**task.card, "class-names": class_names(task.card)}, task.model(settings)
    if not (model.frozen or model.all_local_names):
        return card
    return card | {
        "seed": task.seed,
        "frozen": model.frozen_hashes(),
        "local": model.all_local_names,
    }


def save(
    directory: RunDirectory, arrays: ArrayRecord, card: Mapping[str, Any], name: str = MODEL
) -> None:
    """The model, with what is needed to build and feed it."""
    directory.save_model({name: to_tensor(array) for name, array in arrays.items()}, card, name)


def machine(device: torch.device | str) -> dict[str, Any]:
    """Device, processor and threads."""
    device = torch.device(device)
    used = {"device": str(device)}
    if device.type == "cuda":
        used["gpu"] = torch.cuda.get_device_name(device)
    return used | {"cpu": processor(), "threads": torch.get_num_threads()}


def run_of(
    method: FederatedStrategy,
    fleet: Fleet,
    task: Task,
    num_rounds: int,
    eval_train: bool = False,
    simulated: Sequence[Device] | None = None,
    **more: Any,
) -> Run:
    """A `Run`, made with ``more``, that is evaluated on the task's test samples, unless only the
    clients evaluate.

    ``eval_train``: evaluate the output model on the training samples too; generalisation-gap is
    its train accuracy less its test accuracy, both in [0, 1]. ``simulated``: the devices of a
    device profile; None: read or drawn here.
    """
    settings, at_once = method.model_settings, fleet.evaluators
    model = task.model(settings)

    def evaluate(_: int, w: Vector, buffers: Vector | None) -> dict[str, float]:
        return task.evaluate(w, settings, at_once, buffers)

    def evaluate_train(
        w: Vector, buffers: Vector | None, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        train = task.evaluate_train(w, settings, at_once, buffers)
        if "train-accuracy" in train and (accuracy := f"{task.split}-accuracy") in metrics:
            train["generalisation-gap"] = train["train-accuracy"] - metrics[accuracy]
        return train

    initial = initial_arrays(task, settings, fleet.home)
    more["model"] = model.layout
    if method.device_profile != NONE and fleet.place == IN_PROCESS:
        up = upload_bytes(method.cost, method.client_half(), model.w)
        simulated = simulated or simulated_devices(method, fleet.num_clients)
        samples = task.num_examples, task.samples_of_step
        more["clock"] = Clock(simulated, *samples, up, method.cost.gradients)
    if method.evaluation != "clients":
        more["evaluate"] = evaluate
        more["evaluate_output"] = evaluate_train if eval_train else None
    return Run(method, fleet, initial, num_rounds, **more)


def loss_of(method: FederatedStrategy, task: Task) -> str:
    """The metric that shows whether the output model diverged."""
    return "client-loss" if method.evaluation == "clients" else f"{task.split}-loss"


def check_result(run: Run, result: Result, name: str = "test-loss") -> None:
    """Raises FederationError if there is no trained model; name: of its loss."""
    s, model = run.state, run.output()
    replied = any(row["replies"] for row in result.train_metrics_clientapp.values())
    never = run.method.has_noisy_sums and not (s.accepted >= 0).any()  # noise alone is a step
    if not replied and (s.failed == s.t or never):  # no round that counted
        drawn = ", or raise fraction-train if none was drawn" if never else ""
        raise FederationError(
            f"none of {s.t} rounds counted (see the reasons above): the model is untrained; fix "
            f"the clients, or lower lr if they diverged{drawn}"
        )
    evaluated = {
        **result.evaluate_metrics_serverapp.get(s.t, {}),
        **result.evaluate_metrics_clientapp.get(s.t, {}),
    }
    loss = cast(float, evaluated.get(name, 0.0))
    tensors = [to_tensor(array) for array in model.values()]
    finite = all(is_finite(x) for x in tensors if x.is_floating_point())
    if not (finite and abs(loss) <= MAX_LOSS):
        what = f"its {name.replace('-', ' ')} is {loss:.4g}" if finite else "it holds NaN or Inf"
        raise FederationError(
            f"the model diverged: {what} after {s.t} rounds; lower lr, or bound the gradients by "
            "clip-norm"
        )


def initial_arrays(
    task: Task, settings: ModelSettings, home: torch.device | str = "cpu"
) -> ArrayRecord:
    """The parameters of a fresh model under their names, and the buffers that are averaged; home:
    where the server's vectors are stored."""
    model = task.fresh_model(settings, home)
    return to_record(model.state_dict() | model.named_buffers())
