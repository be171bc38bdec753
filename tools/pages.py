"""The pages of docs/methods, one per method and plug-in, from what the code says of itself.

A page is made of the docstring of the method's file (its title, its source, the listing and two
paragraphs that begin with `When to use:` and `Where we differ:`), its options, its cost and its
presets in fedaccord/experiments/presets. `tools/sync.py` writes them.
"""

import dataclasses
import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field
from typing import Any

from fedaccord import config
from fedaccord.cli.about import ARXIV, About, about, file
from fedaccord.cli.methods import cost_note, methods_markdown
from fedaccord.core.optimizer import OPTIMIZERS
from fedaccord.core.options import options, range_text
from fedaccord.experiments.presets import presets, setting
from fedaccord.federation.settings import own_options
from fedaccord.federation.strategy import FederatedStrategy
from fedaccord.plugins import PLUGINS
from fedaccord.plugins.broadcast import Broadcast
from fedaccord.plugins.compress import Compress
from fedaccord.plugins.dp import DP
from fedaccord.plugins.gossip import Gossip
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.plugins.robust import Robust
from fedaccord.plugins.secure_sum import SecureSum
from fedaccord.runs import flatten
from fedaccord.strategies import BUILT_IN

EQUAL = {"local-steps": 10}  # all clients take as many
UP = "../.."  # from docs/methods to the repository root


def pages() -> dict[str, str]:
    """Every page by its file name; links hold in docs/methods."""
    parts_of = {"README.md": _index()}
    parts_of |= {f"{name}.md": _method(name, kind) for name, kind in BUILT_IN.items()}
    parts_of |= {f"{name}.md": _plugin(name, kind) for name, kind in PLUGINS.items()}
    return {name: "\n\n".join(parts) + "\n" for name, parts in parts_of.items()}


# --- the kinds of page ----------------------------------------------------------------------------


def _index() -> list[str]:
    def rows(kinds: dict[str, Any]) -> Iterator[list[str]]:
        for name, kind in kinds.items():
            docstring = about(kind)
            first_sentence = docstring.when.partition(". ")[0].rstrip(".") + "."
            title, _ = _split(docstring.title)
            yield [f"[{name}]({name}.md)", title, _capital(_prose(first_sentence))]

    columns = ["name", "title", "when to use it"]
    return [
        "# The methods",
        "Each page holds a method's listing, hyper-parameters, cost, when to use it, where it "
        "differs from the paper or from released code, and how to run it. `uv run python "
        "tools/sync.py` writes them all from the code.",
        _table(columns, rows(BUILT_IN)),
        "DFedADMM is not included until its equations can be read and transcribed twice, as was "
        "done for every method here.",
        "## Costs",
        "In vectors of d, the number of parameters: what an active client receives and sends in a "
        "round, gradient evaluations per local step, and what a client and the server keep.",
        methods_markdown().replace("](fedaccord/", f"]({UP}/fedaccord/").rstrip(),
        "## Plug-ins",
        "Each replaces some hooks of a method, and they compose.",
        _table(columns, rows(PLUGINS)),
        "## What fits what",
        "The table shows whether a method supports an optimiser, a rate that falls within the "
        "round, the mean of the optimisers' vectors ([optimisers](../optimizers.md)) or a plug-in, "
        "each without the others. no: refused in one line before any work. own: the method has one "
        "of its own, and does not read the setting. dp is the variant with noise at the server; "
        "dp and secure sums fit some methods only with `local-steps`, as their pages state. Gossip "
        "and robust means do not support the mean of the optimisers' vectors.",
        _table(["method", *FITS], _fits()),
        "## Letters",
        LETTERS,
        "A method is called exact if, on heterogeneous data and with several local steps, it "
        "reaches the optimum of the mean of the clients' losses, as on least squares with "
        "full-batch gradients.",
    ]


def _switch(name: str, kind: type) -> dict[str, Any]:
    """Settings that switch a plug-in on."""
    if kind is DP:
        return {"sampling": "bernoulli", "dp.epsilon": 4.0}
    strength = options(kind)[0]
    return {f"{name}.{strength.name}": strength.default}


def _extra(kind: type) -> str:
    """uv's option for the packages that a plug-in needs beside the usual ones."""
    return "--extra dp " if kind is DP else ""


def _pairs(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_text(value)}" for key, value in settings.items())


FITS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in OPTIMIZERS if name != "sgd"},
    "schedule": {"lr-schedule": "linear"},
    "average": {"optimizer": "momentum", "optimizer-state": "average"},
    **{name: {"local-steps": 1, **_switch(name, k)} for name, k in PLUGINS.items()},
}


