"""Who imports whom: read from the source of every module."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedaccord"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module(path: Path) -> str:
    """fedaccord/task/models.py -> fedaccord.task.models."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """The dotted names that a module imports, also inside functions: `from a import b` is a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name of the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def belongs(path: Path, part: str) -> bool:
    return below(module(path), f"fedaccord.{part}")


def checked(part: str) -> list[Path]:
    found = [path for path in SOURCES if belongs(path, part)]
    assert found, f"no module fedaccord.{part}"
    return found


def refused(paths: list[Path], allowed: tuple[str, ...]) -> list[str]:
    """Imports of fedaccord and flwr beyond the allowed ones."""
    return [
        f"{module(path)} imports {name}"
        for path in paths
        for name in imports(path)
        if below(name, "fedaccord", "flwr") and not below(name, *allowed)
    ]


def test_the_reader_sees_imports() -> None:
    engine = set(imports(PACKAGE / "engine.py"))
    assert {"torch", "flwr.app.Message", "fedaccord.config.RunConfig"} <= engine
    assert module(PACKAGE / "task" / "__init__.py") == "fedaccord.task"
    assert "fedaccord.engine.simulate" in set(imports(PACKAGE / "__init__.py"))
    assert refused([PACKAGE / "engine.py"], ("fedaccord",))
    assert not below("fedaccord.tasks", "fedaccord.task")


def test_the_task_knows_no_flower_and_no_method() -> None:
    assert not refused(checked("task"), ("fedaccord.task",))


def test_strategies_know_flower_torch_and_records() -> None:
    allowed = ("flwr", "torch", "fedaccord.records", "fedaccord.strategies")
    strange = [
        f"{module(path)} imports {name}"
        for path in checked("strategies")
        for name in imports(path)
        if not below(name, *allowed) and name.split(".")[0] not in sys.stdlib_module_names
    ]
    # `from fedaccord import records` is fedaccord.records
    assert not strange


def test_records_know_nothing_of_ours() -> None:
    assert not refused(checked("records"), ("flwr",))


def test_the_configuration_knows_strategies_and_task_only() -> None:
    assert not refused(checked("config"), ("fedaccord.strategies", "fedaccord.task"))


def test_run_directories_know_nothing_of_ours() -> None:
    assert not refused(checked("runs"), ())


def test_the_apps_know_neither_engine_nor_analysis() -> None:
    for part in ("client_app", "server_app"):
        allowed = ("config", "records", "runs", "strategies", "task")
        assert not refused(checked(part), ("flwr", *(f"fedaccord.{name}" for name in allowed)))


def test_nothing_imports_the_command_line() -> None:
    others = [path for path in SOURCES if not belongs(path, "cli")]
    assert not [module(path) for path in others for n in imports(path) if below(n, "fedaccord.cli")]


def test_analysis_reads_run_directories_only() -> None:
    allowed = ("fedaccord.analysis", "fedaccord.runs", "fedaccord.task")
    assert not refused([path for path in SOURCES if belongs(path, "analysis")], allowed)


PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_only_the_engine_touches_flowers_private_parts(path: Path) -> None:
    private = [n for n in imports(path) if below(n, "flwr") and not below(n, *PUBLIC)]
    if belongs(path, "engine"):
        assert private  # else this test has lost its object
    else:
        assert not private


def test_a_method_is_loaded_without_the_engine_the_task_or_the_command_line() -> None:
    """`from fedaccord.strategies import ...` in another app brings nothing else along."""
    import subprocess

    code = (
        "import sys; from fedaccord.strategies import Scaffold; "
        "print([m for m in sys.modules if m.startswith('fedaccord.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert "fedaccord.strategies.scaffold" in loaded
    strange = [m for m in loaded if not below(m, "fedaccord.strategies", "fedaccord.records")]
    assert not strange
