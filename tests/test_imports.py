"""The imports of every module, read from its source."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "fedaccord"
SOURCES = sorted(PACKAGE.rglob("*.py"))


class Allowed(NamedTuple):
    ours: str  # rooms of fedaccord, or modules in them, beside the room itself
    others: str  # packages, beside the standard library


ROOMS = {  # a module at the top of the package is a room too; each imports rooms above it alone
    "core": Allowed("", "torch"),
    "compat": Allowed("", "torch flwr numpy httpx"),
    "wire": Allowed("core compat", "torch flwr numpy"),
    "secure": Allowed("compat", "torch numpy cryptography"),
    "storage": Allowed("compat core wire", "torch flwr safetensors ray"),
    "plugins": Allowed("core", "torch"),
    "process": Allowed("", "torch joblib psutil"),
    "data": Allowed("core process", "torch torchvision numpy PIL sklearn safetensors"),
    "task": Allowed("core data process", "torch torchvision numpy"),
    "federation": Allowed(
        "core wire secure storage compat", "torch flwr numpy scipy dp_accounting"
    ),
    "strategies": Allowed("core plugins federation.strategy", "torch"),
    "client": Allowed("compat core wire secure storage task", "torch flwr"),
    "hints": Allowed("core", ""),
    "config": Allowed("hints core federation plugins strategies task", ""),
    "runs": Allowed(
        "core storage federation config process",
        "torch safetensors tomli_w psutil pandas mlflow wandb",
    ),
    "client_app": Allowed("core wire storage client task config process compat", "torch flwr"),
    "recorded_run": Allowed("core wire federation task config process runs", "torch flwr"),
    "server_app": Allowed("federation task config process runs recorded_run compat", "flwr"),
    "apps": Allowed("client_app server_app process", ""),
    "engine": Allowed(
        "compat core wire secure storage client data task federation strategies hints config "
        "process runs recorded_run",
        "torch flwr pandas ray",
    ),
    "experiments": Allowed(
        "core storage data task federation.checkpoint strategies config process runs engine",
        "torch numpy scipy pandas bokeh matplotlib optuna ray",
    ),
    "cli": Allowed(
        "__version__ core storage data task federation strategies plugins config process runs "
        "engine experiments compat",
        "torch flwr click rich typer psutil cryptography tomli_w packaging",
    ),
    "__main__": Allowed("cli", ""),
    "__init__": Allowed("client engine strategies experiments runs task", ""),
}
PRIVATE = (  # what fedaccord.compat names in its place
    'pull_interval"',
    "ActorDiedError",
    "ClientAppException",
    "SuperLink is unavailable",
    "unknown error",
    "No heartbeat",
    "function registered",
    "HTTP_API_PORT",
    "/v1/",
    "flwr-public-key",
    "(Array)",
)
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")  # Flower's documented packages


@cache
def module(path: Path) -> str:
    """fedaccord/task/models.py -> fedaccord.task.models."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path: Path) -> list[str]:
    """The dotted names that a module imports, also inside functions: `from a import b` is a.b."""
    names: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name of the package"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def strange(path: Path, allowed: Allowed) -> list[str]:
    """The imports of a module that its room may not have."""
    ours = [f"fedaccord.{name}" for name in (room(path), *allowed.ours.split())]
    others = [*allowed.others.split(), *sys.stdlib_module_names]
    return [name for name in imports(path) if not below(name, *ours, *others)]


def test_the_reader_of_imports() -> None:
    store = PACKAGE / "storage" / "store.py"
    assert {"flwr.app.Context", "fedaccord.core.vectors.leaves"} <= set(imports(store))
    assert "fedaccord.engine.simulate" in set(imports(PACKAGE / "__init__.py"))  # in a function
    assert "flwr.app.Context" in strange(store, Allowed("wire", ""))
    assert module(PACKAGE / "task" / "__init__.py") == "fedaccord.task"
    assert not below("fedaccord.tasks", "fedaccord.task")


def test_every_room_is_in_the_table() -> None:
    assert {room(path) for path in SOURCES} == set(ROOMS)


def test_imports_go_downwards_only() -> None:
    by_module = {module(path): strange(path, ROOMS[room(path)]) for path in SOURCES}
    assert {name: imported for name, imported in by_module.items() if imported} == {}