def _fits() -> Iterator[list[str]]:
    for name in BUILT_IN:
        yield [f"[{name}]({name}.md)", *(_fit(name, more) for more in FITS.values())]


def _fit(name: str, more: dict[str, Any]) -> str:
    if [*more][-1].replace("-", "_") in BUILT_IN[name].replaces:
        return "own"
    return "yes" if _builds(name, {"fraction-train": 1.0, **more}) else "no"


LIST_BEGINS = """\
[When to use which](docs/methods/README.md). All support the plug-ins relaxed initialisation
(`relaxed-init.beta=0.1`), SAM (`sam.rho=0.1`), gossip (`gossip.topology=ring`),
[compression](docs/compression.md), [privacy](docs/privacy.md), or state why not.
"""


def imports(kinds: Iterable[type]) -> str:
    """Methods or plug-ins as type checkers see them, in the __init__.py of their folder."""
    kinds = sorted(kinds, key=lambda kind: kind.__module__)
    lines = (f"    from {k.__module__} import {k.__name__} as {k.__name__}\n" for k in kinds)
    return "if TYPE_CHECKING:  # tools/sync.py writes these lines\n" + "".join(lines) + "\n"


def readme_list() -> str:
    """From each method to its page, which has the file and the paper."""
    links = ",\n".join(f"[{name}](docs/methods/{name}.md)" for name in BUILT_IN)
    return f"<summary>The {len(BUILT_IN)} methods</summary>\n\n{LIST_BEGINS}\n{links}.\n"


LETTERS = """
| letter | meaning |
|---|---|
| `w^t` | the model that round t broadcasts; `w^0` the initial one |
| `w_{i,0}`, `w_{i,K}` | client i's model before and after its K (`K_i`) local steps |
| `w_bar` | mean of `w_{i,K}` over the active clients |
| `C`, `P` | number of all clients, of a round's active clients |
| `A_P[x]` | mean of `x_i` over the active clients |
| `g_i(w)` | client i's gradient on the step's batch, its norm bounded by `clip-norm` |
| `lr` | local rate of the round; every local step also subtracts `lr weight-decay w` |
| `d` | number of parameters |
""".strip()


def _method(name: str, kind: type[FederatedStrategy]) -> list[str]:
    method = kind(fraction_train=1.0)  # some take no fewer
    own = {type(plugin): plugin for plugin in config.default_plugins(kind)}
    rows = [_row(f"{name}.{_key(f)}", f, f.default) for f in own_options(kind)]
    for plugin, plugin_kind in PLUGINS.items():
        if plugin_kind in own:
            for f in options(plugin_kind):
                rows.append(_row(f"{plugin}.{_key(f)}", f, getattr(own[plugin_kind], f.name)))
    docstring = about(kind)
    return [
        *_heading(docstring, kind),
        "## Hyper-parameters",
        *([_table(COLUMNS, iter(rows))] if rows else ["None of its own."]),
        "\n".join(f"- {remark}" for remark in _remarks(name, kind)),
        "## Cost",
        "In vectors of d, the number of parameters.",
        *_cost(method),
        *_advice(docstring),
        "## How to run it",
        _code("sh", f"uv run fedaccord run {' '.join(_runnable(name))}"),
        *_presets(name),
    ]


def _remarks(name: str, kind: type[FederatedStrategy]) -> Iterator[str]:
    """What fits this method besides its own options, and what does not."""
    yield "Settings that all methods share: `uv run fedaccord run --list-keys`."
    if arguments := _arguments(kind):
        values = ", ".join(f"{f.name}={_text(f.default)}" for f in arguments)
        call = f"{kind.__name__}({values})"
        yield f"From Python, the settings of its plug-ins are arguments too: `{call}`."
    on = {type(plugin) for plugin in config.default_plugins(kind)}
    for plugin, plugin_kind in PLUGINS.items():
        field, page = options(plugin_kind)[0], f"[{plugin}]({plugin}.md)"
        strength = f"{plugin}.{_key(field)}"
        if plugin_kind in on:
            off = f"{strength}={_off(field)}"
            optional = _builds(name, {strength: _off(field)})
            yield f"The plug-in {page} is on" + (f"; `{off}` switches it off." if optional else ".")
        elif why := _refusal(kind, plugin_kind):
            yield f"The plug-in {page} is refused: {why}."
        else:
            on_now = _switch(plugin, plugin_kind)
            if not _builds(name, on_now) and _builds(name, on_now | EQUAL):
                on_now |= EQUAL
            switch = _pairs(on_now)
            extra = _extra(plugin_kind).strip()
            needs = f" (`uv run {extra} ...`)" if extra else ""
            yield f"The plug-in {page} is off; `{switch}` switches it on{needs}."
    if kind.fixed_anchor and not _refusal(kind, RelaxedInit):
        yield f"`relaxed-init.center=start` is refused: {kind.fixed_anchor}."
    if why := kind(fraction_train=1.0).why_synchronous:
        yield f"`schedule=buffered` is refused: {why}."
    if not kind.takes_weights:
        yield "`weighting=examples` is refused: its server step counts clients equally."


