"""What the README promises is there."""

import re
from pathlib import Path

from fedaccord.cli import methods_markdown

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_methods_is_true() -> None:
    """`fedaccord methods --markdown` prints it anew."""
    assert methods_markdown().strip() in README


def test_its_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
