"""The links, commands and code of the documents are valid."""

import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import click
import pytest
import torch
import typer
from flwr.common.config import parse_config_args
from torch import nn

from fedaccord import cli, strategies
from fedaccord.cli.settings import read_begun, read_settings
from fedaccord.config import TRACKERS, RunConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md"),
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs/results").glob("*.md")),
    *(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*/README.md")),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_targets_of_links_exist(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / name).parent.joinpath(link).exists()] == []
    assert local or name not in ("README.md", "CONTRIBUTING.md")


def test_the_readme_is_short_and_begins_with_the_picture() -> None:
    words = [w for w in README.split() if not re.match(r"\[[\w-]+\]\(docs/methods/", w)]
    assert len(words) <= 856  # without the list of methods, which grows with them
    before, _, _ = README.partition("![")
    assert len(before.splitlines()) < 10
    places = [README.index(x) for x in ("## Quickstart", "<details>", "\n[afedpd](", "</details>")]
    assert places == sorted(places)
    methods = re.search(r"The (\d+) methods", README)
    assert methods
    assert int(methods[1]) == len(strategies.BUILT_IN)


def block(part: str) -> str:
    """The block of indented lines that contains ``part``."""
    (match,) = (x for x in re.findall(r"(?:^(?:    .*)?\n)+", README, re.MULTILINE) if part in x)
    return textwrap.dedent(match)


def commands(text: str) -> list[str]:
    """The lines that a user types."""
    lines = re.findall(
        r"^(?:    )?(?:pip install uv && )?uv run (?:--extra dp )?(.*)$", text, re.MULTILINE
    )
    return [*lines, *re.findall(r"`uv run ([^`]*)`", text)]


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


OURS = [line for line in commands(README) if line.startswith("fedaccord ")]
RUNS = [line for line in commands(README) if line.startswith("flwr run ")]


def test_every_command_is_one_of_three() -> None:
    assert len(OURS) > 8
    assert len(RUNS) == 2
    others = [line for line in commands(README) if line not in OURS + RUNS]
    assert {words(line)[0] for line in others} == {"flower-superlink", "flower-supernode", "flwr"}


def test_two_lines_do_everything_on_a_fresh_machine() -> None:
    alone = re.findall(r"^    pip install uv && (.*)$", README, re.MULTILINE)
    assert alone == [f"uv run {RUNS[0]}", ".ci/run"]


@pytest.mark.parametrize("line", OURS)
def test_our_commands_are_valid_and_state_their_duration(line: str) -> None:
    """A misspelt command, option or key is found without running it."""
    _, name, *rest = words(line)
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    context = group.commands[name].make_context(name, rest)
    if name in ("run", "doctor") and not context.params.get("list_keys"):
        preset = context.params.get("preset")
        RunConfig.make(read_settings(context.params["pairs"], read_begun(None, preset)))
    assert re.search(r"#.*\b(\d+ seconds?|a day)\b", line)


@pytest.mark.parametrize("line", RUNS)
def test_the_run_configs_for_flower_are_valid(line: str) -> None:
    parts = words(line)
    RunConfig.make(parse_config_args([parts[parts.index("--run-config") + 1]]))


def test_the_commands_of_a_deployment_are_those_of_its_page() -> None:
    """A test in tests/flower runs the commands of the page."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    deployed = [line for line in commands(README) if "flower-super" in line or " lab " in line]
    assert len(deployed) == 4
    assert [line for line in deployed if line not in page] == []
    entry = block("[superlink.lab]").partition("[superlink.lab]")[2].partition("\n\n")[0]
    assert f"[superlink.lab]{entry}\n" in page


def test_the_python_runs() -> None:
    pair = torch.randn(8, 3), torch.arange(8) % 2
    names = {"my_module": nn.Linear(3, 2)}
    names |= dict(zip(("x_0", "y_0", "x_1", "y_1"), pair * 2, strict=True))
    exec(block("import simulate"), names)
    assert len(names["history"].metrics) == 51
    (value,) = re.findall(r"`(FedInit\(.*\))`", README)
    method = eval(value, vars(strategies) | {"SAM": strategies.PLUGINS["sam"]})
    assert len(method.active_plugins) == 2
    (line,) = re.findall(r"strategy = (Scaffold\(.*?\)) ", README)
    assert eval(line, vars(strategies)).lr == 0.05


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SPOKEN = [  # what a user reads
    *(ROOT / name for name in DOCUMENTS if name != "CHANGELOG.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "fedaccord").rglob("*.py"),
    *(ROOT / "examples").glob("*.ipynb"),
]


def test_no_command_installs_the_package_by_its_bare_name() -> None:
    """The package is on no index: anybody could register the name."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SPOKEN)
    assert not re.findall(r"(?:pip install|uv add)\b[^`\n]*['\" ]fedaccord\b(?! @)[^`\n]*", text)
    extras = set(re.findall(r"--extra ([\w{}-]+)", text))
    extras -= {"{name}", "{extra}"}  # a tracker's, and what fedaccord.cli.console finds
    assert extras >= {"report", "sweep"}
    extras |= {*TRACKERS} - {"none"}
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_a_user_gets_no_development_tools_and_the_checks_ask_for_them() -> None:
    """By `uv run`, `uv sync` and Flower's own environment of a run."""
    assert PROJECT["tool"]["uv"]["default-groups"] == ["app"]
    assert PROJECT["dependency-groups"]["app"] == ["fedaccord[run,data,deploy]"]
    assert re.search(r"^uv sync .*--group dev\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks
    assert all(hook.startswith("uv run --group dev ") for hook in hooks)


def test_the_example_depends_on_this_repository() -> None:
    example = tomllib.loads((ROOT / "examples/another-app/pyproject.toml").read_text())
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert f"fedaccord @ git+{repository['Repository']}" in example["project"]["dependencies"]
    assert example["tool"]["hatch"]["metadata"] == {"allow-direct-references": True}


def test_agents_md_is_short_and_its_commands_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 60
    named = re.findall(r"fedaccord/strategies/(\w+)\.py|`(\w+)\.py`", text)
    for name in filter(None, (a or b for a, b in named)):
        assert (ROOT / "fedaccord/strategies" / f"{name}.py").exists()
    for file in re.findall(r"`?(tests/test_\w+\.py|tools/\w+\.py|tests/strategies)\b", text):
        assert (ROOT / file).exists()
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    assert set(re.findall(r"uv run fedaccord (\w+)", text)) <= set(group.commands)


def test_slow_tests_run_only_if_they_are_asked_for(pytestconfig: pytest.Config) -> None:
    """`uv run pytest tests/strategies` would run the whole suite once more, with a method more."""
    assert "uv run pytest tests/strategies" in (ROOT / "CONTRIBUTING.md").read_text()
    assert pytestconfig.getini("addopts")[-2:] == ["-m", "not slow"]