def _refusal(kind: type[FederatedStrategy], plugin: type) -> str:
    """Why the method refuses the plug-in; empty: it supports it."""
    if plugin is Gossip:
        undeclared = "its server step is not declared linear"
        return "" if kind.linear else kind.refuses.get(Gossip, undeclared)
    if plugin is Compress and Gossip in map(type, config.default_plugins(kind)):
        return "its nodes send models to neighbours, and nothing to a server"
    if plugin is Compress and kind(fraction_train=1.0).own_state() == "average":
        return "its clients upload their optimiser's vectors, which cannot lose numbers"
    if plugin is Broadcast:
        try:
            kind(fraction_train=1.0, plugins=(Broadcast(),))
        except ValueError as error:
            return str(error).split(": ", 2)[2]
    if plugin is Robust and not kind.averages:
        return "its server step is not the mean of local models alone"
    if plugin is DP:
        method, local = kind(fraction_train=1.0, local_steps=1), "; `dp.where=client` is accepted"
        if method.own_state() == "average":
            return "the optimisers' vectors are averaged without noise"
        if method.topology.is_decentralised:
            return "it has no server"
        if plugin in kind.refuses:
            return kind.refuses[plugin]
        if method.beyond_sums:
            return f"its server step reads {method.beyond_sums}{local}"
        return f"it needs all clients in every round{local}" if kind.all_clients else ""
    if plugin is SecureSum:
        method = kind(fraction_train=1.0, local_steps=1)
        if method.beyond_sums:
            return f"its server step reads {method.beyond_sums}"
        if method.own_state() == "average":
            return "the optimisers' vectors are averaged without masks"
    return kind.refuses.get(plugin, "")


def _arguments(kind: type[FederatedStrategy]) -> "list[Field[Any]]":
    """The Python arguments of a composed method: settings of its own plug-ins."""
    inherited = {f.name for f in dataclasses.fields(FederatedStrategy)}
    inherited |= {f.name for f in own_options(kind)}
    return [f for f in dataclasses.fields(kind) if f.repr and f.name not in inherited]


def _plugin(name: str, kind: type) -> list[str]:
    strength = options(kind)[0]
    rows = [_row(f"{name}.{_key(f)}", f, config.default(f)) for f in options(kind)]
    on, refused, no_center = [], [], []
    for method, method_kind in BUILT_IN.items():
        for plugin in config.default_plugins(method_kind):
            if type(plugin) is kind:
                value = getattr(plugin, strength.name)
                on.append(f"[{method}]({method}.md) ({strength.name} {_text(value)})")
        if why := _refusal(method_kind, kind):
            refused.append(f"[{method}]({method}.md): {why}")
        elif kind is RelaxedInit and (why := method_kind.fixed_anchor):
            no_center.append(f"[{method}]({method}.md): {why}")
    docstring = about(kind)
    return [
        *_heading(docstring, kind),
        "## Hyper-parameters",
        _table(COLUMNS, iter(rows)),
        f"`{name}.{_key(strength)}` = `{config.AUTO}` is "
        + (
            f"{_text(strength.default)}; the plug-in is off without a budget."
            if kind is DP
            else f"the method's own choice; for most methods it is off, `{_off(strength)}`."
        ),
        *([f"Methods that switch it on: {', '.join(on)}."] if on else []),
        *([f"Methods that refuse it: {'; '.join(refused)}."] if refused else []),
        *(
            [f"Methods that refuse `{name}.center=start`: {'; '.join(no_center)}."]
            if no_center
            else []
        ),
        *_advice(docstring),
        "## How to run it",
        _code(
            "sh",
            f"uv run {_extra(kind)}fedaccord run algo=fedavg {_pairs(_switch(name, kind))}",
        ),
    ]


# --- their parts ----------------------------------------------------------------------------------


