"""The ClientApp: each client's part of the configured task, trained by `client/train.py`."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedaccord.client import node_limits, secure
from fedaccord.client.data import test_data, training_data
from fedaccord.client.train import (
    evaluate_locally,
    reply_to_evaluation,
    reply_to_training,
    train_locally,
)
from fedaccord.config import RunConfig, keys, keys_of, node_keys
from fedaccord.core import named
from fedaccord.core.node_config import (
    NUM_PARTITIONS,
    OWN_DATA,
    PARTITION_ID,
    STATE_DIR,
    check_spelling,
)
from fedaccord.core.options import unread
from fedaccord.core.request import ModelLayout, ModelSettings
from fedaccord.process import threads
from fedaccord.process.allocator import keep_freed_memory
from fedaccord.storage.disk import DiskStore, prepare
from fedaccord.storage.store import ContextStore, Store
from fedaccord.task import Task, load_task
from fedaccord.task.config import TaskConfig
from fedaccord.task.multiplications import threads_of_task
from fedaccord.wire.handshake import answer_handshake
from fedaccord.wire.instruction import is_handshake, read_instruction

__all__ = ["app", "configured_task", "evaluate_locally", "make_app", "train_locally"]


def make_app(task_of: Callable[[Context], Task]) -> ClientApp:
    """The ClientApp that trains on a client's task, from ``task_of``.

    Flower's simulation pickles the app with every message: functions of a module are sent by name.
    """
    app = ClientApp()
    app.train()(partial(_train, task_of))
    app.evaluate()(partial(_test, task_of))
    return app


def _train(task_of: Callable[[Context], Task], message: Message, context: Context) -> Message:
    if is_handshake(message):
        layout_of = partial(_layout, task_of, context)
        return answer_handshake(message, context, layout_of, partial(_card, task_of, context))
    if secure.is_stage(message):
        return secure.answer_stage(message, context)
    task, instruction = task_of(context), read_instruction(message)
    _check_client(context, instruction.client)
    node_limits.check_steps(instruction, task.num_examples(instruction.client), context.node_config)
    store, data = memory_of(context, instruction.federation), training_data(task, instruction)
    return secure.masked_reply(message, context, lambda: reply_to_training(message, store, data))


def _layout(
    task_of: Callable[[Context], Task], context: Context, settings: ModelSettings
) -> ModelLayout:
    """The tensors of the node's model; errors in its data appear before round 1."""
    try:
        _check_node(context)
        return task_of(context).model(settings).layout
    except (ValueError, OSError) as error:
        node = context.node_config
        key = next(key for key in (PARTITION_ID, *OWN_DATA) if key in node)
        raise ValueError(f"{key}={node[key]}: {error}") from None


def _card(task_of: Callable[[Context], Task], context: Context) -> Mapping[str, Any]:
    """How a server builds the model; statistics of the node's own data are not sent."""
    task = task_of(context)
    return {**task.card, "mean": [], "std": []} if task.own_test and task.card else task.card


def _test(task_of: Callable[[Context], Task], message: Message, context: Context) -> Message:
    # the task first: it imports the run's optimiser, which the message only names
    task, instruction = task_of(context), read_instruction(message)
    _check_client(context, instruction.client)
    data = test_data(task, instruction)
    return reply_to_evaluation(message, memory_of(context, instruction.federation), data)


def _check_client(context: Context, client: int) -> None:
    """Raise ValueError, in one line, if the node has become another client within the run."""
    own = context.node_config.get(PARTITION_ID, client)
    if own != client:
        raise ValueError(
            f"{PARTITION_ID}={own}: expected {client}, as this node reported when it connected: "
            "restart it with its earlier data and partition-id"
        )