def test_the_class_of_a_fleet_is_known_only_where_one_is_made() -> None:
    """The rest reads `Fleet`; `app_evaluation` sends messages of its own, as no other can."""
    fleet = "fedaccord.federation.message_fleet"
    users = {module(path) for path in SOURCES if any(below(n, fleet) for n in imports(path))}
    federation = {f"fedaccord.federation.{name}" for name in ("strategy", "app_evaluation")}
    assert users == {"fedaccord.server_app", *federation}


def test_rooms_import_each_other_in_one_direction_only() -> None:
    """The table itself has no circle: its rooms can be put in an order."""
    rest = {name: {part.split(".")[0] for part in ROOMS[name].ours.split()} for name in ROOMS}
    while rest:
        lowest = {name for name, above in rest.items() if not above & set(rest)}
        assert lowest, f"a circle among {sorted(rest)}"
        rest = {name: above for name, above in rest.items() if name not in lowest}


def test_no_module_imports_itself_through_others() -> None:
    """Neither for types nor inside functions. A package's __init__ is the way in, and left out."""
    paths = {module(path): path for path in SOURCES if path.name != "__init__.py"}
    rest = {}
    for name, path in paths.items():
        named = {*imports(path)}  # a.b, or a.b.c where c is a name in the module a.b
        rest[name] = (named | {n.rpartition(".")[0] for n in named}) & {*paths}
    while rest:
        lowest = {name for name, above in rest.items() if not above & set(rest)}
        assert lowest, f"a circle among {sorted(rest)}"
        rest = {name: above for name, above in rest.items() if name not in lowest}


def test_only_compat_uses_flowers_private_interfaces() -> None:
    for path in (path for path in SOURCES if room(path) != "compat"):
        names = [n for n in imports(path) if below(n, "flwr") and not below(n, *PUBLIC)]
        text = path.read_text()
        assert names + [word for word in PRIVATE if word in text] == [], module(path)


def test_the_core_does_not_use_torch_nn() -> None:
    for path in SOURCES:
        if room(path) == "core":
            assert not [name for name in imports(path) if below(name, "torch.nn")], path
            assert "torch.nn" not in path.read_text(), path


def test_no_module_is_long() -> None:
    lengths = {module(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_types_are_ignored_in_few_places() -> None:
    places = [
        f"{module(path)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "type: ignore" in line
    ]
    assert len(places) <= 5, places


def test_the_modules_loaded_with_the_core_and_with_a_method() -> None:
    """`from fedaccord.strategies import ...` in another app brings nothing else along."""
    code = (
        "import json, sys\n"
        "import fedaccord.core\n"
        "core = list(sys.modules)\n"
        "from fedaccord.strategies import Scaffold\n"
        "print(json.dumps([core, list(sys.modules)]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    core, method = (set(names) for names in json.loads(run.stdout.splitlines()[-1]))
    assert "torch" in core
    assert "flwr" not in core
    assert {n for n in core if below(n, "fedaccord")} <= {
        "fedaccord",
        *(module(path) for path in SOURCES if room(path) == "core"),
    }
    assert {"fedaccord.strategies.scaffold", "flwr"} <= method
    rooms = {name.split(".")[1] for name in method if name.startswith("fedaccord.")}
    assert rooms == {
        *("compat", "core", "wire", "secure", "storage", "plugins", "federation", "strategies")
    }
    assert not method & {"pandas", "sklearn"}


def starred_literals(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines of each `*(a, b)` or `*[a, b]` in a call, a list, a tuple or a set."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
    ]


def test_arguments_and_elements_are_written_plainly() -> None:
    example = ast.walk(ast.parse("f(*(a, b))\n[*[c], d]\nf(*g(a), *c)"))
    assert sorted(starred_literals(example)) == [1, 2]
    lines = {module(path): starred_literals(nodes(path)) for path in SOURCES}
    assert not any(lines.values()), lines


def runs_of_lines(path: Path, length: int) -> Iterator[tuple[str, ...]]:
    """Each run of ``length`` lines that follow each other, without blank lines and imports."""
    imported = {
        number
        for node in nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    numbered = enumerate(map(str.strip, path.read_text().splitlines()), 1)
    lines = [line for number, line in numbered if line and number not in imported]
    yield from (tuple(lines[k : k + length]) for k in range(len(lines) - length + 1))


def test_no_run_of_twelve_lines_is_repeated() -> None:
    first: dict[tuple[str, ...], tuple[str, int]] = {}
    for path in SOURCES:
        for k, run in enumerate(runs_of_lines(path, 12)):
            assert first.setdefault(run, (module(path), k)) == (module(path), k), run