def _heading(docstring: About, kind: type) -> list[str]:
    title, see = _split(docstring.title)
    return [
        f"# {title}",
        *([f"See {_prose(see)}."] if see else []),
        _prose(docstring.source),
        f"Code: [{file(kind)}]({UP}/{file(kind)}). Letters: [the list](README.md#letters).",
        "## Algorithm",
        *(_code("text", textwrap.dedent(p)) if p[0] == " " else _prose(p) for p in docstring.body),
    ]


def _advice(docstring: About) -> list[str]:
    return [
        *("## When to use it", _capital(_prose(docstring.when))),
        *("## Where we differ", _capital(_prose(docstring.differ))),
    ]


def _split(title: str) -> tuple[str, str]:
    """A title without the files that it refers to, and these files."""
    text, _, see = title.removesuffix(")").partition(" (see ")
    return (text, see) if see else (title, "")


COLUMNS = ["key", "default", "allowed", "tried in papers", "meaning"]


def _row(key: str, field: "Field[Any]", default: Any) -> list[str]:
    """An option of a method; ``default``: its value for this method."""
    auto = config.default(field)
    shown = f"`{_text(default)}`"
    if auto == config.AUTO != default:  # a plug-in's strength
        shown = f"`{auto}`, here {shown}"
    return [f"`{key}`", shown, range_text(field), field.metadata["tried"], field.metadata["doc"]]


def _cost(method: FederatedStrategy) -> Iterator[str]:
    meaning = {
        "down": "received by an active client in a round",
        "up": "sent by an active client in a round",
        "gradients": "gradient evaluations per local step",
        "client": "kept by a client between its rounds",
        "server": "kept by the server, the model included",
    }
    cost = method.cost
    rows = ([name, meaning[name], f"{getattr(cost, name):g}"] for name in meaning)
    yield _table(["cost", "what", "amount"], rows, right=1)
    if note := cost_note(method):
        yield f"Note: {note}."


def _runnable(name: str) -> list[str]:
    """The pairs that a run of the method needs beside the defaults."""
    if _builds(name, {}):
        return [f"algo={name}"]
    return [f"algo={name}", "fraction-train=1"]  # it wants every client in every round


def _builds(name: str, more: dict[str, Any]) -> bool:
    try:
        config.RunConfig.make({"algo": name} | more)
    except ValueError:
        return False
    return True


def _off(strength: "Field[Any]") -> int | str:
    """The value that switches a plug-in off: of several words the first."""
    choices: Sequence[str] = strength.metadata["choices"] or ["none"]
    return choices[0] if isinstance(strength.default, str) else 0


def _text(value: Any) -> str:
    if isinstance(value, bool) or value == "":
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _presets(name: str) -> Iterator[str]:
    """The presets that run this method, the one of its name first, and commands."""
    lines, commands = [], []
    for preset, path in sorted(presets().items(), key=lambda item: item[0] != name):
        values = flatten(tomllib.loads(path.read_text(encoding="utf-8")))
        if values["algo"] == name:
            file = f"fedaccord/experiments/presets/{path.name}"
            lines.append(f"- [{preset}]({UP}/{file}): {setting(path)}")
            clients = config.RunConfig.make(values).num_clients
            simulated = f"num-supernodes={clients} client-resources-num-cpus=1"
            commands += [
                f"uv run fedaccord run --preset {preset}",
                f'uv run flwr run . --stream --run-config {file} --federation-config "{simulated}"',
            ]
    if lines:
        yield "Presets, whose comments name the source of each number:"
        yield "\n".join(lines)
        yield _code("sh", *commands[:2])


# --- Markdown -------------------------------------------------------------------------------------


def _prose(text: str) -> str:
    """A paragraph with links from names of our files, pages of results and arXiv numbers."""
    page = {kind.__module__.rpartition(".")[2]: name for name, kind in (BUILT_IN | PLUGINS).items()}

    def link(match: re.Match[str]) -> str:
        name = page.get(match[1])
        return f"[{name}]({name}.md)" if name else match[0]

    text = re.sub(r"\b(\w+)\.py\b", link, text)
    text = re.sub(r"\bdocs/(results/([\w-]+)\.md)", r"[\2](../\1)", text)
    return re.sub(ARXIV, r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _table(columns: list[str], rows: Iterator[list[str]], right: int = 0) -> str:
    """A table whose last ``right`` columns are numbers."""
    rules = ["---"] * (len(columns) - right) + ["---:"] * right
    lines = [columns, rules, *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _capital(text: str) -> str:
    """``text`` with a capital first, where it begins with a word and not with a letter of ours."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,:;.]", text) else text


def _key(field: "Field[Any]") -> str:
    return field.name.replace("_", "-")
