"""The site of these pages: `uv run --group docs sphinx-build -W docs docs/_build`."""

import os
import re
from inspect import getsource
from pathlib import Path
from pydoc import locate

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/fedaccord/fedaccord/blob/main/"

project = "FedAccord"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # pages that begin at a lower level
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True


def links(app, name, source):
    """Links that leave docs/ lead to the repository."""
    folder = (DOCS / name).parent

    def moved(match):
        path = Path(os.path.normpath(folder / match[1]))
        inside = "://" in match[1] or path.is_relative_to(DOCS) or not path.exists()
        return match[0] if inside else f"]({REPOSITORY}{path.relative_to(ROOT)}"

    source[0] = re.sub(r"\]\(([^)#\s]+)", moved, source[0])


def as_field(match):
    return f":param {match[1].replace(', ', '/')}: "


def docstring(app, what, name, thing, options, lines):
    """Paragraphs of `name: meaning` are parameters; others with indented lines stay as they are."""
    text = "\n".join(lines).strip("\n")
    if text.startswith("Alias for field number"):  # of a NamedTuple: the comment is the meaning
        owner, _, field = name.rpartition(".")
        found = re.search(rf"^    {field}: .*?  # (.*)", getsource(locate(owner)), re.MULTILINE)
        text = found[1] if found else ""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if re.match(r"\w+(, \w+)*: ", paragraph):
            fields = re.sub(r"^(\w+(?:, \w+)*): ", as_field, paragraph, flags=re.MULTILINE)
            paragraphs.append(re.sub(r"^(?![:\s])", "    ", fields, flags=re.MULTILINE))
        elif re.search(r"^\s", paragraph, re.MULTILINE):
            paragraphs.append("::\n\n" + re.sub(r"^", "    ", paragraph, flags=re.MULTILINE))
        else:
            paragraphs.append(paragraph)
    lines[:] = [*"\n\n".join(paragraphs).split("\n"), ""]


def setup(app):
    app.connect("source-read", links)
    app.connect("autodoc-process-docstring", docstring)
