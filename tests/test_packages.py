"""What others install: the bundle for Flower's hub, as Flower checks it, and the wheel."""

import io
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_description, _validate_files
from flwr.cli.build import build_fab_from_files
from flwr.cli.config_utils import load_and_validate
from flwr.cli.utils import collect_files

from tests.test_imports import PACKAGE, SOURCES, below, imports, module

REPOSITORY = Path(__file__).parents[1]
# bytes of the bundle once compressed; Flower 1.41 stores its files as they are: 1 MB of at most 10
MOST = 460_000
APPS = """
import sys
from fedaccord import apps, train_locally
from fedaccord.strategies import METHODS
assert apps.__file__.startswith(sys.argv[1]), apps.__file__
print(*METHODS)
"""


def python(*words: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """A Python in ``folder`` that finds packages in ``path`` first."""
    env = os.environ | {"PYTHONPATH": str(path), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository without environments and caches, which Flower would walk through."""
    left_out = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache")
    folder = tmp_path_factory.mktemp("checkout") / "fedaccord"
    return Path(shutil.copytree(REPOSITORY, folder, ignore=left_out))


def test_flower_accepts_the_app_for_its_hub(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, warnings = load_and_validate(checkout / "pyproject.toml", check_module=False)
    assert warnings == []
    assert config["tool"]["flwr"]["app"]["fab-format-version"] == 1
    _validate_description(config["project"]["description"])
    _validate_files(_collect_file_paths(checkout))
    assert "Validation passed" in capsys.readouterr().out


def test_the_bundle_is_small_and_has_what_the_apps_import(checkout: Path, tmp_path: Path) -> None:
    bundle, facts = build_fab_from_files(collect_files(checkout))
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert f"flwr>={facts.flwr_version_min},<1.43" in project["dependencies"]
    assert facts.flwr_version_target == "1.41.0"
    app, buffer = tmp_path / "app", io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(bundle)) as source,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        assert {file.compress_type for file in source.infolist()} == {zipfile.ZIP_STORED}
        source.extractall(app)
        for name in source.namelist():
            compressed.writestr(name, source.read(name))
    assert len(buffer.getvalue()) <= MOST
    names = {path.name for path in app.iterdir()} - {".info"}
    assert names == {"LICENSE", "README.md", "pyproject.toml", "fedaccord"}
    copies = {path: app / path.relative_to(REPOSITORY) for path in SOURCES}
    absent = [module(path) for path, copy in copies.items() if not copy.exists()]
    for path in {*SOURCES} - {PACKAGE / "__init__.py"}:  # which names what a checkout has
        missing = [name for name in imports(path) if below(name, *absent)]
        assert not (copies[path].exists() and missing), path
    assert unused({path for path, copy in copies.items() if copy.exists()}) == []
    result = python("-c", APPS, str(app), folder=tmp_path, path=app)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "scaffold" in result.stdout.split()


def unused(paths: set[Path]) -> list[str]:
    """The modules that neither the apps, `train_locally`, a method nor a plug-in imports."""
    rest = {path for path in paths if path.name != "__init__.py"}
    first = [PACKAGE / "apps.py", PACKAGE / "client" / "train.py"]
    queue = [*first, *(p for p in paths if p.parent.name in ("strategies", "plugins"))]
    rest -= {*queue}
    for path in queue:  # which grows
        names = [*imports(path)]
        more = {p for p in rest if any(below(name, module(p)) for name in names)}
        rest -= more
        queue += more
        package = path.parent / "__init__.py"
        queue += [package] * (package in paths and package not in queue)
    return sorted(map(module, rest))


def test_the_wheel_in_an_empty_folder_runs_presets(tmp_path: Path) -> None:
    uv = shutil.which("uv")
    assert uv, "expected uv, with which CI makes its environment"
    empty, site = tmp_path / "empty", tmp_path / "site"
    empty.mkdir()
    build = ("build", "--wheel", "--quiet", "--out-dir", tmp_path, REPOSITORY)
    subprocess.run([uv, *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    install = ("pip", "install", "--offline", "--quiet", "--no-deps", "--target", site, wheel)
    subprocess.run([uv, *install, "--python", sys.executable], check=True)
    settings = "--preset scaffold dataset=digits model=linear num-clients=4 local-steps=2"
    words = f"run {settings} fraction-train=1.0 num-server-rounds=1 out-dir={empty} name=x"
    result = python(str(site / "bin" / "fedaccord"), *words.split(), folder=empty, path=site)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (empty / "x" / "model.safetensors").exists()
    assert (site / "fedaccord" / "py.typed").exists()
    origin = python("-c", "import fedaccord; print(fedaccord.__file__)", folder=empty, path=site)
    assert origin.stdout.startswith(str(site)), origin.stdout
