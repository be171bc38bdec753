"""docs/api.md, written by `tools/sync.py`: what Python code calls, and what it says of itself."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import fedaccord
from fedaccord import core, engine, runs, strategies, sweep
from fedaccord.analysis import figures, groups, report, table
from fedaccord.config import RunConfig
from fedaccord.engine.fleet import LocalFleet
from fedaccord.federation.fleet import Fleet
from fedaccord.federation.round import Round
from fedaccord.runs import reader

WIDTH = 88


class Part(NamedTuple):
    title: str
    note: str
    objects: tuple[Any, ...]


PARTS = (
    Part(
        "Run a federation",
        "In this process: from tensors, or from a run configuration.",
        (fedaccord.simulate, engine.History, RunConfig.make, engine.run, engine.quiet),
    ),
    Part(
        "In your own Flower app",
        "A strategy in the ServerApp and these two in the ClientApp; "
        "[examples/another-app](../examples/another-app/README.md) is a whole app.",
        (fedaccord.train_locally, fedaccord.evaluate_locally, engine.InProcessGrid),
    ),
    Part(
        "Strategies",
        "Each method is a class of `fedaccord.strategies` with these arguments and its own, which "
        "its [page](methods/README.md) and `help` tell; `strategies.METHODS` has them by name.",
        (strategies.FederatedStrategy, Round),
    ),
    Part(
        "Plug-ins",
        "In `plugins=` of any strategy that takes them.",
        (strategies.SAM, strategies.RelaxedInit, strategies.Gossip, strategies.Robust),
    ),
    Part(
        "Write a method",
        "The vocabulary is `fedaccord.core`; [CONTRIBUTING.md](../CONTRIBUTING.md) has a complete "
        "example, and makes it one that `fedaccord run algo=...` knows.",
        (
            *(core.LocalRule, core.Direction, core.LocalConfig, core.LocalResult, core.Model),
            *(core.Client, core.Cohort, core.PlugIn, core.option, core.argument),
        ),
    ),
    Part(
        "Clients",
        "What `start` of a strategy takes as its grid beside a Flower grid.",
        (Fleet, LocalFleet),
    ),
    Part(
        "Run directories, tables and reports",
        "[metrics.md](metrics.md) explains the columns, [measures.md](measures.md) what is made "
        "of them.",
        (
            *(reader.Run, reader.read, reader.find, runs.status, runs.load_model),
            *(groups.Group, groups.groups_of, table.summary, report.html, figures.save),
        ),
    ),
    Part(
        "Sweeps",
        "[sweeps.md](sweeps.md) describes the file.",
        (sweep.Plan.make, sweep.Sweep, sweep.Step),
    ),
)


def page() -> str:
    lines = [
        "# What Python code calls",
        "From the docstrings, by `uv run python tools/sync.py`. Shapes stand in brackets, `(d,)` a "
        "vector of all parameters, `(..., d)` one or a stack of them.",
    ]
    for part in PARTS:
        lines += [f"## {part.title}", part.note]
        for thing in part.objects:
            lines += [f"### {_name(thing)}", *_body(thing)]
    return "\n\n".join(lines) + "\n"


def _name(thing: Any) -> str:
    """As it is imported: from the shortest package that has it."""
    module, name = thing.__module__, thing.__qualname__
    packages = [".".join(module.split(".")[:n]) for n in range(1, module.count(".") + 2)]
    first = name.partition(".")[0]
    home = next(p for p in packages if hasattr(import_module(p), first))
    return f"{home}.{name}"


def _body(thing: Any) -> Iterator[str]:
    if not inspect.isclass(thing):
        yield _code(_signature(thing.__name__, thing))
        yield from _prose(thing)
    elif issubclass(thing, tuple):  # its comments are the meaning of its fields
        yield _code(textwrap.dedent(inspect.getsource(thing)).rstrip())
    else:
        yield from _prose(thing)
        for name, member in vars(thing).items():
            method = getattr(member, "__func__", member)
            if isinstance(method, property):
                method = method.fget
            if name.startswith("_") or not isinstance(method, FunctionType) or not method.__doc__:
                continue
            is_property = isinstance(member, property)
            yield _code(
                f"{name}: {_annotation(method)}" if is_property else _signature(name, method)
            )
            yield from _prose(method)


def _prose(thing: Any) -> Iterator[str]:
    """The docstring's paragraphs; those with indented lines as they are."""
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        if re.search(r"^\s", paragraph, re.MULTILINE):
            yield f"```text\n{paragraph}\n```"
        else:
            yield re.sub(r"``([^`]+)``", r"`\1`", paragraph).replace("<", r"\<")


def _signature(name: str, function: Any) -> str:
    """One line, or a line a parameter."""
    signature = inspect.signature(function)
    plain = [_parameter(p) for p in signature.parameters.values() if p.name != "self"]
    starred = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    keyword = [i for i, p in enumerate(plain) if p[1] is inspect.Parameter.KEYWORD_ONLY]
    words = [text for text, _ in plain]
    if keyword and not starred:
        words.insert(keyword[0], "*")
    end = "" if signature.return_annotation is signature.empty else f" -> {_annotation(function)}"
    line = f"{name}({', '.join(words)}){end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){end}"])


def _parameter(parameter: inspect.Parameter) -> tuple[str, Any]:
    text = str(parameter.replace(default=parameter.empty))
    if parameter.default is not parameter.empty:
        default = getattr(parameter.default, "__name__", None) or repr(parameter.default)
        text += f" = {default}" if ": " in text else f"={default}"
    return _short(text), parameter.kind


def _annotation(function: Any) -> str:
    found = inspect.signature(function).return_annotation
    return _short(inspect.formatannotation(found))


def _short(text: str) -> str:
    """Types without their modules."""
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)
    return re.sub(r"-> '(\w+)'$|^'(\w+)'$", r"\1\2", text)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"