def memory_of(context: Context, federation: str) -> Store:
    """The store of the client's memory: below ``state-dir``, or in the Context.

    A device sets it in its node config, simulated clients in the run configuration.
    Raises ValueError, in one line, if ``state-days`` is wrong.
    """
    folder = _state_dir(context)
    if not folder:
        return ContextStore(context)
    return DiskStore(Path(folder), federation, node_limits.state_days(context.node_config))


def _state_dir(context: Context) -> str:
    named = context.run_config if node_limits.is_simulated() else context.node_config
    return str(named.get(STATE_DIR, ""))


def _check_node(context: Context) -> None:
    """Raise ValueError, in one line, if this node could not store states or has a wrong limit."""
    node = context.node_config
    node_limits.check_limits(node)
    if folder := _state_dir(context):
        data = next((str(node[key]) for key in OWN_DATA if key in node), None)
        owner = {PARTITION_ID: node.get(PARTITION_ID), "data": data}
        prepare(Path(folder), None if node_limits.is_simulated() else owner)


def configured_task(context: Context, own_package: str = "fedaccord") -> Task:
    """The task of the run configuration, or the node's own data.

    own_package: the app's package, whose functions a run may name, for example as its model, if the
    node's config has no ``allowed-imports``.

    A node's config may have its own values of the options that allow it: ``dataset``,
    ``data-dir``, ``image-size``, ``device`` and ``threads``. A node with its own ``data-dir`` (or
    ``data-path``), or a function as its ``dataset``, uses all training samples there. For other
    limits of a run see `client/node_limits.py`.
    """
    keep_freed_memory()  # this process is ours
    check_spelling(context.node_config, OWN_KEYS)
    own = {key: value for key, value in context.node_config.items() if key in OWN_KEYS}
    if "data-path" in context.node_config:
        own.setdefault("data-dir", context.node_config["data-path"])
    whole = _is_whole(context.run_config, own)
    run = node_limits.allowed(context.run_config, own, context.node_config, whole)
    functions = {key: str(run[key]) for key in FUNCTION_KEYS if key in run and key not in own}
    paths = [
        (key, name.strip())
        for key, names in functions.items()
        for name in names.split(",")
        if named.PATH.fullmatch(name.strip())
    ]
    node_limits.check_imports(paths, own_package, context.node_config)
    values = tuple(sorted({**run, **own}.items()))
    num_clients = context.node_config.get(NUM_PARTITIONS)
    task, wanted, chosen = _prepared(values, num_clients, whole)
    wanted = 0 if "threads" in own else wanted
    torch.set_num_threads(node_limits.limited_threads(wanted, chosen, context.node_config))
    return task


def _is_whole(run: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether all training samples of a node's own data belong to its client: those of a folder or
    a file, and of a function unless partition=natural divides them by the clients that it names."""
    dataset = own.get("dataset")
    is_function = isinstance(dataset, str) and bool(named.behind(DATASET, dataset))
    return "data-dir" in own or (is_function and run.get("partition") != "natural")


@lru_cache(maxsize=4)
def _prepared(
    values: tuple[tuple[str, Any], ...], num_clients: Any, whole: bool
) -> tuple[Task, int, int]:
    """The task, and the requested and the suitable threads; cached between messages.

    num_clients: of the node; None: the configuration's.
    """
    config = RunConfig.make(dict(values))
    if whole and "data_dir" in unread(config.task):
        raise ValueError(
            f"dataset={config.task.dataset}: expected a data set that is read from this node's "
            "own files; name it in the run or in this node's config, e.g. dataset=image-folder"
        )
    threads.check(config.threads)
    clients = config.num_clients if num_clients is None else int(num_clients)
    task = load_task(config.task, num_clients=clients, whole=whole)
    return task, config.threads, threads_of_task(config.threads, task, config.strategy).number


OWN_KEYS = node_keys()
DATASET = keys_of(TaskConfig)["dataset"].metadata
FUNCTION_KEYS = [
    key for key, field in keys().items() if isinstance(field.metadata["also"], named.Functions)
]

app = make_app(configured_task)
