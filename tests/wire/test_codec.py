"""The client half as text: what is read is registered, and nothing is imported by name."""

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from fedaccord.core.client_half import ClientHalf
from fedaccord.core.plugin import PlugIn
from fedaccord.core.rule import LocalRule, Registered
from fedaccord.strategies import METHODS, PLUGINS, SAM, RelaxedInit
from fedaccord.strategies.fedprox import FedProxClient
from fedaccord.wire.codec import decode, dumps, encode, loads
from tests.wire.methods import COMBINATIONS, COMPRESSED, make

HALF = ClientHalf(FedProxClient(mu=0.3), (SAM(rho=0.2), RelaxedInit(beta=0.07, center="start")))


def text(**changes: Any) -> str:
    return json.dumps({**json.loads(dumps(HALF)), **changes})


def refused(line: str, content: str) -> str:
    with pytest.raises(ValueError, match=r"^expected") as error:
        loads(content)
    message = str(error.value)
    assert message.startswith(line)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("name", "plugins"), COMBINATIONS + COMPRESSED)
def test_every_method_with_every_plug_in_travels_as_text(name: str, plugins: str) -> None:
    half = make(name, plugins).client_half()
    copy = loads(dumps(half))
    assert copy == half
    assert list(map(type, (copy.rule, *copy.plugins))) == list(
        map(type, (half.rule, *half.plugins))
    )


@pytest.mark.parametrize("keeps", [False, True])
def test_whether_clients_keep_parameters_travels(keeps: bool) -> None:
    half = ClientHalf(HALF.rule, keeps_local=keeps)
    assert loads(dumps(half)) == half


def test_names_are_short() -> None:
    assert json.loads(dumps(HALF))["rule"]["class"] == "fedprox"
    assert [part["class"] for part in json.loads(dumps(HALF))["plugins"]] == ["sam", "relaxedinit"]
    assert "fedaccord" not in dumps(HALF)


def test_a_methods_own_client_half_has_the_methods_name() -> None:
    for name, kind in METHODS.items():
        rule = type(kind(fraction_train=1.0).rule())
        if rule.__module__ == kind.__module__:
            assert rule.registered_name() == name.replace("-", "")
    for name, plugin in PLUGINS.items():
        assert plugin.registered_name() == name.replace("-", "")


def test_two_classes_with_one_short_name_are_refused_in_one_line_that_names_both() -> None:
    with pytest.raises(TypeError, match=r"got 'sam', also that of .*; rename one") as error:
        type("Sam", (PlugIn,), {"__module__": "elsewhere"})
    assert "elsewhere:Sam" in str(error.value)
    assert "fedaccord.plugins.sam:SAM" in str(error.value)
    assert "\n" not in str(error.value)
    assert loads(dumps(HALF)).plugins[0] == SAM(rho=0.2)


def test_a_class_may_be_defined_again_as_in_a_notebook() -> None:
    for alpha in (1, 2):
        twice = type("Twice", (LocalRule,), {"__module__": "notebook", "alpha": alpha})
        assert Registered.registry["twice"] is twice


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("antigravity:x", "antigravity"),  # opens a browser
        ("this:s", "this"),  # prints a poem
        ("tests.wire.untouched:Rule", "tests.wire.untouched"),  # a rule, were it imported
        ("fedaccord.strategies.fedprox:FedProxClient", ""),  # its long name
        ("os:system", ""),
        ("no_such_package_here.rules:Rule", "no_such_package_here"),
        ("", ""),
    ],
)
def test_a_name_that_is_not_registered_is_refused_and_imports_nothing(
    name: str, module: str
) -> None:
    modules = set(sys.modules)
    for content in (text(rule={"class": name}), text(plugins=[{"class": name}])):
        line = refused("expected a message with a ", content)
        assert f"that this client knows, got {name!r}" in line
        assert "install the same version" in line
    assert module not in sys.modules
    assert set(sys.modules) == modules


@dataclass(frozen=True)
class Unregistered:
    x: int = 1


@dataclass(frozen=True)
class OlderRule(LocalRule):
    alpha: float = 0.5


@pytest.mark.parametrize(
    "rule",
    [
        {"class": "unregistered", "x": 1},
        {"class": SAM.registered_name(), "rho": 0.1},  # a plug-in is no rule
        {"class": "olderrule", "alpha": 0.5, "newer": 1.0},
        {"class": FedProxClient.registered_name()},
        {"class": FedProxClient.registered_name(), "mu": 0.1, "nu": 0.1},
    ],
    ids=["not registered", "a plug-in", "a new field", "a field less", "a field more"],
)
def test_what_is_no_rule_of_this_client_is_refused(rule: dict[str, Any]) -> None:
    line = refused("expected a message with a LocalRule that this client knows", text(rule=rule))
    assert repr(rule["class"]) in line


def test_a_rule_is_no_plug_in() -> None:
    refused("expected a message with a PlugIn", text(plugins=[encode(HALF.rule)]))
    with pytest.raises(ValueError, match="PlugIn"):
        decode(encode(HALF.rule), PlugIn)


@pytest.mark.parametrize(
    "part", [{"mu": 0.1}, {"class": None}, {"class": 3}, {}, [], "FedProx", None, 7]
)
def test_a_part_without_a_class_is_refused(part: Any) -> None:
    refused("expected a LocalRule with its 'class', got ", text(rule=part))
    refused("expected a PlugIn with its 'class', got ", text(plugins=[part]))


@pytest.mark.parametrize(
    "content",
    ["", "{", "no JSON", "[]", "7", "null", '{"rule": {}}', '{"plugins": []}', text(plugins=None)],
)
def test_text_that_is_no_client_half_is_refused(content: str) -> None:
    refused("expected a message with the rule that FedAccord's server wrote, got ", content)


def test_a_field_that_is_no_plain_value_does_not_travel() -> None:
    with pytest.raises(ValueError, match=r"^expected numbers, strings and booleans as fields of"):
        dumps(ClientHalf(OlderRule(alpha=object())))  # type: ignore[arg-type]
