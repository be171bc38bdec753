"""The docstring of a method's or plug-in's file in its parts."""

import inspect
import re
import sys
from typing import NamedTuple

WHEN, DIFFER = "When to use: ", "Where we differ: "  # prefixes of their paragraphs
ARXIV = r"arXiv:(\d{4}\.\d{4,5})"


class About(NamedTuple):
    """The docstring of a method's or plug-in's file, in its parts."""

    title: str  # "FedSAM: FedAvg with SAM (see sam.py)"
    source: str  # authors, venue, number
    arxiv: str  # the paper's number; empty: none
    body: list[str]  # listings, indented, and remarks
    when: str
    differ: str


def about(kind: type) -> About:
    """The paragraphs of the docstring of ``kind``'s module: title, source, then in any order.

    If it has no docstring, as it may be in another package, the title is the name of ``kind``.
    """
    text = inspect.getdoc(sys.modules[kind.__module__]) or kind.__name__
    title, source, *rest = [
        *(p if p.startswith(" ") else " ".join(p.split()) for p in re.split(r"\n\s*\n", text)),
        "",
    ]
    arxiv = re.search(ARXIV, source)
    return About(
        title=title.rstrip("."),
        source=source,
        arxiv=arxiv[1] if arxiv else "",
        body=[p for p in rest if p and not p.startswith((WHEN, DIFFER))],
        when=next((p.removeprefix(WHEN) for p in rest if p.startswith(WHEN)), ""),
        differ=next((p.removeprefix(DIFFER) for p in rest if p.startswith(DIFFER)), ""),
    )


def file(kind: type) -> str:
    """The path of a method's or plug-in's file from the repository root."""
    return kind.__module__.replace(".", "/") + ".py"
