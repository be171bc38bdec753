"""What `help` and `repr` say of a method, a plug-in and a task."""

import dataclasses
import inspect

import pytest

from fedaccord.core.options import range_text
from fedaccord.federation.settings import own_options
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins import PLUGINS
from fedaccord.strategies import BUILT_IN, FedInit, Gossip, Scaffold
from fedaccord.task import TaskConfig, load_task

KINDS = {**BUILT_IN, **PLUGINS}


@pytest.mark.parametrize("name", KINDS)
def test_help_tells_every_argument_of_it(name: str) -> None:
    kind = KINDS[name]
    text = " ".join((inspect.getdoc(kind) or "").split())
    for field in dataclasses.fields(kind):
        assert f" {field.name} = {field.default!r}: " in text
        if "doc" in field.metadata:
            assert field.metadata["doc"] in text
            assert range_text(field) in text
    assert f"help({kind.__module__})" in text


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_methods_own_arguments_come_first(name: str) -> None:
    text = inspect.getdoc(BUILT_IN[name]) or ""
    place = text.index("fraction_train = ")
    assert all(text.index(f"  {f.name} = ") < place for f in own_options(BUILT_IN[name]))
    assert text.index("plugins = ()") > place
    assert "SAM(rho=0.1)" in text


def test_the_class_to_derive_from_keeps_its_own_words() -> None:
    text = inspect.getdoc(FederatedStrategy) or ""
    assert text.startswith("The server half of a method.\n\nA subclass implements the paper:")
    assert "  lr = 0.1: local rate in round 1 (above 0)" in text


@pytest.mark.parametrize("name", KINDS)
def test_a_repr_has_no_addresses(name: str) -> None:
    kind = KINDS[name]
    instance = kind(fraction_train=1.0) if name in BUILT_IN else kind()
    assert repr(instance).startswith(f"{kind.__name__}(")
    assert " at 0x" not in repr(instance)
    if isinstance(instance, FederatedStrategy):
        assert " at 0x" not in f"{instance.topology} {instance.client_half()}"


def test_a_repr_tells_the_settings() -> None:
    assert "lr=0.3" in repr(Scaffold(lr=0.3))
    assert "beta=0.2" in repr(FedInit(beta=0.2))
    assert "RelaxedInit(beta=0.2" in repr(FedInit(beta=0.2).active_plugins)
    assert repr(FedInit(plugins=(Gossip(),)).topology).startswith(
        "GossipTopology(Gossip(topology='ring'"
    )


def test_a_task_is_told_in_one_line() -> None:
    task = load_task(TaskConfig(), num_clients=4)
    assert repr(task) == "Task(4 clients with 1436 samples, 359 test samples, on cpu)"
