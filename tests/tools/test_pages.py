"""The pages of docs/methods: each has all parts of the docstring of its method or plug-in."""

import ast
import re
from pathlib import Path
from typing import Any

import pages
import pytest

import fedaccord
from fedaccord.cli.about import DIFFER, WHEN, about
from fedaccord.cli.settings import read_settings
from fedaccord.config import RunConfig, default_plugins
from fedaccord.core.options import options
from fedaccord.federation.settings import own_options
from fedaccord.plugins import PLUGINS
from fedaccord.plugins.gossip import Gossip
from fedaccord.strategies import BUILT_IN

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "methods"
KINDS = {**BUILT_IN, **PLUGINS}


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text()


@pytest.mark.parametrize("name", KINDS)
def test_a_docstring_has_the_parts_of_a_page(name: str) -> None:
    docstring = about(KINDS[name])
    assert any(paragraph.startswith("    ") for paragraph in docstring.body), "no listing"
    assert docstring.when, f"no paragraph that begins with {WHEN!r}"
    assert docstring.differ, f"no paragraph that begins with {DIFFER!r}"
    assert docstring.source[-1] == docstring.when[-1] == docstring.differ[-1] == "."


@pytest.mark.parametrize("name", KINDS)
def test_a_page_has_every_key_and_the_listing_letter_by_letter(name: str) -> None:
    text, kind = page(name), KINDS[name]
    for field in own_options(BUILT_IN[name]) if name in BUILT_IN else options(kind):
        assert f"| `{name}.{field.name.replace('_', '-')}` |" in text
    for plugin in default_plugins(BUILT_IN[name]) if name in BUILT_IN else ():
        (key,) = (key for key, kind in PLUGINS.items() if type(plugin) is kind)
        strength = options(type(plugin))[0].name
        value = pages._text(getattr(plugin, strength))
        assert f"| `{key}.{strength}` | `auto`, here `{value}` |" in text
    for paragraph in about(kind).body:
        if paragraph.startswith("    "):
            assert all(line.strip() in text for line in paragraph.splitlines())


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_command_of_a_page_gives_the_method(name: str) -> None:
    (command,) = re.findall(r"^uv run fedaccord run (algo=.*)$", page(name), re.MULTILINE)
    config = RunConfig.make(read_settings(command.split()))
    assert type(config.strategy) is BUILT_IN[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_page_lists_exactly_the_refused_settings(name: str) -> None:
    """Each setting is tried: the page must list those that the method refuses."""
    settings = {
        **{f"{p}.{options(k)[0].name}": (options(k)[0].default, p) for p, k in PLUGINS.items()},
        "relaxed-init.center": ("start", "relaxed-init.center=start"),
        "weighting": ("examples", "weighting=examples"),
    }
    needs: dict[str, dict[str, Any]] = {
        "relaxed-init.center": {"relaxed-init.beta": 0.1},
        "secure-sum.method": {"local-steps": 1},
        "dp.clip": {"sampling": "bernoulli", "local-steps": 1, "dp.noise-multiplier": 1.0},
    }
    refused = re.findall(
        r"^- (?:The plug-in \[|`)(\S+?)(?:\]\(\S+|`) is refused: ", page(name), re.M
    )
    base = {"algo": name, "fraction-train": 1.0}
    if Gossip in map(type, default_plugins(BUILT_IN[name])):
        del settings["gossip.topology"]
    for key, (value, label) in settings.items():
        extra = needs.get(key, {})
        try:
            RunConfig.make({**base, **extra, key: value})
        except ValueError:
            plugin_refused = "relaxed-init" in refused and key == "relaxed-init.center"
            assert label in refused or plugin_refused, f"{key}={value}"
        else:
            assert label not in refused, f"{key}={value}"


@pytest.mark.parametrize("name", [name for name, it in BUILT_IN.items() if pages._arguments(it)])
def test_python_arguments_of_a_page_are_arguments(name: str) -> None:
    (call,) = re.findall(r"are arguments too: `\w+\((.*)\)`", page(name))
    pairs = re.findall(r"(\w+)=([\d.]+)", call)
    arguments = {key: ast.literal_eval(value) for key, value in pairs}
    method = BUILT_IN[name](fraction_train=1.0, **arguments)
    assert [*map(type, method.active_plugins)] == [*map(type, default_plugins(type(method)))]


def test_a_page_of_results_in_a_docstring_is_a_link() -> None:
    assert "([claims](../results/claims.md))" in page("fedinit")
    assert pages._prose("see docs/results/full-length.md.") == (
        "see [full-length](../results/full-length.md)."
    )


def test_the_targets_of_links_exist() -> None:
    for path in FOLDER.iterdir():
        links = re.findall(r"\]\(([^)#]+)", path.read_text())
        assert links
        broken = [x for x in links if "://" not in x and not (FOLDER / x).exists()]
        assert not broken, path.name


def test_tables_have_as_many_cells_as_columns() -> None:
    for path in FOLDER.iterdir():
        for table in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE):
            cells = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(cells) == 1, path.name


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "dp"])
def test_the_value_that_a_page_names_for_off_is_off(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text()
    key, value = re.findall(r"`[\w-]+\.([\w-]+)` = `auto` is .* it is off, `([\w-]+)`", text)[0]
    field = next(f for f in options(PLUGINS[name]) if f.name == key.replace("-", "_"))
    off: Any = {field.name: value if isinstance(field.default, str) else float(value)}
    assert PLUGINS[name](**off).is_off


def test_the_api_page_has_all_public_names() -> None:
    """That each can be imported is checked by sphinx-build."""
    named = re.findall(r"^\.\. auto\w+:: (\S+)$", (FOLDER.parent / "api.md").read_text(), re.M)
    assert {f"fedaccord.{name}" for name in fedaccord.__all__ if name[0] != "_"} <= {*named}
    assert {f"fedaccord.plugins.{kind.__name__}" for kind in PLUGINS.values()} <= {*named}


def test_the_pictures_of_the_gallery_are_small_and_shown() -> None:
    docs = FOLDER.parent
    text = (docs / "gallery.md").read_text()
    pictures = {path.relative_to(docs).as_posix(): path for path in (docs / "gallery").iterdir()}
    assert {*re.findall(r"!\[.+\]\((.+)\)", text)} == {*pictures}
    assert {name for name, path in pictures.items() if path.stat().st_size > 200_000} == set()
    for sweep in re.findall(r"fedaccord sweep (\S+)", text):
        assert (docs.parent / sweep).is_file()
